"""What the benchmark must show, checked against the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Sequence

from convergence_presets import NETWORKS, RATES, presets
from convergence_run import Run
from convergence_sections import (
    ACCURACY,
    LEVELS,
    MANY,
    OTHER_OPTIMIZERS,
    TIME,
    Section,
    describe,
    section_of,
)
from convergence_statistics import (
    by_setting,
    count_failed,
    differences,
    estimate,
    geometric_mean,
    pool,
    time_ratios,
)
from convergence_store import Result
from convergence_tables import Table, interval, points, ratio, with_error

HOPEFUL = ("mirror", "replica")
WORST_MEAN = -1.0
HIGH_RATE_WORKERS = 4
MET, NOT_MET, NOT_MEASURED = "met", "NOT met", "not measured"
PREDICTED, NOT_PREDICTED = "as predicted", "NOT as predicted"
PREDICTED_ORDER = ("dist_async scaled", "none", "sgd")


@dataclass(frozen=True)
class Check:
    """A claim, what was found, and whether it holds."""

    claim: str
    found: str
    verdict: str


@dataclass(frozen=True)
class Scope:
    """The runs that a claim is about: a preset's, also if it was changed a little.

    Parameters
    ----------
    preset : str
        Whose number of runs makes the claim whole.
    section : Section
        Of the report.
    dataset, optimizer : str
        With the usual network, and the usual learning rates.
    """

    preset: str
    section: Section
    dataset: str
    optimizer: str = "sgd"

    @property
    def words(self) -> str:
        """The scope in short."""
        other = "" if self.optimizer == "sgd" else f", {self.optimizer}"
        return f"{self.dataset}{other}"

    def choose(self, results: Iterable[Result]) -> list[Result]:
        """Those of the results that belong to it."""
        return [
            result
            for result in results
            if section_of(result.run) is self.section and self._has(result.run)
        ]

    def _has(self, run: Run) -> bool:
        key = self.dataset, self.optimizer
        return (
            (run.dataset, run.optimizer) == key
            and run.network == NETWORKS[self.dataset]
            and run.learning_rate in RATES[key]
        )

    def count(self) -> int:
        """How many runs of a method the preset has."""
        return len(self._runs())

    def count_high(self) -> int:
        """How many of these have a high learning rate."""
        return sum(map(is_high, self._runs()))

    def _runs(self) -> list[Run]:
        runs = presets()[self.preset].runs()
        return [run for run in runs if run.method == "mirror" and self._has(run)]


def is_high(run: Run) -> bool:
    """Whether a run has the highest of the usual learning rates, and 4 workers."""
    rate = max(RATES[run.dataset, run.optimizer])
    return (run.learning_rate, run.num_workers) == (rate, HIGH_RATE_WORKERS)


MNIST = Scope("mnist", ACCURACY, "mnist")
CIFAR = Scope("cifar", ACCURACY, "cifar10")
NAG = Scope("adaptive", OTHER_OPTIMIZERS, "mnist", "nag")
ADAM = Scope("adaptive", OTHER_OPTIMIZERS, "mnist", "adam")
ON_LINKS = Scope("time", TIME, "mnist")


def check_claims(results: Iterable[Result]) -> list[Check]:
    """All claims, in the order of the issue that made them."""
    whole, usual = list(results), (MNIST, CIFAR)
    checks = [_keeps_accuracy(s, m, whole) for s in usual for m in HOPEFUL]
    checks += [_keeps_accuracy(scope, "mirror", whole) for scope in (NAG, ADAM)]
    checks += _orders(whole)
    checks += [_never_fails(s, m, whole) for s in usual for m in HOPEFUL]
    return [*checks, _is_faster(ON_LINKS, whole)]


def claims_table(checks: Sequence[Check]) -> Table:
    """The check list."""
    rows = [(check.claim, check.found, check.verdict) for check in checks]
    return Table("", ("claim", "found", "verdict"), rows, num_left=3)


def claims_text(checks: Sequence[Check]) -> str:
    """The claims about which something is known, in lines for a terminal."""
    known = [check for check in checks if check.verdict != NOT_MEASURED]
    lines = [f"{c.verdict}: {c.claim}\n    {c.found}" for c in known]
    if len(known) < len(checks):
        num_left = len(checks) - len(known)
        lines.append(f"{NOT_MEASURED}: {num_left} of {len(checks)} claims")
    return "\n".join(["Claims", *lines])


def _keeps_accuracy(scope: Scope, method: str, results: Iterable[Result]) -> Check:
    """The interval reaches zero, and no setting's mean is far below."""
    claim = (
        f"{scope.words}: {method} is as good as dist_sync "
        f"(95 % interval reaches 0, no setting below {WORST_MEAN:g})"
    )
    pooled = pool(differences(scope.choose(results), method))
    if pooled is None or pooled.reaches_zero is None:
        return Check(claim, _few(pooled is not None), NOT_MEASURED)
    found = (
        f"{interval(pooled.estimate)} (mean {with_error(pooled.estimate)}, "
        f"{pooled.estimate.count} pairs), worst of {pooled.num_settings} settings "
        f"{points(pooled.worst)}"
    )
    holds = pooled.reaches_zero and pooled.worst >= WORST_MEAN
    return _judged(claim, found, holds, pooled.estimate.count >= scope.count())


