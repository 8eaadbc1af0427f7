"""The controller's side of the agents: their connections, and the roles behind them."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from odsgd_kvstore._version import __version__
from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import EXIT_LOST
from odsgd_kvstore.launch.agent import ALIVE_S
from odsgd_kvstore.launch.commands import Role
from odsgd_kvstore.launch.signals import Stopped, StopSignals
from odsgd_kvstore.launch.variables import KEY_VARIABLES, STALE_ELSEWHERE

MOST_CHUNKS = 256
START_S = 60.0
LOGIN_S = 120.0  # Until the first word; `greet` has its own limit.
LOOK_S = 0.2  # How soon a signal is noticed while waiting.
HELLO_HINT = "is it overloaded, or does its shell wait for input at login?"


class RemoteAgent:
    """An agent on a host, as the controller sees it.

    Parameters
    ----------
    label : str
        The host's name in messages.
    reader, writer : multiprocessing.connection.Connection
        From and to the agent; may be the same.
    silence_s : float
        Seconds without a message after which the host counts as lost.
    why_lost : callable
        Says why the connection ended, as far as that is known; may wait a little.
    on_close : callable
        Ends what carries the connection, when that has ended or is to end.
    """

    def __init__(
        self,
        label: str,
        reader: Connection,
        writer: Connection,
        silence_s: float = 30.0,
        why_lost: Callable[[], str] = str,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.label = label
        self._reader, self._writer = reader, writer
        self._silence_s, self._why_lost, self._on_close = silence_s, why_lost, on_close
        self._lock, self._state = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue] = {}
        self._processes: dict[str, RemoteProcess] = {}
        self._ended = threading.Event()
        self.loss: str | None = None  # Why no message comes any more.
        self._hello: queue.SimpleQueue = queue.SimpleQueue()
        self._is_greeted = False
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()
        threading.Thread(target=self._say_alive, daemon=True).start()

    def greet(self, timeout_s: float, stop: StopSignals | None = None) -> None:
        """Return once the agent runs there, with the same version of this package.

        Raises
        ------
        LaunchError
            It does not; says why, and what to do.
        """
        if self._is_greeted:
            return
        answer = self._wait(self._hello, timeout_s, HELLO_HINT, stop)
        if answer["op"] == "fatal":
            raise LaunchError(
                f"{self.label}: odsgd_kvstore cannot be imported by Python "
                f"{answer['python']} there ({answer['error']}); install the same version "
                "there, or have it in a folder of PYTHONPATH, which is forwarded"
            )
        if answer["version"] != __version__:
            raise LaunchError(
                f"{self.label}: odsgd_kvstore is version {answer['version']} there, and "
                f"{__version__} here; install the same version on all hosts"
            )
        self._is_greeted = True

    def ask(
        self,
        op: str,
        timeout_s: float,
        *,
        stop: StopSignals | None = None,
        **request: Any,
    ) -> Any:
        """Return the agent's answer to a request; waits for it.

        Raises
        ------
        LaunchError
            It failed there, or there was no answer in time.
        HostLost
            No message comes from there any more.
        Stopped
            A signal came.
        """
        number, answers = next(self._numbers), queue.SimpleQueue()
        with self._state:
            if self.loss is None:
                self._answers[number] = answers
        if self.loss is not None:
            raise HostLost(self.label, self.loss)
        self.send(op=op, id=number, request=request)
        answer = self._wait(answers, timeout_s, f"asked for {op!r}", stop)
        if "error" in answer:
            raise AgentError(f"{self.label}: {answer['error']}", answer["is_missing"])
        return answer["value"]

    def _wait(
        self,
        answers: queue.SimpleQueue,
        timeout_s: float,
        hint: str,
        stop: StopSignals | None,
    ) -> Any:
        """The next answer, or why there is none."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if stop is not None:
                stop.check()
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=LOOK_S)
                if answer is None:
                    raise HostLost(self.label, self.loss or "")
                return answer
        raise LaunchError(f"{self.label}: no answer within {timeout_s:g} s ({hint})")

    def send(self, **message: Any) -> None:
        """Send a message; a loss is noticed where messages are received."""
        data = json.dumps(message).encode()
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._writer.send_bytes(data)

    def start(
        self, role: Role, events: queue.SimpleQueue, stop: StopSignals | None = None
    ) -> RemoteProcess:
        """Start a role there and return when it runs; `events` hears of its end.

        Raises
        ------
        LaunchError
            It could not be started; `HostLost` if its host is lost.
        Stopped
            A signal came.
        """
        process = RemoteProcess(role, self, events)
        self._processes[role.name] = process
        try:
            process.pid = self.ask(
                "start",
                START_S,
                stop=stop,
                role=role.name,
                argv=list(role.argv),
                env=dict(role.env),
                unset=sorted({*STALE_ELSEWHERE, *KEY_VARIABLES}),
                cwd=role.cwd,
            )["pid"]
        except (LaunchError, Stopped):
            process.lose()
            raise
        return process

    def finish(self, code: int) -> None:
        """Tell the agent to end all that it started, and how the job ended.

        Does not wait; `close` does.
        """
        self.send(op="end", code=code)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the connection; waits for the agent's own end, but not for long."""
        self.finish(EXIT_LOST)  # For an agent whose job did not come to its end.
        self._thread.join(timeout_s)
        self._ended.set()
        self._cut()

    def _receive(self) -> None:
        """Take messages until the agent ends or is lost."""
        loss = None
        try:
            while loss is None:
                limit = self._silence_s if self._is_greeted else LOGIN_S
                if self._reader.poll(limit):
                    loss = self._take(json.loads(self._reader.recv_bytes()))
                else:
                    loss = f"nothing was heard of this host for {limit:g} s"
                    self._cut()
        except (OSError, EOFError):
            loss = self._why_lost() or "the connection to this host ended"
        except Exception as error:
            loss = f"it sent what this version does not understand ({error!r})"
        self._ended.set()
        with self._state:
            self.loss = loss
            waiting = list(self._answers.values())
        for answers in [*waiting, self._hello]:
            answers.put(None)
        for process in list(self._processes.values()):
            process.lose()

    def _cut(self) -> None:
        """End the connection for good, and with it a `send` that waits for ever."""
        self._on_close()
        with contextlib.suppress(OSError, ValueError):  # A pipe, or closed already.
            with socket.socket(fileno=os.dup(self._writer.fileno())) as sock:
                sock.shutdown(socket.SHUT_RDWR)

    def _take(self, message: dict[str, Any]) -> str | None:
        """Act on a message; return why no other one comes."""
        op = message["op"]
        if op in ("hello", "fatal"):
            self._hello.put(message)
        elif op == "answer":
            self._answers.pop(message["id"]).put(message)
        elif op in ("output", "closed", "exit", "gone"):
            getattr(self._processes[message["role"]], f"on_{op}")(message)
        return "its agent has ended" if op == "ended" else None

    def _say_alive(self) -> None:
        while not self._ended.wait(ALIVE_S):
            self.send(op="alive")


