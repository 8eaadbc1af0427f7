"""Looks at the processes of this machine, and waits for what they do.

A test marks all processes of a job by a variable with a value that nobody else has, and
finds them by it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60
PAUSE_S = 0.05


def pids() -> Iterator[int]:
    """All processes; some may end meanwhile."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def command(pid: int) -> str:
    """The command line of a process; empty for one that has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
        return text.replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def environment(pid: int) -> dict[str, str]:
    """The variables a process began with; none of one that has ended, or is secret."""
    with contextlib.suppress(OSError):
        pairs = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {}


def environments(name: str, value: str) -> dict[int, dict[str, str]]:
    """Pid and variables of each living process with exactly this variable."""
    found = {pid: environment(pid) for pid in pids()}
    return {pid: env for pid, env in found.items() if env.get(name) == value}


def marked(name: str, value: str) -> dict[int, str]:
    """Pid and command line of each living process with exactly this variable."""
    return {pid: command(pid) for pid in environments(name, value)}


def wait_until(
    condition: Callable[[], Any],
    what: str | Callable[[], str],
    limit_s: float = LIMIT_S,
    pause_s: float = PAUSE_S,
) -> Any:
    """Return the first true value of `condition()`.

    Parameters
    ----------
    what : str or callable
        What does not come, for the message of a failure; called only then.
    limit_s : float
        When it fails.
    pause_s : float
        Between two looks, so that it takes no processor time from the job.
    """
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        pause.wait(pause_s)
    pytest.fail(f"not within {limit_s} s: {what if isinstance(what, str) else what()}")


def wait_until_none(
    processes: Callable[[], Any], where: str, limit_s: float = LIMIT_S
) -> None:
    """Wait until `processes()` finds nothing any more."""
    left: list[Any] = [None]

    def is_over() -> bool:
        left[0] = processes()
        return not left[0]

    wait_until(is_over, lambda: f"the end of {left[0]} {where}", limit_s)
