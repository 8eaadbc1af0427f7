"""What the benchmark must show, checked against the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Sequence

from convergence_presets import NETWORKS, RATES
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

DATASETS = ("mnist", "cifar10")
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


def check_claims(results: Iterable[Result]) -> list[Check]:
    """All claims, in the order of the issue that made them."""
    whole = list(results)
    checks = []
    for dataset in DATASETS:
        usual = _of(whole, ACCURACY, dataset, "sgd")
        checks += [_keeps_accuracy(usual, dataset, m) for m in ("mirror", "replica")]
    for optimizer in ("nag", "adam"):
        usual = _of(whole, OTHER_OPTIMIZERS, "mnist", optimizer)
        checks.append(_keeps_accuracy(usual, f"mnist, {optimizer}", "mirror"))
    checks += _orders(whole)
    for dataset in DATASETS:
        high = _at_high_rate(_of(whole, ACCURACY, dataset, "sgd"), dataset)
        checks += [_never_fails(high, dataset, m) for m in ("mirror", "replica")]
    checks.append(_is_faster(_of(whole, TIME, "mnist", "sgd", usual_only=False)))
    return checks


def claims_table(checks: Sequence[Check]) -> Table:
    """The check list."""
    rows = [(check.claim, check.found, check.verdict) for check in checks]
    return Table("Claims", ("claim", "found", "verdict"), rows, num_left=3)


def claims_text(checks: Sequence[Check]) -> str:
    """The claims about which something is known, in lines for a terminal."""
    known = [check for check in checks if check.verdict != NOT_MEASURED]
    lines = [f"{c.verdict}: {c.claim}\n    {c.found}" for c in known]
    if len(known) < len(checks):
        num_left = len(checks) - len(known)
        lines.append(f"{NOT_MEASURED}: {num_left} of {len(checks)} claims")
    return "\n".join(["Claims", *lines])


def _of(
    results: Iterable[Result],
    section: Section,
    dataset: str,
    optimizer: str,
    usual_only: bool = True,
) -> list[Result]:
    """The runs that a claim is about: known network, the presets' learning rates."""
    rates = RATES[dataset, optimizer]
    return [
        result
        for result in results
        if section_of(result.run) is section
        and (result.run.dataset, result.run.optimizer) == (dataset, optimizer)
        and result.run.network == NETWORKS[dataset]
        and (not usual_only or result.run.learning_rate in rates)
    ]


def _keeps_accuracy(results: Sequence[Result], what: str, method: str) -> Check:
    """The interval reaches zero, and no setting's mean is far below."""
    claim = (
        f"{what}: {method} is as good as dist_sync "
        f"(95 % interval reaches 0, no setting below {WORST_MEAN:g})"
    )
    pooled = pool(differences(results, method))
    if pooled is None or pooled.reaches_zero is None:
        return Check(claim, _few(pooled is not None), NOT_MEASURED)
    found = (
        f"{interval(pooled.estimate)} (mean {with_error(pooled.estimate)}, "
        f"{pooled.estimate.count} pairs), worst of {pooled.num_settings} settings "
        f"{points(pooled.worst)}"
    )
    return _judged(claim, found, pooled.reaches_zero and pooled.worst >= WORST_MEAN)


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


def _at_high_rate(results: Sequence[Result], dataset: str) -> list[Result]:
    """Those at the highest of the presets' learning rates, with 4 workers."""
    rate = max(RATES[dataset, "sgd"])
    return [
        result
        for result in results
        if result.run.learning_rate == rate
        and result.run.num_workers == HIGH_RATE_WORKERS
    ]


def _never_fails(results: Sequence[Result], dataset: str, method: str) -> Check:
    """No training fails at the high learning rate."""
    usual, high = RATES[dataset, "sgd"]
    claim = (
        f"{dataset}, {HIGH_RATE_WORKERS} workers, lr {high:g} ({high / usual:g} x the "
        f"usual): no run of {method} fails"
    )
    runs = [result for result in results if result.run.method == method]
    if not runs:
        return Check(claim, _few(False), NOT_MEASURED)
    num_failed = count_failed(runs)
    lowest = min(result.accuracy for result in runs)
    found = f"{num_failed} of {len(runs)} failed, lowest accuracy {lowest:.2f} %"
    return _judged(claim, found, num_failed == 0)


def _is_faster(results: Sequence[Result]) -> Check:
    """dist_odsgd reaches the accuracy earlier."""
    level = LEVELS["mnist"]
    claim = (
        f"mnist, links as slow as the computation: mirror reaches {level:g} % in less "
        "time than dist_sync"
    )
    ratios = time_ratios(results, "mirror", level)
    mean = geometric_mean(ratios)
    if mean is None:
        return Check(claim, _few(False), NOT_MEASURED)
    found = f"{ratio(mean)} of its time ({', '.join(map(ratio, ratios))})"
    return _judged(claim, found, mean < 1)


def _judged(claim: str, found: str, holds: bool) -> Check:
    return Check(claim, found, MET if holds else NOT_MET)


def _few(has_one: bool) -> str:
    return "one pair only" if has_one else "no runs yet"
