"""The profiles of all roles of a job, on one clock and in the algorithm's words."""

from __future__ import annotations

import json
import statistics
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from timeline_links import Sample

FORWARD, BACKWARD = "forward", "backward"
LOCAL_UPDATE, GLOBAL_UPDATE = "local update", "global update"
PUSHPULL, COPY = "push and pull", "copies"
COMPUTATION = (FORWARD, BACKWARD)
LANES = ("computation", LOCAL_UPDATE, GLOBAL_UPDATE, COPY, PUSHPULL)
COPIES = ("CopyCPU2CPU", "Concat", "_split_v2", "_zeros")
NO_WORK = ("WaitForVar", "DeleteVariable")
TOLERANCE_US = 50_000  # between a mark and the operation that it belongs to


@dataclass(frozen=True)
class Span:
    """What a role did for a while.

    Parameters
    ----------
    kind : str
        One of the constants above.
    name : str
        MXNet's name of the operation, or the emulated layer.
    start_us, end_us : float
        Microseconds since 1970.
    step : int
        For computation, counted from the first profiled step; else -1.
    """

    kind: str
    name: str
    start_us: float
    end_us: float
    step: int = -1


@dataclass
class Timeline:
    """What all roles of a job did in the profiled steps.

    Parameters
    ----------
    system : str
        A name in `SYSTEMS`.
    rate : int
        Of each link in each direction, bits per second.
    spans : dict of str to list of Span
        By role name, in order of their start.
    links : dict of str to list of Sample
        By role name.
    """

    system: str
    rate: int
    spans: dict[str, list[Span]]
    links: dict[str, list[Sample]]

    @property
    def roles(self) -> list[str]:
        """Workers, then servers."""
        return sorted(self.spans, key=lambda name: (name[0] != "w", name))

    @property
    def workers(self) -> list[str]:
        return [name for name in self.roles if name.startswith("worker")]

    def computation(self, worker: str) -> list[Span]:
        """The forward and backward passes of a worker."""
        return [span for span in self.spans[worker] if span.kind in COMPUTATION]

    def step_starts_us(self) -> list[float]:
        """When each step began on the first worker to begin it."""
        starts: dict[int, float] = {}
        for worker in self.workers:
            for span in self.computation(worker):
                earliest = starts.get(span.step, span.start_us)
                starts[span.step] = min(earliest, span.start_us)
        return [starts[step] for step in sorted(starts)]

    def typical_pair(self) -> tuple[float, float, float]:
        """The starts of two steps and of the one after them.

        Of all such pairs, but for the first and the last step of the profile, it is
        the one that took the median time.
        """
        starts = self.step_starts_us()[1:]
        triples = list(zip(starts, starts[1:], starts[2:]))
        median = statistics.median_low([end - start for start, _, end in triples])
        return next(t for t in triples if t[2] - t[0] == median)

    def step_ms(self) -> float:
        """The median time of a step, but for the first and the last."""
        starts = self.step_starts_us()[1:]
        return statistics.median(b - a for a, b in zip(starts, starts[1:])) / 1000

    def hidden_share(self) -> float:
        """Share of the workers' bytes that travel while that worker computes."""
        hidden = total = 0
        starts = self.step_starts_us()
        for worker in self.workers:
            busy = merged(self.computation(worker))
            for middle_us, size in self._moved(worker):
                if starts[1] <= middle_us <= starts[-1]:
                    total += size
                    hidden += size if _is_inside(middle_us, busy) else 0
        return hidden / total if total else 0.0

    def _moved(self, role: str) -> Iterator[tuple[float, int]]:
        """(moment, bytes in both directions) between two samples."""
        samples = self.links[role]
        for a, b in zip(samples, samples[1:]):
            yield (a.clock_us + b.clock_us) / 2, _total(b) - _total(a)


def _total(sample: Sample) -> int:
    return sample.sent + sample.received


def merged(spans: Sequence[Span], gap_us: float = 1000.0) -> list[tuple[float, float]]:
    """Intervals that spans cover; shorter gaps, between two operations, count too."""
    intervals: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_us):
        if intervals and span.start_us <= intervals[-1][1] + gap_us:
            start, end = intervals.pop()
            intervals.append((start, max(end, span.end_us)))
        else:
            intervals.append((span.start_us, span.end_us))
    return intervals


def _is_inside(moment: float, intervals: Sequence[tuple[float, float]]) -> bool:
    place = bisect_right(intervals, (moment, float("inf"))) - 1
    return place >= 0 and moment <= intervals[place][1]


