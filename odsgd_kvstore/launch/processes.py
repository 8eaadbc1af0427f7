"""Starts the roles of a job, passes on their output, and ends all of them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import EXIT_LOST, Failure, JobResult
from odsgd_kvstore.launch.children import Child, Guard
from odsgd_kvstore.launch.commands import Role
from odsgd_kvstore.launch.network import Network
from odsgd_kvstore.launch.output import LineSplitter, print_line
from odsgd_kvstore.launch.remote import HostLost, RemoteAgent, RemoteProcess
from odsgd_kvstore.launch.signals import Stopped, StopSignals

LAST_LINES, LAST_LINE_CHARS = 30, 2000
DRAIN_S = 0.5
FOREVER = float("inf")
EXIT_TIMEOUT, EXIT_BROKEN_PIPE = 124, 141


class _LocalProcess(Child):
    """A role that is this process's own child."""

    loss = ""

    def __init__(self, role: Role, network: Network, events: queue.SimpleQueue) -> None:
        self.role = role
        entry, files = network.entry(role.link)
        super().__init__(role.argv, role.env, cwd=role.cwd, entry=entry, files=files)
        _in_thread(lambda: events.put(("exit", (self, self.wait()))))


def _in_thread(function: Callable, *args: Any) -> threading.Thread:
    """Start a thread that does not hold up the end of the program."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


class _Job:
    """The state of a job while it runs. `watch` and `end` run in one thread."""

    def __init__(
        self,
        events: Any,
        on_line: Callable,
        grace_s: float,
        sockets: Sequence[str],
        hosts: Mapping[str, Sequence[RemoteAgent]],
    ) -> None:
        self.events, self.on_line = events, on_line
        self.hosts = {label: list(agents) for label, agents in hosts.items()}
        self.grace_s, self.sockets = grace_s, sockets
        self.network = Network(())
        self.processes: list[_LocalProcess | RemoteProcess] = []
        # How the job ends, once that is clear: exit code, message, first failure.
        self.ending: tuple[int, str, Failure | None] | None = None
        self.output_error: BaseException | None = None
        # The first server to leave its peers.
        self._early: _LocalProcess | RemoteProcess | None = None
        self._early_deadline = FOREVER
        self._lock = threading.Lock()
        # Lines from before the table of roles; None once that is out.
        self._held: list[tuple[Any, str]] | None = []
        self._stop_read, self._stop_write = os.pipe()
        self._guard = Guard(sockets)

    def start(self, role: Role, stop: StopSignals | None) -> None:
        """Start a role; one that can't be started is a failure."""
        try:
            process = self._start(role, stop)
        except Stopped:
            return  # Its signal is among the events.
        except HostLost as error:
            failure = Failure.of_loss(role.name, None, error.loss, (), role.host)
            self.ending = failure.exit_code, str(failure), failure
            return
        except (OSError, ValueError, LaunchError) as error:
            failure = Failure.of_start(role.name, role.argv, error)
            self.ending = failure.exit_code, str(failure), failure
            return
        process.last_lines = deque(maxlen=LAST_LINES)
        self.processes.append(process)
        process.reader = _in_thread(self._read, process)

    def _start(
        self, role: Role, stop: StopSignals | None
    ) -> _LocalProcess | RemoteProcess:
        """Start a role here, or at one of its host's agents: each in its turn."""
        if not role.host:
            process = _LocalProcess(role, self.network, self.events)
            self._guard.add(process.pid)
            return process
        agents = self.hosts[role.host]
        agents.append(agents.pop(0))
        return agents[-1].start(role, self.events, stop)

    def _read(self, process: _LocalProcess | RemoteProcess) -> None:
        """Pass on the lines of a role until its output ends or we stop."""
        splitter = LineSplitter()
        process.read(
            self._stop_read,
            lambda data: self._show(process, splitter.feed(data, time.monotonic())),
        )
        self._show(process, splitter.close())

    def _show(
        self, process: _LocalProcess | RemoteProcess, lines: Sequence[str]
    ) -> None:
        """Give whole lines to `on_line`, from one reader at a time."""
        for line in lines:
            with self._lock:
                process.last_lines.append(line[:LAST_LINE_CHARS])
                if self._held is not None:
                    self._held.append((process, line))
                else:
                    self._write(process, line)

    def _write(self, process: _LocalProcess | RemoteProcess, line: str) -> None:
        """Give a line to `on_line`, unless the output has failed."""
        if self.output_error is None:
            try:
                self.on_line(process.role, line)
            except BaseException as error:  # Raised again by `run_roles`.
                self.output_error = error
                self.events.put(("output", error))

    def release(self, on_started: Callable | None) -> None:
        """Show the table of roles, then the lines that came before it."""
        with self._lock:
            if on_started is not None and self.ending is None:
                on_started({p.role.name: p.pid for p in self.processes})
            held, self._held = self._held, None
            for process, line in held:
                self._write(process, line)

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

    def _on_exit(self, value: tuple[Any, int]) -> None:
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

    def _fail(self, process: _LocalProcess | RemoteProcess) -> None:
        """Name the first role that failed, with the end of its output."""
        process.reader.join(DRAIN_S)
        name, lines = process.role.name, tuple(process.last_lines)
        pid, code, host = process.pid, process.exit_code, process.role.host
        failure = Failure.of_exit(name, pid, code, lines, host)
        if process.loss:
            failure = Failure.of_loss(name, pid, process.loss, lines, host)
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
        names = ", ".join(f"{p.role.name} ({_where(p)})" for p in live)
        text = f"the job did not end within {limit_s:g} s (--timeout); still running"
        self.ending = EXIT_TIMEOUT, f"{text}: {names}", None
        for process in live if number is not None else ():
            if process.role.kind in kinds:
                process.poke(number)
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
        if self.ending is None or self.ending[0] >= EXIT_TIMEOUT:
            for process in self.processes:
                process.discard()  # So that no full output holds up the end.
        steps = [(signal.SIGTERM, self.grace_s, 0.0), (signal.SIGKILL, 9.0, 9.0)]
        for number, wait_s, hurry_s in steps:
            for process in self.processes:
                process.send(number)
            self._pause(wait_s, lambda: any(p.lives() for p in self.processes), hurry_s)
        self._pause(DRAIN_S, self._any_reads)
        os.close(self._stop_write)  # A child outside our groups may hold a pipe.
        for agent in {agent for agents in self.hosts.values() for agent in agents}:
            agent.finish(self.ending[0] if self.ending else EXIT_LOST)
        # An output that takes nothing holds us up only while nobody wants the end.
        patience = FOREVER if self.ending and self.ending[0] < EXIT_TIMEOUT else 1.0
        self._pause(patience, self._any_reads)
        if not self._any_reads():
            os.close(self._stop_read)
        for path in self.sockets:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._guard.close()
        self.network.close()


def _where(process: _LocalProcess | RemoteProcess) -> str:
    """'pid 12', 'pid 12 on node1'."""
    host = process.role.host
    return f"pid {process.pid} on {host}" if host else f"pid {process.pid}"


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
    stop: StopSignals | None = None,
    hosts: Mapping[str, Sequence[RemoteAgent]] | None = None,
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
    stop : StopSignals, optional
        Asks for the end; its own object for each call.
    hosts : mapping of str to sequence of RemoteAgent, optional
        The agents by `Role.host`; of several, each starts a role in turn. They end
        with the job.

    Returns
    -------
    JobResult
        Of the first role to fail, if one did.

    Raises
    ------
    LaunchError
        The roles have links, and these could not be made; no role was started.
    """
    started = time.monotonic()
    deadline = FOREVER if timeout is None else started + timeout
    events = queue.SimpleQueue() if stop is None else stop.events
    job = _Job(events, on_line, grace_s, sockets, hosts or {})
    try:
        job.network = Network([role.link for role in roles if role.link])
        for role in roles:
            is_late = time.monotonic() > deadline or (stop and stop.requested)
            if job.ending is None and not is_late:
                job.start(role, stop)
        job.release(on_started)
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
