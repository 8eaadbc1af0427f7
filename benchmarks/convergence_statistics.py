"""What the results of benchmark_convergence.py say: spreads, differences, times.

Accuracies are in percent and differences in points. A difference is always between
two runs of the same setting and seed: same first weights, same data in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

import datasets
import numpy as np
from convergence_run import METHODS, Run
from convergence_store import Result
from scipy import stats

BASELINE = "dist_sync"
CONFIDENCE = 0.95

Setting = Run  # without method and seed; see setting_of
Differences = Mapping[Setting, Mapping[int, float]]  # by seed


@dataclass(frozen=True)
class Estimate:
    """Some figures in short.

    Parameters
    ----------
    count : int
        How many.
    mean, low, high : float
        Mean, least, greatest.
    deviation : float, optional
        Standard deviation of a single figure; None for one figure, as for what
        follows from it.
    error : float, optional
        Standard error of the mean.
    interval : (float, float), optional
        In which the mean lies with a confidence of 95 % (Student).
    """

    count: int
    mean: float
    low: float
    high: float
    deviation: float | None = None
    error: float | None = None
    interval: tuple[float, float] | None = None


def estimate(values: Iterable[float]) -> Estimate | None:
    """Of some figures; None if there are none, or if one is not a number."""
    array = np.array(list(values), dtype=float)
    count = len(array)
    if not count or not np.isfinite(array).all():
        return None
    mean, low, high = float(array.mean()), float(array.min()), float(array.max())
    if count == 1:
        return Estimate(count, mean, low, high)
    deviation = float(array.std(ddof=1))
    error = deviation / math.sqrt(count)
    reach = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
    interval = (mean - reach, mean + reach)
    return Estimate(count, mean, low, high, deviation, error, interval)


def setting_of(run: Run) -> Setting:
    """What a run has in common with those that it is compared with."""
    return dataclasses.replace(run, method="", seed=0)


def by_setting(results: Iterable[Result]) -> dict[Setting, list[Result]]:
    """The results of each setting, in the order of the settings."""
    groups: dict[Setting, list[Result]] = {}
    for result in results:
        groups.setdefault(setting_of(result.run), []).append(result)
    return {setting: groups[setting] for setting in sorted(groups, key=_order)}


def _order(setting: Setting) -> tuple[str, ...]:
    """For sorting: numbers by size, None before all."""
    values = dataclasses.astuple(setting)
    return tuple(
        "" if v is None else v if isinstance(v, str) else f"{v:020.6f}" for v in values
    )


def by_method(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each method: methods in the order of `METHODS`, seeds rising."""
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.run.seed):
        groups.setdefault(result.run.method, []).append(result)
    known = [method for method in METHODS if method in groups]
    others = [method for method in groups if method not in METHODS]
    return {method: groups[method] for method in [*known, *others]}


def is_failed(result: Result) -> bool:
    """Whether the training is hardly better than guessing: below twice chance."""
    chance = 100 / datasets.find(result.run.dataset).num_classes
    return not result.accuracy >= 2 * chance  # nan is a failure


def count_failed(results: Iterable[Result]) -> int:
    """How many trainings failed."""
    return sum(map(is_failed, results))


def differences(results: Iterable[Result], method: str) -> dict[Setting, dict]:
    """Accuracy less that of dist_sync, for each setting by seed."""
    found: dict[Setting, dict[int, float]] = {}
    for setting, group in by_setting(results).items():
        methods = by_method(group)
        base = {r.run.seed: r.accuracy for r in methods.get(BASELINE, ())}
        pairs = {
            r.run.seed: r.accuracy - base[r.run.seed]
            for r in methods.get(method, ())
            if r.run.seed in base
        }
        if pairs:
            found[setting] = pairs
    return found


@dataclass(frozen=True)
class Pooled:
    """A method's differences to dist_sync over all settings and seeds.

    Parameters
    ----------
    estimate : Estimate
        Of all pairs, each counted alike.
    worst : float
        The lowest of the settings' means.
    num_settings : int
        How many settings there are.
    """

    estimate: Estimate
    worst: float
    num_settings: int

    @property
    def reaches_zero(self) -> bool | None:
        """Whether the upper end of the interval does; None without an interval."""
        interval = self.estimate.interval
        return None if interval is None else interval[1] >= 0


def pool(found: Differences) -> Pooled | None:
    """Pool what `differences` found; None if there is nothing to pool."""
    groups = [list(pairs.values()) for pairs in found.values()]
    overall = estimate(value for group in groups for value in group)
    if overall is None:
        return None
    worst = min(sum(group) / len(group) for group in groups)
    return Pooled(overall, worst, len(groups))


def loss_at(result: Result, fraction: float) -> float:
    """Training loss at a fraction of the run's steps; nan if it was not finite."""
    steps = result.losses[:, 0]
    # A part of a step, so that rounding does not move it to the next point.
    index = int(np.searchsorted(steps, fraction * result.num_steps - 1e-6))
    return float(result.losses[min(index, len(steps) - 1), 1])


def time_to(result: Result, level: float) -> float | None:
    """Seconds until an accuracy in percent is reached; None if it never is.

    Linear between two evaluations; of the first one if that is good enough already.
    """
    seconds, accuracies = result.evaluations[:, 1], result.evaluations[:, 2]
    reached = np.flatnonzero(accuracies >= level)
    if not len(reached):
        return None
    i = int(reached[0])
    if i == 0 or not np.isfinite(accuracies[i - 1]):
        return float(seconds[i])
    rise = (level - accuracies[i - 1]) / (accuracies[i] - accuracies[i - 1])
    return float(seconds[i - 1] + rise * (seconds[i] - seconds[i - 1]))


def time_ratios(results: Iterable[Result], method: str, level: float) -> list[float]:
    """Time to an accuracy over that of dist_sync, for each setting and seed.

    Infinite where only dist_sync reaches it; pairs in which dist_sync never does are
    left out.
    """
    ratios = []
    for group in by_setting(results).values():
        methods = by_method(group)
        base = {r.run.seed: time_to(r, level) for r in methods.get(BASELINE, ())}
        for result in methods.get(method, ()):
            least = base.get(result.run.seed)
            if least is not None:
                time = time_to(result, level)
                ratios.append(math.inf if time is None else time / least)
    return ratios


def geometric_mean(values: Sequence[float]) -> float | None:
    """Of positive figures; None if there are none."""
    if not values:
        return None
    return math.exp(sum(math.log(value) for value in values) / len(values))
