"""Programs and network devices of the test beds."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PLACES = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # Users' own lacks these.


def need(*programs: str) -> None:
    """Skip where a program is missing."""
    missing = [name for name in programs if shutil.which(name, path=PLACES) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (see scripts/setup-cluster)")


@contextlib.contextmanager
def or_skip(what: str, log: Path) -> Iterator[None]:
    """Skip, with the end of its log, where a program of a bed can't be started."""
    try:
        yield
    except (RuntimeError, pytest.fail.Exception) as error:
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = "; ".join(line.strip() for line in lines[-3:] if line.strip())
        pytest.skip(f"{what} cannot be had on this machine ({error}) {last}")


def run(
    *argv: str,
    text: str = "",
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a short command; return its output."""
    done = subprocess.run(
        argv,
        input=text,
        env={**os.environ, "PATH": PLACES, **(env or {})},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def end(popen: subprocess.Popen) -> None:
    """End a host: its first process, and with it all others."""
    popen.kill()
    popen.communicate(timeout=20)


def which(name: str) -> str:
    """The path of a program; sshd has to be started by it."""
    return shutil.which(name, path=PLACES) or name


def device(kind: str, number: int) -> str:
    """The name of a network device of this process."""
    return f"odt{os.getpid()}{kind}{number}"


def free_networks() -> int:
    """A number n, so that 198.19.n.0/24 and the next one are in nobody's use."""
    taken = (
        run("ip", "-4", "route", check=False) if shutil.which("ip", path=PLACES) else ""
    )
    numbers = [(2 * (os.getpid() + i)) % 256 for i in range(128)]
    return next(n for n in numbers if f"198.19.{n}." not in taken)


def remove_old() -> None:
    """Remove the networks of a process that was killed."""
    for name in os.listdir("/sys/class/net"):
        match = re.match(r"odt(\d+)[bv]\d$", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            run("ip", "link", "del", name, check=False)
