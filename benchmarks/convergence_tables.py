"""Tables of what benchmark_convergence.py measured, as text and as Markdown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Sequence

import report
from convergence_statistics import (
    BASELINE,
    Estimate,
    by_method,
    count_failed,
    differences,
    estimate,
    geometric_mean,
    loss_at,
    pool,
    time_ratios,
    time_to,
)
from convergence_store import Result

NOTHING = "-"
LOSS_FRACTIONS = (0.1, 0.25, 0.5, 1.0)
GROUP_HEADER = (
    "method",
    "runs",
    "accuracy in %, mean (min-max)",
    "minus dist_sync, ± s.e.",
    "training loss at 10 / 25 / 50 / 100 %",
    "failed",
)
TIME_HEADER = ("seconds", "ms per step")
POOLED_HEADER = (
    "method",
    "pairs",
    "minus dist_sync, ± s.e.",
    "95 % interval",
    "reaches zero",
    "worst setting's mean",
)


@dataclass(frozen=True)
class Table:
    """Texts in rows.

    Parameters
    ----------
    title : str
        What the rows have in common; may be empty.
    header, rows : sequences of str
        Every row is as long as the header.
    num_left : int
        So many columns are aligned to the left, the others to the right.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int = 1

    def text(self) -> str:
        """For a terminal."""
        return f"{self.title}\n{report.table(self.header, self.rows, self.num_left)}"

    def markdown(self) -> str:
        """For a page."""
        rule = ["---" if i < self.num_left else "--:" for i in range(len(self.header))]
        cells = [self.header, rule, *self.rows]
        lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in cells]
        return "\n".join([f"**{self.title}**\n" if self.title else "", *lines]).lstrip()


def group_table(
    title: str, results: Sequence[Result], with_seconds: bool = False
) -> Table:
    """The methods of one setting.

    Parameters
    ----------
    title : str
        The setting in words.
    results : sequence of Result
        All of that setting.
    with_seconds : bool
        Add the mean time of training, and of a step; the first one is in neither.
    """
    rows = []
    for method, runs in by_method(results).items():
        pairs = differences(results, method).values()
        found = estimate(value for each in pairs for value in each.values())
        row = [
            method,
            str(len(runs)),
            spread(estimate(run.accuracy for run in runs)),
            NOTHING if method == BASELINE else with_error(found),
            " / ".join(_mean_loss(runs, at) for at in LOSS_FRACTIONS),
            str(count_failed(runs)),
        ]
        if with_seconds:
            row += [report.number(_mean(time)) for time in zip(*map(times_of, runs))]
        rows.append(row)
    header = (*GROUP_HEADER, *TIME_HEADER) if with_seconds else GROUP_HEADER
    return Table(title, header, rows)


def times_of(result: Result) -> tuple[float, float]:
    """Seconds of training, and milliseconds of a step."""
    num_steps = max(1, result.num_steps - 1)  # the watch starts after the first one
    return result.seconds, 1000 * result.seconds / num_steps


def pooled_table(title: str, results: Sequence[Result]) -> Table | None:
    """Methods over all settings and seeds of `results`; None without any pair."""
    rows = []
    for method in by_method(results):
        pooled = pool(differences(results, method))
        if pooled is None or method == BASELINE:
            continue
        reaches = {None: NOTHING, True: "yes", False: "no"}[pooled.reaches_zero]
        rows.append(
            [
                method,
                str(pooled.estimate.count),
                with_error(pooled.estimate),
                interval(pooled.estimate),
                reaches,
                points(pooled.worst),
            ]
        )
    return Table(title, POOLED_HEADER, rows) if rows else None


def time_table(title: str, results: Sequence[Result], level: float) -> Table:
    """How long the methods take to an accuracy.

    Parameters
    ----------
    title : str
        The setting in words.
    results : sequence of Result
        All of that setting.
    level : float
        Accuracy in percent.
    """
    rows = []
    for method, runs in by_method(results).items():
        times = [time for run in runs if (time := time_to(run, level)) is not None]
        ratios = time_ratios(results, method, level)
        mean = geometric_mean(ratios)
        each = ", ".join(ratio(value) for value in ratios)
        rows.append(
            [
                method,
                f"{len(times)} of {len(runs)}",
                report.number(_mean(times) if times else None),
                NOTHING if method == BASELINE else ratio(mean),
                NOTHING if method == BASELINE else each or NOTHING,
            ]
        )
    header = (
        "method",
        f"reached {level:g} %",
        "seconds, mean",
        "over dist_sync, geometric mean",
        "each seed",
    )
    return Table(title, header, rows)


def spread(found: Estimate | None) -> str:
    """'97.12 (96.80-97.40)'."""
    if found is None:
        return NOTHING
    if found.count == 1:
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} ({found.low:.2f}-{found.high:.2f})"


def points(value: float | None) -> str:
    """A difference, always with its sign."""
    return NOTHING if value is None else f"{value:+.2f}"


def with_error(found: Estimate | None) -> str:
    """'-0.12 ± 0.08'; the mean alone if nothing is known of its error."""
    if found is None:
        return NOTHING
    error = "" if found.error is None else f" ± {found.error:.2f}"
    return f"{points(found.mean)}{error}"


def interval(found: Estimate | None) -> str:
    """'-0.30 to +0.06'."""
    if found is None or found.interval is None:
        return NOTHING
    return " to ".join(map(points, found.interval))


def ratio(value: float | None) -> str:
    """A ratio of times; 'never' where the accuracy was not reached."""
    if value is None:
        return NOTHING
    return "never" if math.isinf(value) else f"{value:.2f}"


def _mean_loss(runs: Iterable[Result], fraction: float) -> str:
    """The mean over the seeds; 'nan' if one of them has diverged by then."""
    return f"{_mean([loss_at(run, fraction) for run in runs]):.3f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
