"""What travels on the links of a job, sampled while it runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Mapping, NamedTuple

from odsgd_kvstore.launch.bandwidth import INTERFACE

PERIOD_S = 0.002  # that of a link's burst: a shorter one would show nothing more


class Sample(NamedTuple):
    """The counters of a role's link.

    Attributes
    ----------
    clock_us : float
        Of `time.time`, in microseconds.
    sent, received : int
        Bytes so far, whole frames.
    """

    clock_us: float
    sent: int
    received: int


class LinkSampler:
    """Reads the counters of all links every few milliseconds, in a thread.

    Parameters
    ----------
    pids : mapping of str to int
        Of roles with a network of their own, by role name.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: dict[str, list[Sample]] = {name: [] for name in pids}

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End it; returns when no more samples come."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        # A file of /proc is made anew at each reading from its begin.
        with contextlib.ExitStack() as files, contextlib.suppress(OSError):
            numbers = {}
            for name, pid in self._pids.items():
                number = os.open(f"/proc/{pid}/net/dev", os.O_RDONLY)
                files.callback(os.close, number)
                numbers[name] = number
            while not self._done.wait(PERIOD_S):
                for name, number in numbers.items():
                    self.samples[name].append(_parse(os.pread(number, 4096, 0)))


def _parse(text: bytes) -> Sample:
    """The counters of the one interface beside the loopback."""
    fields = text.partition(INTERFACE.encode() + b":")[2].split()
    return Sample(1e6 * time.time(), int(fields[8]), int(fields[0]))
