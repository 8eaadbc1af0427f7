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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from watch import command, environments, pids, wait_until

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
DIGITS = str(Path(__file__).with_name("digits_weights.py"))
LAUNCH = (sys.executable, "-m", "odsgd_kvstore.launch")
LIMIT_S = 180
MARK = "MXNET_ODTEST_MARK"  # A variable that is forwarded to other hosts.


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

        return wait_until(found, pattern, LIMIT_S)

    def shows(self, secret: str) -> bool:
        """Wait for the end; whether a command line or its output ever had a text."""
        found, count = False, 0
        while self.popen.poll() is None:  # As often as possible, from start to end.
            found = found or secret in self._seen()
            count += 1
        assert count > 10
        return found

    def _seen(self) -> str:
        """What anybody on this machine may read at the moment."""
        return "\n".join([*map(command, pids()), self.text(0), self.text(1)])

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


def roles(kind: str, mark: str) -> dict[int, dict[str, str]]:
    """Pid and variables of the roles of a kind whose MARK has this value."""
    found = environments(MARK, mark)
    return {pid: env for pid, env in found.items() if env.get("DMLC_ROLE") == kind}


def workers(mark: str) -> dict[int, int]:
    """The pid of each worker of a mark, by rank."""
    return {int(e["DMLC_WORKER_ID"]): pid for pid, e in roles("worker", mark).items()}
