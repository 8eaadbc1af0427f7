"""From launches to rows: a row is what one system came to in one setting."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import report
from systems import BASELINE

HEADER = (
    "system", "ms", "spread", "of dist_sync", "of bound", "step() ms",
    "CPU ms worker", "server", "MB worker", "server", "runs",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Medians over the launches of one system in one setting.

    Parameters
    ----------
    status : str
        'ok', 'not available' or 'failed', the worst of the launches; with `reason`.
    step_ms, compute_ms, bound_ms : float, optional
        A step's time, that of its computation alone, and the least possible.
    spread : float, optional
        (max - min) / median of `step_ms`; None for a single launch.
    ratio_to_sync, ratio_to_bound : float, optional
        `step_ms` over that of dist_sync in the same setting, and over the bound.
    host_step_ms : float, optional
        Time of the host inside the step's call.
    usage : mapping
        By kind of role: cpu_ms of a mean process; sent_bytes and received_bytes of
        the busiest one.
    num_launches : int
        That went well.
    """

    status: str
    reason: str = ""
    step_ms: float | None = None
    spread: float | None = None
    ratio_to_sync: float | None = None
    ratio_to_bound: float | None = None
    compute_ms: float | None = None
    bound_ms: float | None = None
    host_step_ms: float | None = None
    usage: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    num_launches: int = 0


Rows = Mapping[str, Row]  # by system
Results = Mapping[str, Rows]  # by setting


def rows_of(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """The rows of one setting, by system in the order of the first launches."""
    by_system: dict[str, list[Mapping[str, Any]]] = {}
    for outcome in outcomes:
        by_system.setdefault(outcome["launch"]["system"], []).append(outcome)
    sync = [o["step_ms"] for o in by_system.get(BASELINE, []) if o["status"] == "ok"]
    sync_ms = statistics.median(sync) if sync else None
    return {name: _row(group, sync_ms) for name, group in by_system.items()}


def _row(outcomes: Sequence[Mapping[str, Any]], sync_ms: float | None) -> Row:
    bad = sorted((o for o in outcomes if o["status"] != "ok"), key=_badness)
    status = {key: bad[0][key] for key in ("status", "reason")} if bad else {}
    good = [o for o in outcomes if o["status"] == "ok"]
    if not good:
        return Row(**status)

    times = [o["step_ms"] for o in good]
    step_ms = statistics.median(times)
    names = ("ratio_to_bound", "compute_ms", "bound_ms", "host_step_ms")
    return Row(
        **{"status": "ok", **status},
        step_ms=step_ms,
        spread=(max(times) - min(times)) / step_ms if len(times) > 1 else None,
        ratio_to_sync=step_ms / sync_ms if sync_ms else None,
        usage=_median_usage([o["usage"] for o in good]),
        num_launches=len(good),
        **{name: statistics.median([o[name] for o in good]) for name in names},
    )


def _median_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Figure by figure."""
    return {
        kind: {
            name: statistics.median([usage[kind][name] for usage in usages])
            for name in names
        }
        for kind, names in usages[0].items()
    }


def _badness(outcome: Mapping[str, Any]) -> bool:
    """Sorts failures to the front."""
    return outcome["status"] != "failed"


def table_of(rows: Rows) -> str:
    """The rows as text, with reasons below for systems without figures."""
    lines = [_cells(name, row) for name, row in rows.items()]
    notes = [
        f"{name}: {row.status}: {row.reason.splitlines()[0]}"
        for name, row in rows.items()
        if row.reason
    ]
    return "\n".join([report.table(HEADER, lines), *notes])


def _cells(name: str, row: Row) -> list[str]:
    percent = None if row.spread is None else 100 * row.spread
    spread = "-" if percent is None else f"{percent:.0f} %"
    cpu = [row.usage.get(kind, {}).get("cpu_ms") for kind in ("worker", "server")]
    return [
        name,
        report.number(row.step_ms),
        spread,
        report.number(row.ratio_to_sync, ".2f"),
        report.number(row.ratio_to_bound, ".2f"),
        report.number(row.host_step_ms, ".2f"),
        *(report.number(value) for value in cpu),
        *(_megabytes(row, kind) for kind in ("worker", "server")),
        str(row.num_launches),
    ]


def _megabytes(row: Row, kind: str) -> str:
    """Sent and received by the busiest process of a kind, per step."""
    used = row.usage.get(kind, {})
    if "sent_bytes" not in used:
        return "-"
    return f"{used['sent_bytes'] / 1e6:.2f}/{used['received_bytes'] / 1e6:.2f}"