def read_spans(path: Path, num_layers: int) -> list[Span]:
    """The operations in a profile, in order of their start.

    Parameters
    ----------
    path : Path
        What MXNet's profiler wrote.
    num_layers : int
        Of the emulated network: a step has that many forward and backward passes.
    """
    spans, num_passes = [], 0
    for start_us, end_us, name in sorted(_operations(path)):
        if name == "emulated":
            step, place = divmod(num_passes, 2 * num_layers)
            num_passes += 1
            kind = FORWARD if place < num_layers else BACKWARD
            layer = place if kind is FORWARD else 2 * num_layers - 1 - place
            span = Span(kind, f"{kind} {layer}", start_us, end_us, step)
        else:
            is_worker = path.name.startswith("worker")
            span = Span(_kind(name, is_worker), name, start_us, end_us)
        spans.append(span)
    return spans


def _operations(path: Path) -> Iterator[tuple[float, float, str]]:
    """(start, end, name); the profiler writes each end just after its start."""
    begin: dict[str, Any] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") != "operator" or event["name"] in NO_WORK:
            continue
        if event["ph"] == "B":
            begin = event
        elif event["ph"] == "E":
            yield begin["ts"], event["ts"], event["name"]


def _kind(name: str, is_worker: bool) -> str:
    if name.startswith("KVStore"):
        return PUSHPULL
    if name in COPIES:
        return COPY
    return LOCAL_UPDATE if is_worker else GLOBAL_UPDATE


def check_clocks(timeline: Timeline, first_us: float, last_us: float) -> None:
    """Raise RuntimeError unless all roles' spans are between two marks.

    Parameters
    ----------
    timeline : Timeline
    first_us, last_us : float
        `time.time` on a worker when the first began to profile and the last ended.

    Notes
    -----
    MXNet's profiler takes its time from the system's clock, which all processes of a
    machine share, so nothing is shifted; this proves it.
    """
    for role, spans in timeline.spans.items():
        computed = [span for span in spans if span.kind != COPY]
        start = min(span.start_us for span in computed)
        end = max(span.end_us for span in computed)
        if start < first_us - TOLERANCE_US or end > last_us + TOLERANCE_US:
            raise RuntimeError(
                f"the clock of {role}'s profile is not the system's: it has operations "
                f"from {start:.0f} to {end:.0f} us, and the job was profiled from "
                f"{first_us:.0f} to {last_us:.0f}"
            )


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """All roles of all jobs in one trace, for chrome://tracing or ui.perfetto.dev.

    Each role is a process; the jobs stand one above the other, and in each the first
    of the profiled steps begins at 0.
    """
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        zero_us = timeline.step_starts_us()[0]
        for role in timeline.roles:
            pid = 1 + sum(event["name"] == "process_name" for event in events)
            name = f"{timeline.system}: {role}"
            events.append(_meta("process_name", pid, name=name))
            events.append(_meta("process_sort_index", pid, sort_index=pid))
            events += _span_events(timeline.spans[role], pid, zero_us)
            events += _link_events(timeline.links.get(role, []), pid, zero_us)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(what: str, pid: int, tid: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}


def _span_events(spans: Sequence[Span], pid: int, zero_us: float) -> Iterator[dict]:
    """Complete events, in lanes in which none overlaps another."""
    ends: dict[tuple[int, int], float] = {}
    for span in spans:
        lane = LANES.index(LANES[0] if span.kind in COMPUTATION else span.kind)
        row = 0
        while ends.get((lane, row), 0.0) > span.start_us:
            row += 1
        tid = 1 + 1000 * lane + row
        if (lane, row) not in ends:
            yield _meta("thread_name", pid, tid, name=LANES[lane])
            yield _meta("thread_sort_index", pid, tid, sort_index=tid)
        ends[lane, row] = span.end_us
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": pid,
            "tid": tid,
            "ts": span.start_us - zero_us,
            "dur": span.end_us - span.start_us,
            "args": {} if span.step < 0 else {"step": span.step},
        }


def _link_events(samples: Sequence[Sample], pid: int, zero_us: float) -> Iterator[dict]:
    """Counters of Mbit/s in each direction."""
    for a, b in zip(samples, samples[1:]):
        microseconds = b.clock_us - a.clock_us
        rates: Mapping[str, float] = {
            "push": 8 * (b.sent - a.sent) / microseconds,
            "pull": 8 * (b.received - a.received) / microseconds,
        }
        yield {
            "ph": "C",
            "name": "link, Mbit/s",
            "pid": pid,
            "ts": a.clock_us - zero_us,
            "args": {name: round(rate, 1) for name, rate in rates.items()},
        }
