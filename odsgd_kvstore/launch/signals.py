"""Signals to the launcher, as requests to end the job in an orderly way."""

from __future__ import annotations

import queue
import signal
import threading
from typing import Any


class Stopped(Exception):
    """A signal came before any role was started."""


class StopSignals:
    """Context manager: INT, TERM and HUP become requests to end a job.

    The handlers raise nothing, so a signal can't lose a process between its start
    and its registration. One object serves one `run_roles`. In another thread than
    the main one it changes nothing, as Python allows no handlers there.
    """

    def __init__(self) -> None:
        # A SimpleQueue may be written to by a handler that interrupts its reader.
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.number = 0  # The first that came.
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.number != 0

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self.requested:
            raise Stopped

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if not (ignored and number == signal.SIGHUP):  # As nohup wants it.
                self._previous[number] = signal.signal(number, self._handle)
        # Where the parent ignores this one, no exit code is ever known.
        previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._previous[signal.SIGCHLD] = previous
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        self.ask(number)

    def ask(self, number: int) -> None:
        """Ask for the end as if this signal had come; from any thread."""
        # The event first: who notices the number may add events of its own.
        self.events.put(("signal", number))
        self.number = self.number or number
