"""Starts the roles of a job, passes on their output, and ends all of them."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from odsgd_kvstore.launch import Failure, JobResult
from odsgd_kvstore.launch.commands import Role
from odsgd_kvstore.launch.network import Network
from odsgd_kvstore.launch.output import LineSplitter, print_line
from odsgd_kvstore.launch.shims import guard_argv, shim_argv

LAST_LINES, LAST_LINE_CHARS = 30, 2000
DRAIN_S = 0.5
FOREVER = float("inf")
EXIT_TIMEOUT, EXIT_BROKEN_PIPE = 124, 141


class _Process:
    """A started role; its process group is named by its pid."""

    def __init__(self, role: Role, network: Network) -> None:
        self.role = role
        entry, files = network.entry(role.link)
        self.popen = subprocess.Popen(
            [*entry, *shim_argv(os.getpid(), role.argv)],
            pass_fds=files,
            env=dict(role.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self.popen.pid
        self.exit_code: int | None = None  # Written by the thread of `run_roles`.
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._group_ended = False

    def wait(self, events: queue.SimpleQueue) -> None:
        """Tell `events` of the end at once. Leaves a zombie, so the pid stays ours."""
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            code = end.si_status * (1 if end.si_code == os.CLD_EXITED else -1)
        except ChildProcessError:
            code = 255  # Somebody else in this program took the exit code.
        events.put(("exit", (self, code)))

    def lives(self) -> bool:
        """Whether the role or a child in its process group still runs."""
        if self.exit_code is not None and not self._group_ended:
            self.popen.wait()
            self._group_ended = not _group_lives(self.pid)
        return not self._group_ended

    def send(self, number: int) -> None:
        """Signal the process group."""
        if self.lives():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


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


def _in_thread(function: Callable, *args: Any) -> threading.Thread:
    """Start a thread that does not hold up the end of the program."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


class _Job:
    """The state of a job while it runs. `watch` and `end` run in one thread."""

    def __init__(
        self, events: Any, on_line: Callable, grace_s: float, sockets: Sequence[str]
    ) -> None:
        self.events, self.on_line = events, on_line
        self.grace_s, self.sockets = grace_s, sockets
        self.network = Network(())
        self.processes: list[_Process] = []
        # How the job ends, once that is clear: exit code, message, first failure.
        self.ending: tuple[int, str, Failure | None] | None = None
        self.output_error: BaseException | None = None
        self._early: _Process | None = None  # The first server to leave its peers.
        self._early_deadline = FOREVER
        self.lock = threading.Lock()
        self._stop_read, self._stop_write = os.pipe()
        self._guard = subprocess.Popen(
            guard_argv(sockets), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
        )  # fmt: skip

    def start(self, role: Role) -> None:
        """Start a role; one that can't be started is a failure."""
        try:
            process = _Process(role, self.network)
        except (OSError, ValueError) as error:
            failure = Failure.of_start(role.name, role.argv, error)
            self.ending = failure.exit_code, str(failure), failure
            return
        self.processes.append(process)
        process.reader = _in_thread(self._read, process)
        _in_thread(process.wait, self.events)
        with contextlib.suppress(OSError):
            self._guard.stdin.write(b"%d\n" % process.pid)

    def _read(self, process: _Process) -> None:
        """Pass on the lines of a role until its pipe is closed or we stop."""
        splitter, poll = LineSplitter(), select.poll()
        with process.popen.stdout as pipe:
            fd = pipe.fileno()
            poll.register(fd, select.POLLIN)
            poll.register(self._stop_read, select.POLLIN)
            data, stop = b"-", False
            while data and not stop:
                ready = [ready for ready, _ in poll.poll()]
                stop = self._stop_read in ready
                data = os.read(fd, 1 << 16) if fd in ready else b""
                self._show(process, splitter.feed(data, time.monotonic()))
        self._show(process, splitter.close())

    def _show(self, process: _Process, lines: Sequence[str]) -> None:
        """Give whole lines to `on_line`, from one reader at a time."""
        for line in lines:
            with self.lock:
                process.last_lines.append(line[:LAST_LINE_CHARS])
                if self.output_error is None:
                    try:
                        self.on_line(process.role, line)
                    except BaseException as error:  # Raised again by `run_roles`.
                        self.output_error = error
                        self.events.put(("output", error))

    def watch(self, deadline: float) -> None:
        """Wait until it is clear how the job ends, or until the deadline."""
        while self.ending is None:
            until = min(deadline, self._early_deadline)
            left = None if until == FOREVER else max(0.0, until - time.monotonic())
            try:
                kind, value = self.events.get(timeout=left)
            except queue.Empty:
                if until == deadline:
                    return
                self._out_of_patience()
            else:
                getattr(self, f"_on_{kind}")(value)

    def _on_exit(self, value: tuple[_Process, int]) -> None:
        """Note the end of a role and what it means for the job."""
        process, process.exit_code = value
        kinds = {p.role.kind for p in self.processes if p.exit_code is None}
        limit = time.monotonic() + self.grace_s
        if process.exit_code != 0:
            self._fail(process)
        elif not kinds:
            self.ending = 0, "", None
        elif kinds == {"worker"}:
            # All stores are closed and some workers go on without: a regular end.
            self._early_deadline = FOREVER
        elif process.role.kind != "worker":  # The other servers have to follow now.
            self._early = self._early or process
            self._early_deadline = min(limit, self._early_deadline)
        elif "worker" not in kinds:
            self._early_deadline = limit

    def _out_of_patience(self) -> None:
        """The servers did not end in time with the workers or with each other."""
        if any(p.role.kind == "worker" and p.exit_code is None for p in self.processes):
            self._fail(self._early)
        else:  # The command made no store, so nobody told the servers to end.
            self.ending = 0, "", None

    def _fail(self, process: _Process) -> None:
        """Name the first role that failed, with the end of its output."""
        process.reader.join(DRAIN_S)
        name, lines = process.role.name, tuple(process.last_lines)
        failure = Failure.of_exit(name, process.pid, process.exit_code, lines)
        self.ending = failure.exit_code, str(failure), failure

    def _on_signal(self, number: int) -> None:
        text = f"the job was ended by {signal.Signals(number).name}"
        self.ending = 128 + number, text, None

    def _on_output(self, error: BaseException) -> None:
        broken = isinstance(error, BrokenPipeError)
        self.ending = EXIT_BROKEN_PIPE if broken else 1, f"no output: {error}", None

    def time_out(self, limit_s: float, number: int | None, kinds: Sequence) -> None:
        """Name who still runs; signal `number` asks `kinds` for their stacks."""
        live = [p for p in self.processes if p.exit_code is None]
        names = ", ".join(f"{p.role.name} (pid {p.pid})" for p in live)
        text = f"the job did not end within {limit_s:g} s (--timeout); still running"
        self.ending = EXIT_TIMEOUT, f"{text}: {names}", None
        for process in live if number is not None else ():
            if process.role.kind in kinds:
                os.kill(process.pid, number)  # Not reaped yet, so it is ours.
        self._pause(0.0 if number is None else 1.0, self._any_reads)

    def _pause(self, seconds: float, needed: Callable, hurry_s: float = 0.0) -> None:
        """Wait while `needed` and note who ends; a signal makes us hurry."""
        deadline = time.monotonic() + seconds
        while needed():
            left, kind, value = deadline - time.monotonic(), "", None
            with contextlib.suppress(queue.Empty):
                kind, value = self.events.get(timeout=min(max(left, 0.0), 0.02))
            if kind == "exit":
                process, process.exit_code = value
            elif kind == "signal":
                deadline = min(deadline, time.monotonic() + hurry_s)
            elif left <= 0:
                return

    def _any_reads(self) -> bool:
        return any(p.reader.is_alive() for p in self.processes)

    def end(self) -> None:
        """TERM, KILL after the grace, reap: our own process groups and no others."""
        steps = [(signal.SIGTERM, self.grace_s, 0.0), (signal.SIGKILL, 9.0, 9.0)]
        for number, wait_s, hurry_s in steps:
            for process in self.processes:
                process.send(number)
            self._pause(wait_s, lambda: any(p.lives() for p in self.processes), hurry_s)
        self._pause(DRAIN_S, self._any_reads)
        os.close(self._stop_write)  # A child outside our groups may hold a pipe.
        # An output that takes nothing holds us up only while nobody wants the end.
        patience = FOREVER if self.ending and self.ending[0] < EXIT_TIMEOUT else 1.0
        self._pause(patience, self._any_reads)
        if not self._any_reads():
            os.close(self._stop_read)
        for path in self.sockets:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._guard.kill()
        self._guard.communicate()
        self.network.close()