def _orders(results: Sequence[Result]) -> list[Check]:
    """In each setting: dist_async and none below dist_sync, sgd in between."""
    checks = []
    chosen = [r for r in results if section_of(r.run) in (ACCURACY, MANY)]
    for setting, group in by_setting(chosen).items():
        found = {
            method: estimate(
                v for p in differences(group, method).values() for v in p.values()
            )
            for method in PREDICTED_ORDER
        }
        if None in found.values():
            continue
        delayed, ablation, plain = (found[m].mean for m in PREDICTED_ORDER)
        claim = (
            f"{describe(setting)}: dist_async scaled and none below dist_sync, "
            "sgd between none and dist_sync"
        )
        text = ", ".join(f"{m} {with_error(e)}" for m, e in found.items())
        holds = delayed < 0 and ablation < plain < 0
        checks.append(Check(claim, text, PREDICTED if holds else NOT_PREDICTED))
    if checks:
        return checks
    claim = "dist_async scaled and none below dist_sync, sgd in between"
    return [Check(claim, _few(False), NOT_MEASURED)]


def _never_fails(scope: Scope, method: str, results: Iterable[Result]) -> Check:
    """No training fails at the high learning rate."""
    usual, high = RATES[scope.dataset, scope.optimizer]
    claim = (
        f"{scope.words}, {HIGH_RATE_WORKERS} workers, lr {high:g} ({high / usual:g} x "
        f"the usual): no run of {method} fails"
    )
    chosen = [r for r in scope.choose(results) if is_high(r.run)]
    runs = [result for result in chosen if result.run.method == method]
    if not runs:
        return Check(claim, _few(False), NOT_MEASURED)
    num_failed = count_failed(runs)
    lowest = min(result.accuracy for result in runs)
    found = f"{num_failed} of {len(runs)} failed, lowest accuracy {lowest:.2f} %"
    return _judged(claim, found, num_failed == 0, len(runs) >= scope.count_high())


def _is_faster(scope: Scope, results: Iterable[Result]) -> Check:
    """dist_odsgd reaches the accuracy earlier."""
    level = LEVELS[scope.dataset]
    claim = (
        f"{scope.words}, links as slow as the computation: mirror reaches {level:g} % "
        "in less time than dist_sync"
    )
    ratios = time_ratios(scope.choose(results), "mirror", level)
    mean = geometric_mean(ratios)
    if mean is None:
        return Check(claim, _few(False), NOT_MEASURED)
    found = f"{ratio(mean)} of its time ({', '.join(map(ratio, ratios))})"
    return _judged(claim, found, mean < 1, len(ratios) >= scope.count())


def _judged(claim: str, found: str, holds: bool, is_whole: bool) -> Check:
    """A verdict, with a remark if some of the preset's runs are still missing."""
    verdict = MET if holds else NOT_MET
    return Check(claim, found, verdict if is_whole else f"{verdict} so far")


def _few(has_one: bool) -> str:
    return "one pair only" if has_one else "no runs yet"