class HostLost(LaunchError):
    """No message comes from a host any more."""

    def __init__(self, label: str, loss: str) -> None:
        super().__init__(f"{label}: {loss}")
        self.loss = loss


class AgentError(LaunchError):
    """A request failed on a host."""

    def __init__(self, message: str, is_missing: bool) -> None:
        super().__init__(message)
        self.is_missing = is_missing  # A file that is not there.


class RemoteProcess:
    """A role on another host, with what `children.Child` has.

    Parameters
    ----------
    role : Role
        What it is.
    agent : RemoteAgent
        Who started it.
    events : queue.SimpleQueue
        Hears of its end.
    """

    def __init__(
        self, role: Role, agent: RemoteAgent, events: queue.SimpleQueue
    ) -> None:
        self.role, self._agent, self._events = role, agent, events
        self.pid = 0
        self.exit_code: int | None = None
        self.loss = ""
        self.last_lines: deque[str] = deque()
        self._has_exited = self._is_gone = False
        self._is_over = self._is_discarded = False  # Of its output.
        self._chunks: queue.Queue[bytes] = queue.Queue(MOST_CHUNKS)

    def lives(self) -> bool:
        """Whether the role or a child in its process group is known to run."""
        return not self._is_gone

    def send(self, number: int) -> None:
        """Signal its process group."""
        self._agent.send(op="signal", role=self.role.name, number=number, group=True)

    def poke(self, number: int) -> None:
        """Signal the process alone."""
        self._agent.send(op="signal", role=self.role.name, number=number, group=False)

    def read(self, _stop: int, on_data: Callable[[bytes], None]) -> None:
        """Pass on the output until it ends; the agent ends it for the controller."""
        while True:
            try:
                data = self._chunks.get(timeout=LOOK_S)
            except queue.Empty:
                if self._is_over:
                    return
            else:
                on_data(data)

    def on_output(self, message: dict[str, Any]) -> None:
        """Take a part of its output; waits while nobody takes it on."""
        data = base64.b64decode(message["data"])
        while not self._is_discarded:
            with contextlib.suppress(queue.Full):
                self._chunks.put(data, timeout=LOOK_S)
                return

    def on_closed(self, _: dict[str, Any]) -> None:
        """Its output ended."""
        self._is_over = True

    def discard(self) -> None:
        """Drop what comes of its output from now on."""
        self._is_discarded = True

    def on_exit(self, message: dict[str, Any]) -> None:
        """It ended."""
        self._has_exited = True
        self._events.put(("exit", (self, message["code"])))

    def on_gone(self, _: dict[str, Any]) -> None:
        """Its process group ended."""
        self._is_gone = True

    def lose(self) -> None:
        """Its host is lost: count it as ended."""
        self._is_gone = self._is_over = True
        if not self._has_exited:
            self._has_exited = True
            self.loss = self._agent.loss or "could not be started"
            self._events.put(("exit", (self, EXIT_LOST)))
