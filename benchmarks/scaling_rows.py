"""The rows of benchmark_scaling.py and its goals."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import report
from overlap_goals import Goal
from overlap_rows import Row
from scaling_sweeps import FREE, SATURATING, Sweep
from systems import BASELINE, OURS

HEADER = (
    "workers", "system", "ms", "spread", "of dist_sync", "of 1 worker", "T_compute",
    "T_link", "of bound", "CPU ms worker", "server", "runs",
)  # fmt: skip
FLAT, OF_LINK = 1.10, 1.12

Points = Mapping[int, Mapping[str, Row]]  # rows by number of workers and system


def table_of(sweep: Sweep, points: Points) -> str:
    """A sweep as text, with reasons below for what went wrong."""
    lines, notes = [], []
    for count, rows in points.items():
        for system, row in rows.items():
            first = points[min(points)].get(system)
            lines.append([str(count), system, *_cells(sweep, count, row, first)])
            if row.reason:
                notes.append(f"{count} workers, {system}: {row.reason.splitlines()[0]}")
    return "\n".join([report.table(HEADER, lines), *notes])


def _cells(sweep: Sweep, count: int, row: Row, first: Row | None) -> list[str]:
    percent = "-" if row.spread is None else f"{100 * row.spread:.0f} %"
    known = row.step_ms is not None and first is not None and first.step_ms
    cpu = [row.usage.get(kind, {}).get("cpu_ms") for kind in ("worker", "server")]
    return [
        report.number(row.step_ms),
        percent,
        report.number(row.ratio_to_sync, ".2f"),
        report.number(row.step_ms / first.step_ms if known else None, ".2f"),
        report.number(row.compute_ms),
        report.number(sweep.link_ms(count)),
        report.number(row.ratio_to_bound, ".2f"),
        *(report.number(value) for value in cpu),
        str(row.num_launches),
    ]


def flatness(sweep: Sweep, points: Points) -> float:
    """Longest over shortest step of ours while no link is saturated.

    Raises
    ------
    ValueError
        There are fewer than two such points.
    """
    free = [count for count in points if not sweep.is_saturated(count)]
    return _range([points[count][OURS].step_ms for count in free])


def proportionality(sweep: Sweep, points: Points) -> float:
    """Largest over smallest step of ours per time of the busiest, saturated link.

    Raises
    ------
    ValueError
        There are fewer than two such points.
    """
    return _range(_of_links(sweep, points))


def of_link(sweep: Sweep, points: Points) -> float:
    """The step of ours over the time of the busiest link, where it is most."""
    return max(_of_links(sweep, points))


def _of_links(sweep: Sweep, points: Points) -> list[float]:
    full = [count for count in points if sweep.is_saturated(count)]
    return [points[count][OURS].step_ms / sweep.link_ms(count) for count in full]


def _range(values: Sequence[float]) -> float:
    if len(values) < 2:
        raise ValueError(f"{len(values)} points; a comparison needs 2")
    return max(values) / min(values)


def check_goals(
    sweeps: Mapping[str, Sweep], results: Mapping[str, Points]
) -> list[dict[str, Any]]:
    """All goals; see `Goal.check`.

    Parameters
    ----------
    sweeps, results : mapping
        By name.
    """

    def of(
        name: str, measure: Callable[[Sweep, Points], float]
    ) -> Callable[[Any], float]:
        return lambda points: measure(sweeps[name], points[name])

    goals = (
        Goal(8, "no link is ever saturated: flat", FLAT, of(FREE, flatness)),
        Goal(8, "before links saturate: flat", FLAT, of(SATURATING, flatness)),
        Goal(
            8,
            "saturated: step per busiest link's time, range",
            FLAT,
            of(SATURATING, proportionality),
        ),
        Goal(
            8,
            "saturated: step over busiest link's time",
            OF_LINK,
            of(SATURATING, of_link),
        ),
    )
    return [goal.check(results) for goal in goals]


def speedups(sweep: Sweep, points: Points) -> dict[str, dict[int, float]]:
    """Samples per second over those of one worker that never waits, by system."""
    by_system: dict[str, dict[int, float]] = {OURS: {}, BASELINE: {}}
    for count, rows in points.items():
        for system, row in rows.items():
            if row.step_ms is not None:
                by_system[system][count] = count * sweep.compute_ms / row.step_ms
    return by_system
