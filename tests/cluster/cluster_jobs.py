"""Runs `odsgd-launch`, or a program that calls it, as a user would; with a limit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
DIGITS = str(Path(__file__).with_name("digits_weights.py"))
LAUNCH = (sys.executable, "-m", "odsgd_kvstore.launch")
LIMIT_S = 180
PAUSE_S = 0.05


def wait_until(condition: Callable, what: str, limit_s: float = LIMIT_S):
    """Return the first true value of `condition()`."""
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        pause.wait(PAUSE_S)  # So that it takes no processor time from the job.
    pytest.fail(f"not within {limit_s} s: {what}")


def wait_until_none(processes: Callable, where: str) -> None:
    """Wait until nothing runs any more."""
    left = []

    def none() -> bool:
        left[:] = [processes()]
        return not left[0]

    try:
        wait_until(none, "")
    except pytest.fail.Exception:
        pytest.fail(f"still running {where}: {left[0]}")


def train(*args: str) -> tuple[str, ...]:
    """The command of a worker: the training script."""
    return ("--", sys.executable, DIGITS, *args)


def environment(**more: str) -> dict[str, str]:
    """A user's environment, with the settings that make runs comparable."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "SLURM"))}
    env.pop("ODSGD_TEST_CLUSTER", None)
    # Sums of floating-point numbers depend on the number of threads.
    env.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", ODSGD_WARMUP_STEPS="4")
    return {**env, **more}


@dataclass(repr=False)
class Result:
    """How a program ended: exit code, output, standard error, seconds."""

    code: int
    output: str
    errors: str
    seconds: float

    def reports(self) -> dict[int, dict]:
        """What the training script said of each rank, as the launcher shows it."""
        found = {}
        for text in re.findall(r"REPORT (\{.*\})", self.output):
            report = json.loads(text)
            assert report["rank"] not in found, self.output
            found[report["rank"]] = report
        return found

    def check(self, sha256: str, workers: int = 2) -> dict[int, dict]:
        """The job ended well, with these weights on every rank."""
        assert self.code == 0, self
        reports = self.reports()
        assert sorted(reports) == list(range(workers)), self
        assert {report["sha256"] for report in reports.values()} == {sha256}
        return reports

    def __repr__(self) -> str:
        return f"exit code {self.code}\n{self.output}\n--- errors:\n{self.errors}"


class Job:
    """A running program whose output goes to files.

    Parameters
    ----------
    argv : sequence of str
        Program and arguments.
    env, cwd
        As of `subprocess.Popen`; the default is `environment()`.
    limit_s : float
        After this time it is killed.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.argv, self.started = list(map(str, argv)), time.monotonic()
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self.popen = subprocess.Popen(
            self.argv, stdin=subprocess.DEVNULL, stdout=self._files[0],
            stderr=self._files[1], env=dict(env or environment()), cwd=cwd,
            start_new_session=True,  # No terminal to ask for a pass phrase.
        )  # fmt: skip
        self._timer = threading.Timer(limit_s, self.popen.kill)
        self._timer.start()

    def text(self, which: int = 0) -> str:
        """What it has written so far: 0 to the output, 1 to the standard error."""
        size = os.fstat(self._files[which].fileno()).st_size
        data = os.pread(self._files[which].fileno(), size, 0)
        return data.decode(errors="replace")

    def wait_for(self, pattern: str, which: int = 0) -> re.Match:
        """Wait for a line in the output."""

        def found():
            match = re.search(pattern, self.text(which), re.MULTILINE)
            if match is None and self.popen.poll() is not None:
                pytest.fail(f"ended without {pattern!r}: {self.finish()}")
            return match

        return wait_until(found, pattern)

    def shows(self, secret: str) -> bool:
        """Wait for the end; whether a command line or its output ever had a text."""
        found, count = False, 0
        while self.popen.poll() is None:  # As often as possible, from start to end.
            found = found or secret in command_lines() + self.text(0) + self.text(1)
            count += 1
        assert count > 10
        return found

    def finish(self) -> Result:
        """Wait for the end."""
        code = self.popen.wait()
        self._timer.cancel()
        seconds = time.monotonic() - self.started
        return Result(code, self.text(0), self.text(1), seconds)

    def close(self) -> None:
        """End it if it still runs, and let go of its files."""
        if self.popen.poll() is None:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=15)
        self.popen.kill()
        self.popen.wait()
        self._timer.cancel()
        for file in self._files:
            file.close()


def command_lines() -> str:
    """The command lines of all processes of the machine."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # Ended meanwhile.
            texts.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(texts)


def environments(kind: str, mark: str) -> list[dict[str, str]]:
    """The environments of the processes of a role that carry a mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            text = path.read_bytes().decode(errors="replace")
            env = dict(x.partition("=")[::2] for x in text.split("\0") if x)
            if env.get("DMLC_ROLE") == kind and mark in text:
                found.append({**env, "pid": path.parent.name})
    return found


def marked(mark: str) -> list[int]:
    """Pids of the living processes with a mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
