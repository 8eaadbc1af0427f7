"""What the processes of a job use: processor time, and bytes on their links."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping


@dataclass(frozen=True)
class Usage:
    """What a process has used so far.

    Parameters
    ----------
    cpu_s : float
        Processor time of all its threads.
    sent_bytes, received_bytes : int
        On all interfaces of its network namespace but the loopback.
    peak_rss_bytes : int
        The most memory that it had at a time.
    """

    cpu_s: float
    sent_bytes: int
    received_bytes: int
    peak_rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read it from /proc."""
        folder = Path("/proc", str(pid))
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # utime, stime
        sent = received = 0
        for line in (folder / "net" / "dev").read_text().splitlines()[2:]:
            interface, _, counters = line.partition(":")
            if interface.strip() != "lo":
                received += int(counters.split()[0])
                sent += int(counters.split()[8])
        peak = re.search(r"VmHWM:\s*(\d+) kB", (folder / "status").read_text())
        peak_bytes = 1024 * int(peak.group(1)) if peak else 0
        return cls(ticks / os.sysconf("SC_CLK_TCK"), sent, received, peak_bytes)


class Window:
    """Usage of all roles of a job between two moments.

    Parameters
    ----------
    pids : mapping of str to int
        By role name, such as 'worker 1'.
    has_links : bool
        Every role has a network namespace of its own, so bytes can be told apart.
    """

    def __init__(self, pids: Mapping[str, int], has_links: bool) -> None:
        self._pids, self._has_links = dict(pids), has_links
        self._begin = self._end = self._read()

    def begin(self) -> None:
        """The window begins now."""
        self._begin = self._read()

    def end(self) -> None:
        """The window ends now."""
        self._end = self._read()

    def per_step(self, step_ms: float) -> dict[str, dict[str, float]]:
        """What a step of `step_ms` used, by kind of role.

        Returns
        -------
        dict
            For 'worker', 'server' and 'scheduler', where there is one: cpu_ms of a
            mean process of this kind; sent_bytes and received_bytes of the one with
            most, if there are links; peak_rss_bytes, not per step, likewise.
        """
        steps = 1000 * (self._end[0] - self._begin[0]) / step_ms
        kinds: dict[str, list[tuple[float, ...]]] = {}
        for name, end in self._end[1].items():
            begin = self._begin[1][name]
            used = (
                1000 * (end.cpu_s - begin.cpu_s) / steps,
                (end.sent_bytes - begin.sent_bytes) / steps,
                (end.received_bytes - begin.received_bytes) / steps,
                end.peak_rss_bytes,
            )
            kinds.setdefault(name.split()[0], []).append(used)
        return {kind: self._summary(used) for kind, used in kinds.items()}

    def _summary(self, used: list[tuple[float, ...]]) -> dict[str, float]:
        cpu_ms, sent, received, peak = zip(*used)
        mean = sum(cpu_ms) / len(cpu_ms)
        summary = {"cpu_ms": mean, "peak_rss_bytes": max(peak)}
        if self._has_links:
            summary.update(sent_bytes=max(sent), received_bytes=max(received))
        return summary

    def _read(self) -> tuple[float, dict[str, Usage]]:
        usages = {name: Usage.of(pid) for name, pid in self._pids.items()}
        return time.perf_counter(), usages
