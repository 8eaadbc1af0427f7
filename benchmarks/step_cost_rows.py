"""From jobs to rows: a row is what one system came to in one section."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import report

COST_HEADER = (
    "section", "system", "step() CPU ms", "spread", "step() ms", "whole step ms",
    "worker CPU ms", "server CPU ms", "spread",
)  # fmt: skip
START_HEADER = (
    "section", "system", "worker MB", "server MB", "handshake s", "broadcast s",
    "first step s",
)  # fmt: skip
LAYOUT_HEADER = ("section", "system", "largest / mean", "bytes of each server")


@dataclass(frozen=True)
class Row:
    """Medians over the jobs of one system in one section.

    Parameters
    ----------
    figures : mapping
        As `step_cost_job.figures_of` names them; empty if no job went well.
    spread : mapping
        (max - min) / median of each figure; empty after a single job.
    server_bytes : list of float
        Of each server per step, in the first job.
    num_jobs : int
        That went well.
    reason : str
        Why one did not.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    server_bytes: Sequence[float] = ()
    num_jobs: int = 0
    reason: str = ""

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure]


Rows = Mapping[str, Row]  # by system
Results = Mapping[str, Rows]  # by section


def rows_of(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """The rows of one section, by system in the order of the first jobs."""
    by_system: dict[str, list[Mapping[str, Any]]] = {}
    for outcome in outcomes:
        by_system.setdefault(outcome["job"]["system"], []).append(outcome)
    return {system: _row(group) for system, group in by_system.items()}


def _row(outcomes: Sequence[Mapping[str, Any]]) -> Row:
    good = [outcome["figures"] for outcome in outcomes if outcome["status"] == "ok"]
    reasons = [o["reason"] for o in outcomes if o["status"] != "ok"]
    reason = reasons[0] if reasons else ""
    if not good:
        return Row(reason=reason)
    names = [name for name in good[0] if name != "server_bytes"]
    values = {name: [figures[name] for figures in good] for name in names}
    return Row(
        {name: statistics.median(each) for name, each in values.items()},
        {n: _spread(v) for n, v in values.items()} if len(good) > 1 else {},
        good[0]["server_bytes"],
        len(good),
        reason,
    )


def _spread(values: Sequence[float]) -> float:
    median = statistics.median(values)
    return (max(values) - min(values)) / median if median else 0.0


def cost_table(results: Results) -> str:
    """What a step costs, as text."""
    figures = "host_ms", "host_wall_ms", "step_ms", "worker_cpu_ms", "server_cpu_ms"
    lines = []
    for section, system, row in _each(results):
        cells = [report.number(row.figures.get(name), ".2f") for name in figures]
        cells.insert(1, _percent(row.spread.get("host_ms")))
        cells.append(_percent(row.spread.get("server_cpu_ms")))
        lines.append([section, system, *cells])
    return report.table(COST_HEADER, lines)


def start_table(results: Results) -> str:
    """Peak memory and what the start took, as text."""
    lines = []
    for section, system, row in _each(results):
        peaks = [row.figures.get(f"{k}_peak_bytes") for k in ("worker", "server")]
        cells = [report.number(None if p is None else p / 1e6, ".0f") for p in peaks]
        for name in ("handshake_s", "broadcast_s", "first_step_s"):
            cells.append(report.number(row.figures.get(name), ".2f"))
        lines.append([section, system, *cells])
    return report.table(START_HEADER, lines)


def layout_table(results: Results) -> str:
    """How even the servers are, as text."""
    lines = []
    for section, system, row in _each(results):
        loads = " ".join(f"{load:,.0f}" for load in row.server_bytes)
        evenness = report.number(row.figures.get("unevenness"), ".3f")
        lines.append([section, system, evenness, loads or "-"])
    return report.table(LAYOUT_HEADER, lines)


def _each(results: Results) -> list[tuple[str, str, Row]]:
    return [
        (s, system, row) for s, rows in results.items() for system, row in rows.items()
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def failures(results: Results) -> list[str]:
    """The jobs that failed, in a line each."""
    return [
        f"{section}, {system}: {row.reason.splitlines()[0]}"
        for section, system, row in _each(results)
        if row.reason
    ]
