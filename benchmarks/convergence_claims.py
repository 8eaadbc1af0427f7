"""What the benchmark must show, checked against the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable, Sequence

from convergence_presets import RATES, presets
from convergence_run import Run
from convergence_sections import LEVELS, describe
from convergence_statistics import (
    BASELINE,
    Estimate,
    by_method,
    count_failed,
    differences,
    estimate,
    geometric_mean,
    pool,
    setting_of,
    time_ratios,
)
from convergence_store import Result
from convergence_tables import Table, interval, points, ratio, with_error

HOPEFUL = ("mirror", "replica")
WORST_MEAN = -1.0
HIGH_RATE_WORKERS = 4
CLEAR_ERRORS = 2  # so many standard errors are no noise
MET, NOT_MET, NOT_MEASURED = "met", "NOT met", "not measured"
PREDICTED, NOT_PREDICTED = "as predicted", "NOT as predicted"
WITHIN_NOISE = "within noise"
ORDERED = ("dist_async scaled", "none", "sgd")


@dataclass(frozen=True)
class Check:
    """A claim, what was found, and whether it holds."""

    claim: str
    found: str
    verdict: str


@dataclass(frozen=True)
class Scope:
    """What a claim is about.

    Parameters
    ----------
    words : str
        The scope in short.
    runs : tuple of Run
        Of a preset. Results of these settings count, also with other seeds.
    """

    words: str
    runs: tuple[Run, ...]

    def choose(self, results: Iterable[Result]) -> list[Result]:
        """Those of the results that belong to it."""
        settings = set(map(setting_of, self.runs))
        return [result for result in results if setting_of(result.run) in settings]

    def is_whole(self, results: Iterable[Result], *methods: str) -> bool:
        """Whether all runs of these methods, and of dist_sync, are there."""
        chosen = (BASELINE, *methods)
        wanted = {run for run in self.runs if run.method in chosen}
        return wanted <= {result.run for result in results}


def scope_of(
    words: str, preset: str, has: Callable[[Run], bool] = lambda _: True
) -> Scope:
    """Those of a preset's runs for which `has` is true."""
    return Scope(words, tuple(filter(has, presets()[preset].runs())))


def is_high(run: Run) -> bool:
    """Whether a run has the highest of the usual learning rates, and 4 workers."""
    rate = max(RATES[run.dataset, run.optimizer])
    return (run.learning_rate, run.num_workers) == (rate, HIGH_RATE_WORKERS)


def predicted_orders() -> list[Scope]:
    """The settings for which the simulation has predicted an order of methods."""
    high = max(RATES["mnist", "sgd"])
    runs = [
        run
        for preset in ("mnist", "many", "cifar")
        for run in presets()[preset].runs()
        if run.dataset == "cifar10"
        or (run.learning_rate == high and run.num_workers in (4, 8))
    ]
    return [
        Scope(describe(setting), tuple(r for r in runs if setting_of(r) == setting))
        for setting in dict.fromkeys(map(setting_of, runs))
    ]


def check_claims(results: Iterable[Result]) -> list[Check]:
    """All claims, in the order of the issue that made them."""
    whole = list(results)
    usual = [scope_of("mnist", "mnist"), scope_of("cifar10", "cifar")]
    high = [
        scope_of("mnist", "mnist", has=is_high),
        scope_of("cifar10", "cifar", has=is_high),
    ]
    others = [
        scope_of("mnist, nag", "optimizers", lambda run: run.optimizer == "nag"),
        scope_of("mnist, adam", "optimizers", lambda run: run.optimizer == "adam"),
    ]
    return [
        *(_keeps_accuracy(scope, m, whole) for scope in usual for m in HOPEFUL),
        *(_keeps_accuracy(scope, "mirror", whole) for scope in others),
        *(_order(scope, whole) for scope in predicted_orders()),
        *(_never_fails(scope, m, whole) for scope in high for m in HOPEFUL),
        _is_faster(scope_of("mnist", "time"), whole),
    ]


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
    chosen = scope.choose(results)
    pooled = pool(differences(chosen, method))
    if pooled is None or pooled.reaches_zero is None:
        return Check(claim, _few(pooled is not None), NOT_MEASURED)
    found = (
        f"{interval(pooled.estimate)} (mean {with_error(pooled.estimate)}, "
        f"{pooled.estimate.count} pairs), worst of {pooled.num_settings} settings "
        f"{points(pooled.worst)}"
    )
    holds = pooled.reaches_zero and pooled.worst >= WORST_MEAN
    return _judged(claim, found, holds, scope.is_whole(chosen, method))


