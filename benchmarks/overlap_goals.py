"""The goals that the benchmark of the overlap checks, with their limits."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable

import report
from overlap_rows import Results, Rows
from systems import OURS, PEERS

FP16, TWO_BIT = "dist_odsgd-fp16", "dist_odsgd-2bit"
HEADER = ("goal", "what", "limit", "measured", "")


@dataclass(frozen=True)
class Goal:
    """A figure with a limit.

    Parameters
    ----------
    number : int
        Of the goal.
    what : str
        The figure, in words.
    limit : float
        The most that it may be, or that it must be below of where `strict`.
    measure : callable
        Takes the results; raises KeyError or TypeError if a figure is missing.
    """

    number: int
    what: str
    limit: float
    measure: Callable[[Results], float]
    strict: bool = False

    def check(self, results: Results) -> dict[str, Any]:
        """What was measured, and whether that is within the limit (None: nothing)."""
        value = None
        with contextlib.suppress(KeyError, TypeError, ValueError):
            value = self.measure(results)
        met = None
        if value is not None:
            met = value < self.limit if self.strict else value <= self.limit
        return {
            "goal": self.number,
            "what": self.what,
            "limit": f"{'<' if self.strict else '<='} {self.limit:g}",
            "measured": value,
            "met": met,
        }


def _of_bound(setting: str) -> Callable[[Results], float]:
    return lambda results: results[setting][OURS].ratio_to_bound + 0.0


def _of_sync(setting: str) -> Callable[[Results], float]:
    return lambda results: results[setting][OURS].ratio_to_sync + 0.0


def _of_peers(setting: str) -> Callable[[Results], float]:
    """Our step over that of the fastest peer that was measured."""
    return lambda results: results[setting][OURS].step_ms / _fastest(results[setting])


def _fastest(rows: Rows) -> float:
    times = [rows[peer].step_ms for peer in PEERS if peer in rows]
    return min(ms for ms in times if ms is not None)


def _of_compute(results: Results) -> float:
    row = results["mlp8-2w-r0.3"][OURS]
    return row.step_ms / row.compute_ms


def _of_each_other(system: str, other: str) -> Callable[[Results], float]:
    def measure(results: Results) -> float:
        rows = results["mlp8-2w-r2"]
        return rows[system].step_ms / rows[other].step_ms

    return measure


def _slow_link(results: Results) -> float:
    slow, fast = (results[f"mlp8-2w-{end}"][OURS] for end in ("r10", "r1"))
    return abs(slow.host_step_ms - fast.host_step_ms)


GOALS = (
    Goal(1, "mlp8, 2 workers: of the bound", 1.05, _of_bound("mlp8-2w-r1")),
    Goal(1, "mlp8, 4 workers: of the bound", 1.08, _of_bound("mlp8-4w-r1")),
    Goal(1, "mlp8, 8 workers: of the bound", 1.12, _of_bound("mlp8-8w-r1")),
    Goal(1, "ResNet-50: of the bound", 1.05, _of_bound("resnet50-2w-r1")),
    Goal(
        1,
        "mlp8, 2 workers: of the fastest peer",
        1,
        _of_peers("mlp8-2w-r1"),
        strict=True,
    ),
    Goal(
        1,
        "mlp8, 4 workers: of the fastest peer",
        1,
        _of_peers("mlp8-4w-r1"),
        strict=True,
    ),
    Goal(
        1,
        "mlp8, 8 workers: of the fastest peer",
        1,
        _of_peers("mlp8-8w-r1"),
        strict=True,
    ),
    Goal(
        1, "ResNet-50: of the fastest peer", 1, _of_peers("resnet50-2w-r1"), strict=True
    ),
    Goal(1, "mlp8, 2 workers: of dist_sync", 0.75, _of_sync("mlp8-2w-r1")),
    Goal(1, "ResNet-50: of dist_sync", 0.70, _of_sync("resnet50-2w-r1")),
    Goal(1, "mlp2, 2 workers: of dist_sync", 0.55, _of_sync("mlp2-2w-r1")),
    Goal(2, "T_link = 0.3 T_compute: of T_compute", 1.02, _of_compute),
    Goal(2, "T_link = 2 T_compute: of the bound", 1.05, _of_bound("mlp8-2w-r2")),
    Goal(2, "fp16: of the step without", 0.55, _of_each_other(FP16, OURS)),
    Goal(
        2,
        "2bit: of Horovod without",
        1,
        _of_each_other(TWO_BIT, "horovod"),
        strict=True,
    ),
    Goal(5, "step(), link ten times slower: change in ms", 5, _slow_link, strict=True),
)


def check_goals(results: Results) -> list[dict[str, Any]]:
    """All goals; see `Goal.check`."""
    return [goal.check(results) for goal in GOALS]


def table_of_goals(checks: list[dict[str, Any]]) -> str:
    """The goals as text."""
    words = {True: "met", False: "NOT met", None: "not measured"}
    rows = [
        [
            str(check["goal"]),
            check["what"],
            check["limit"],
            report.number(check["measured"], ".3f"),
            words[check["met"]],
        ]
        for check in checks
    ]
    return report.table(HEADER, rows, num_left=2)
