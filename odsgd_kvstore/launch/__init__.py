"""Starts the scheduler, the servers and the workers of a job, and ends them.

Nothing here imports MXNet, so that ``--help`` and ``--dry-run`` work without it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EXIT_LOST = 255


@dataclass(frozen=True)
class Failure:
    """The first role to fail.

    Parameters
    ----------
    role : str
        Its name, such as 'worker 1'.
    pid : int or None
        None if it could not be started.
    exit_code : int
        As a shell gives it: 128 + n for signal n. Never 0.
    reason : str
        'failed with exit code 3'.
    last_lines : tuple of str
        The end of its output.
    host : str
        Where it ran; '' for this machine.
    """

    role: str
    pid: int | None
    exit_code: int
    reason: str
    last_lines: tuple[str, ...]
    host: str = ""

    @classmethod
    def of_exit(
        cls, role: str, pid: int, code: int, lines: Sequence[str], host: str = ""
    ) -> Failure:
        """Describe an exit; `code` is -n for signal n, 0 for an exit too early."""
        if code < 0:
            known = -code in {number.value for number in signal.Signals}
            name = signal.Signals(-code).name if known else "real-time"
            reason, code = f"was ended by signal {-code} ({name})", 128 - code
        elif code > 0:
            reason = f"failed with exit code {code}"
        else:
            reason, code = "ended (exit code 0) before the workers were done", 1
        return cls(role, pid, code, reason, tuple(lines), host)

    @classmethod
    def of_loss(
        cls, role: str, pid: int | None, loss: str, lines: Sequence[str], host: str
    ) -> Failure:
        """Describe a role whose host is lost; the code is that of ssh."""
        return cls(role, pid, EXIT_LOST, f"was lost: {loss}", tuple(lines), host)

    @classmethod
    def of_start(cls, role: str, argv: Sequence[str], error: Exception) -> Failure:
        """Describe a role that could not be started; the code is that of a shell."""
        missing = isinstance(error, FileNotFoundError)
        code = 127 if missing or getattr(error, "is_missing", False) else 126
        reason = f"could not be started as {argv[0]!r}: {error}"
        return cls(role, None, code, reason, ())

    def __str__(self) -> str:
        if self.pid is None:
            return f"{self.role} {self.reason}"
        who = f"{self.role} (pid {self.pid}{self.host and f' on {self.host}'})"
        if not self.last_lines:
            return f"{who} {self.reason}; it wrote nothing"
        lines = "\n".join(f"    {line}" for line in self.last_lines)
        return f"{who} {self.reason}; its last lines were:\n{lines}"


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Parameters
    ----------
    exit_code : int
        For the launcher: 0, that of the first failure, 124 after the time limit,
        128 + n after signal n, 141 if the output was closed.
    message : str
        Why it is not 0; empty if it is.
    first_failure : Failure or None
        The role that ended the job.
    timed_out : bool
        The time limit ended the job.
    last_lines : mapping of str to tuple of str
        Up to 30 lines for each role, by name.
    seconds : float
        From the start to the end.
    """

    exit_code: int
    message: str
    first_failure: Failure | None
    timed_out: bool
    last_lines: Mapping[str, tuple[str, ...]]
    seconds: float