def _order(scope: Scope, results: Iterable[Result]) -> Check:
    """In a setting: dist_async and none below dist_sync, sgd in between."""
    claim = (
        f"{scope.words}: dist_async scaled and none below dist_sync, "
        "sgd between none and dist_sync"
    )
    chosen = scope.choose(results)
    found = {method: _difference(chosen, method) for method in ORDERED}
    found["none minus sgd"] = _difference(chosen, "none", "sgd")
    known = [e for e in found.values() if e is not None and e.error is not None]
    if len(known) < len(found):
        some = "some methods have fewer than two pairs"
        text = some if any(found.values()) else _few(False)
        return Check(claim, text, NOT_MEASURED)
    text = ", ".join(f"{name} {with_error(e)}" for name, e in found.items())
    verdict = _ordered(known)
    return Check(claim, text, _so_far(verdict, scope.is_whole(chosen, *ORDERED)))


def _difference(
    results: Iterable[Result], method: str, other: str = BASELINE
) -> Estimate | None:
    """Of a setting's accuracies with a method, less those with another one."""
    methods = by_method(results)
    base = {r.run.seed: r.accuracy for r in methods.get(other, ())}
    runs = [r for r in methods.get(method, ()) if r.run.seed in base]
    return estimate(r.accuracy - base[r.run.seed] for r in runs)


def _ordered(found: Sequence[Estimate]) -> str:
    """The verdict on differences that should all be below zero."""
    clear = [abs(d.mean) >= CLEAR_ERRORS * d.error for d in found]
    if any(c and d.mean >= 0 for c, d in zip(clear, found)):
        return NOT_PREDICTED
    return PREDICTED if all(clear) else WITHIN_NOISE


def _never_fails(scope: Scope, method: str, results: Iterable[Result]) -> Check:
    """No training fails at the high learning rate."""
    run = scope.runs[0]
    usual, high = RATES[run.dataset, run.optimizer]
    claim = (
        f"{scope.words}, {HIGH_RATE_WORKERS} workers, lr {high:g} ({high / usual:g} x "
        f"the usual): no run of {method} fails"
    )
    chosen = scope.choose(results)
    runs = [result for result in chosen if result.run.method == method]
    if not runs:
        return Check(claim, _few(False), NOT_MEASURED)
    num_failed = count_failed(runs)
    lowest = min(result.accuracy for result in runs)
    found = f"{num_failed} of {len(runs)} failed, lowest accuracy {lowest:.2f} %"
    return _judged(claim, found, num_failed == 0, scope.is_whole(chosen, method))


def _is_faster(scope: Scope, results: Iterable[Result]) -> Check:
    """dist_odsgd reaches the accuracy earlier."""
    level = LEVELS[scope.runs[0].dataset]
    claim = (
        f"{scope.words}, links as slow as the computation: mirror reaches {level:g} % "
        "in less time than dist_sync"
    )
    chosen = scope.choose(results)
    ratios = time_ratios(chosen, "mirror", level)
    num_pairs = sum(map(len, differences(chosen, "mirror").values()))
    never = (
        f"dist_sync never reaches it in {num_pairs - len(ratios)} of {num_pairs} pairs"
    )
    mean = geometric_mean(ratios)
    if mean is None:
        return Check(claim, never if num_pairs else _few(False), NOT_MEASURED)
    found = f"{ratio(mean)} of its time ({', '.join(map(ratio, ratios))})"
    if len(ratios) < num_pairs:
        found = f"{found}; {never}"
    return _judged(claim, found, mean < 1, scope.is_whole(chosen, "mirror"))


def _judged(claim: str, found: str, holds: bool, is_whole: bool) -> Check:
    """Whether a claim is met."""
    return Check(claim, found, _so_far(MET if holds else NOT_MET, is_whole))


def _so_far(verdict: str, is_whole: bool) -> str:
    """A verdict, with a remark if some of the preset's runs are still missing."""
    return verdict if is_whole else f"{verdict} so far"


def _few(has_one: bool) -> str:
    return "one pair only" if has_one else "no runs yet"