def run_roles(
    roles: Sequence[Role],
    *,
    on_line: Callable[[Role, str], None] = print_line,
    timeout: float | None = None,
    grace_s: float = 5.0,
    sockets: Sequence[str] = (),
    on_started: Callable[[Mapping[str, int]], None] | None = None,
    dump_signal: int | None = None,
    dump_kinds: Sequence[str] = ("worker",),
    stop: Any = None,
) -> JobResult:
    """Start the roles, wait, end all of them, and say how the job ended.

    Returns when no process is left. The first role to fail ends the job. Once all
    workers have exited with 0, the others have `grace_s` to follow.

    Parameters
    ----------
    roles : sequence of Role
        Started in this order.
    on_line : callable
        Takes a role and a line of its output; from threads, one call at a time.
    timeout, grace_s : float
        Seconds for the whole job (None: no limit), and between TERM and KILL.
    sockets : sequence of str
        Files to remove at the end.
    on_started : callable, optional
        Takes the pids by role name, before the first line.
    dump_signal : int, optional
        Sent at the timeout to the live roles of `dump_kinds`, a second before TERM.
    stop : odsgd_kvstore.launch.cli.StopSignals, optional
        Asks for the end; its own object for each call.

    Raises
    ------
    LaunchError
        The roles have links, and these could not be made; no role was started.
    """
    started = time.monotonic()
    deadline = FOREVER if timeout is None else started + timeout
    events = queue.SimpleQueue() if stop is None else stop.events
    job = _Job(events, on_line, grace_s, sockets)
    try:
        with job.lock:  # No line before the table of roles.
            job.network = Network([role.link for role in roles if role.link])
            for role in roles:
                if job.ending is None and not (stop and stop.requested):
                    job.start(role)
            if on_started is not None and job.ending is None:
                on_started({p.role.name: p.pid for p in job.processes})
        job.watch(deadline)
        timed_out = job.ending is None
        if timed_out:
            job.time_out(timeout, dump_signal, dump_kinds)
    finally:
        job.end()
    if job.output_error and not isinstance(job.output_error, BrokenPipeError):
        raise job.output_error
    lines = {p.role.name: tuple(p.last_lines) for p in job.processes}
    return JobResult(*job.ending, timed_out, lines, time.monotonic() - started)
