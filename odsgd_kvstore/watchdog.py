"""Watches the servers' status from a thread, so that a step never waits for it.

Liveness of peers and reports of stalls are not supported yet.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Callable

from .process_exit import end_now

_PERIOD_S = 0.5
_GRACE_S = 10.0


class StatusWatch:
    """Asks the servers for their status until one failed or `stop` is called.

    Parameters
    ----------
    read : callable
        Returns the servers' first error, '' when all is well; blocks for one round
        trip.
    report : callable
        Takes the error; returns an event that is set once the program was told.

    Notes
    -----
    The thread holds no store: one that did would keep it alive past the end of the
    interpreter, and MXNet aborts then. If the program is not told in time, because
    it is blocked in a wait that no answer will end, the process is ended.
    """

    def __init__(
        self, read: Callable[[], str], report: Callable[[str], threading.Event]
    ) -> None:
        self._read, self._report = read, report
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="odsgd-status-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when it has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            error = self._read()
            if error:
                self._give_up_unless_told(error, self._report(error))
                return

    def _give_up_unless_told(self, error: str, told: threading.Event) -> None:
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            if told.wait(_PERIOD_S) or self._stop.is_set():
                return
        print(
            f"odsgd_kvstore: {error}\nThis worker is blocked and cannot raise it; ending "
            "the process.",
            file=sys.stderr,
        )
        end_now(1)
