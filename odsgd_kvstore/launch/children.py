"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from odsgd_kvstore.launch.shims import guard_argv, shim_argv


class Child:
    """A process that was started here; its process group is named by its pid.

    It ends with the thread that made this object: make it in one that lives as long
    as the job.

    Parameters
    ----------
    argv : sequence of str
        Program and arguments.
    env : mapping of str to str
        The whole environment.
    cwd : str, optional
        Working folder.
    entry, files : sequence of str, of int
        What goes before the program, and the files that it inherits.

    Raises
    ------
    OSError, ValueError
        It could not be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: str | None = None,
        entry: Sequence[str] = (),
        files: Sequence[int] = (),
    ) -> None:
        self._popen = subprocess.Popen(
            [*entry, *shim_argv(os.getpid(), argv)],
            pass_fds=files,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.exit_code: int | None = None
        self._group_ended = False

    def wait(self) -> int:
        """Return the exit code, -n for signal n, once the process has ended.

        Leaves a zombie, so that the pid stays ours; the caller notes `exit_code`.
        """
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            return end.si_status * (1 if end.si_code == os.CLD_EXITED else -1)
        except ChildProcessError:
            return 255  # Somebody else in this program took the exit code.

    def lives(self) -> bool:
        """Whether the process or a child in its process group still runs."""
        if self.exit_code is not None and not self._group_ended:
            self._popen.wait()
            self._group_ended = not _group_lives(self.pid)
        return not self._group_ended

    def send(self, number: int) -> None:
        """Signal the process group."""
        if self.lives():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def discard(self) -> None:
        """Nothing to do: what it writes waits in its pipe."""

    def poke(self, number: int) -> None:
        """Signal the process alone, unless its end is known: then it may be reaped."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def read(self, stop: int, on_data: Callable[[bytes], None]) -> None:
        """Pass on the output until its pipe is closed or the file `stop` is."""
        poll = select.poll()
        with self._popen.stdout as pipe:
            fd = pipe.fileno()
            poll.register(fd, select.POLLIN)
            poll.register(stop, select.POLLIN)
            data, is_stopped = b"-", False
            while data and not is_stopped:
                ready = [ready for ready, _ in poll.poll()]
                is_stopped = stop in ready
                data = os.read(fd, 1 << 16) if fd in ready else b""
                on_data(data)


class Guard:
    """Ends process groups after the death of the process that made it.

    Parameters
    ----------
    paths : sequence of str
        Files to remove then.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._popen = subprocess.Popen(
            guard_argv(paths), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
        )  # fmt: skip

    def add(self, pid: int) -> None:
        """Watch over the group of that name too."""
        with contextlib.suppress(OSError):
            self._popen.stdin.write(b"%d\n" % pid)

    def close(self) -> None:
        """Let the groups be; returns when the guard has ended."""
        self._popen.kill()
        self._popen.communicate()


def _group_lives(group: int) -> bool:
    """Whether a group has more than zombies: some init processes collect no orphans."""
    try:
        os.killpg(group, 0)
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return False
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            state, _, owner = file.read().rpartition(b")")[2].split()[:3]
            if int(owner) == group and state not in (b"Z", b"X"):
                return True
    return False


def end_all(
    children: Sequence[Child], pause: Callable[[float, Callable[[], bool]], None]
) -> None:
    """TERM, KILL after five seconds: the groups of `children` and no others.

    Parameters
    ----------
    pause : callable
        Waits for at most so many seconds, while the function that it gets says so.
    """
    for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 9.0)):
        for child in children:
            child.send(number)
        pause(wait_s, lambda: any(child.lives() for child in children))
