"""The claims of benchmark_convergence.py about results that nobody measured."""

import dataclasses
import re

import pytest
from convergence_results import outcome

USUAL = {"dist_async_scaled": -1.0, "none": -3.0, "sgd": -0.5}
ORDER_AT = "mnist, lenet5, {} workers, sgd lr {}, {}: dist_async scaled and none below "
FASTER = "mnist, links as slow as the computation: mirror reaches 97 % in less time "


@pytest.fixture
def new_results(modules):
    """Make results of a preset; by default the methods are ordered as predicted."""
    result_type = modules("convergence_store").Result
    presets = modules("convergence_presets").presets()

    def make(preset, seconds=10.0, has=lambda run: True, **accuracies):
        """Accuracies above dist_sync's: a number, or one for each seed."""
        found = []
        for run in filter(has, presets[preset].runs()):
            above = {**USUAL, **accuracies}.get(run.method.replace(" ", "_"), 0)
            if isinstance(above, tuple):
                above = above[run.seed - 1]
            time = seconds if run.method == "mirror" else 20.0
            content = outcome(run, 97 + above + run.seed / 10, time)
            found.append(result_type.from_json(content))
        return found

    return make


@pytest.fixture
def check(modules):
    """Check all claims; by its text without what is in brackets, each one's outcome."""

    def call(results):
        checks = modules("convergence_claims").check_claims(results)
        found = {re.sub(r" \(.*?\)", "", each.claim): each for each in checks}
        assert len(found) == len(checks) == 15
        return found

    return call


def order_of(found, *setting):
    """The check of the order in a setting."""
    begin = ORDER_AT.format(*setting)
    (chosen,) = [each for text, each in found.items() if text.startswith(begin)]
    return chosen


def with_run(result, **fields):
    """A result as of another run."""
    return dataclasses.replace(result, run=dataclasses.replace(result.run, **fields))


def test_nothing_is_claimed_without_runs(check):
    found = check([])
    assert {each.verdict for each in found.values()} == {"not measured"}
    assert {each.found for each in found.values()} == {"no runs yet"}


def test_claims_hold_on_results_that_are_as_they_should_be(check, new_results):
    found = check(new_results("mnist") + new_results("many"))
    met = [text for text, each in found.items() if each.verdict == "met"]
    assert met == [
        "mnist: mirror is as good as dist_sync",
        "mnist: replica is as good as dist_sync",
        "mnist, 4 workers, lr 0.04: no run of mirror fails",
        "mnist, 4 workers, lr 0.04: no run of replica fails",
    ]
    predicted = [t for t, each in found.items() if each.verdict == "as predicted"]
    assert [text.split(": ")[0] for text in predicted] == [
        "mnist, lenet5, 4 workers, sgd lr 0.04, 2 epochs",
        "mnist, lenet5, 8 workers, sgd lr 0.04, 1 epoch",
    ]
    orders = [text for text in found if "sgd between none and dist_sync" in text]
    assert [text.split(",")[0] for text in orders] == 2 * ["mnist"] + 2 * ["cifar10"]
    others = [each for each in found.values() if each.claim.startswith("cifar10")]
    assert {each.verdict for each in others} == {"not measured"}


@pytest.mark.parametrize(
    ("changes", "method", "verdict"),
    [
        # All pairs alike: the interval is a point below zero.
        ({"mirror": -0.5}, "mirror", "NOT met"),
        ({"replica": -80}, "replica", "NOT met"),
        ({"mirror": 0.5}, "mirror", "met"),
        ({"mirror": -0.5}, "replica", "met"),
        # The interval reaches zero, but the settings' means are -1.5.
        ({"mirror": (-9, 2, 2.5)}, "mirror", "NOT met"),
        ({"mirror": (-1, 1, -0.5)}, "mirror", "met"),
    ],
)
def test_a_method_is_as_good_or_not(check, new_results, changes, method, verdict):
    found = check(new_results("mnist", **changes))
    assert found[f"mnist: {method} is as good as dist_sync"].verdict == verdict


def test_one_bad_setting_breaks_a_claim_whose_interval_reaches_zero(check, new_results):
    def is_bad(run):
        return (run.num_workers, run.learning_rate) == (2, 0.04)

    results = new_results("mnist", has=lambda run: not is_bad(run), mirror=1.0)
    results += new_results("mnist", has=is_bad, mirror=-1.1)
    found = check(results)["mnist: mirror is as good as dist_sync"]
    assert found.verdict == "NOT met" and found.found.endswith("settings -1.10")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "as predicted"),
        ({"sgd": 0.5}, "NOT as predicted"),
        ({"sgd": -5}, "NOT as predicted"),  # below none
        ({"dist_async_scaled": 0.1}, "NOT as predicted"),
        ({"none": 0.0}, "NOT as predicted"),
        # Mean 0.03 with an error of 0.33; mean -0.17 with one of 0.33.
        ({"sgd": (0.5, -0.6, 0.2)}, "within noise"),
        ({"sgd": (-0.5, 0.5, -0.5)}, "within noise"),
        # Means -0.7 and -0.5: none is below sgd by 0.2, with an error of 0.42.
        ({"none": (-0.5, -1.5, -0.1)}, "within noise"),
        # One comparison is noise, another is clearly the other way.
        ({"sgd": (0.5, -0.6, 0.2), "dist_async_scaled": 1}, "NOT as predicted"),
    ],
)
def test_an_order_is_as_predicted_or_not_or_noise(check, new_results, changes, verdict):
    found = order_of(check(new_results("mnist", **changes)), 4, 0.04, "2 epochs")
    assert found.verdict == verdict
    assert "none minus sgd" in found.found


def test_one_seed_tells_nothing_of_an_order(check, new_results):
    results = new_results("mnist", has=lambda run: run.seed == 1)
    found = order_of(check(results), 4, 0.04, "2 epochs")
    assert found.verdict == "not measured"
    assert found.found == "some methods have fewer than two pairs"
    results = new_results("mnist", has=lambda run: run.seed < 3)
    found = order_of(check(results), 4, 0.04, "2 epochs")
    assert found.verdict == "as predicted so far"


def test_one_failed_training_at_the_high_rate_breaks_a_claim(check, new_results):
    results = new_results("mnist")
    (last,) = [
        r for r in results if r.run.name.startswith("mnist-lenet5-sgd-lr0.04-w4-rep")
        and r.run.seed == 3
    ]  # fmt: skip
    failed = dataclasses.replace(with_run(last, seed=4), accuracy=11.3)
    found = check([*results, failed])
    replica = found["mnist, 4 workers, lr 0.04: no run of replica fails"]
    assert replica.verdict == "NOT met"
    assert replica.found == "1 of 4 failed, lowest accuracy 11.30 %"
    mirror = found["mnist, 4 workers, lr 0.04: no run of mirror fails"]
    assert mirror.verdict == "met"


@pytest.mark.parametrize("missing", ["mirror", "dist_sync"])
def test_a_claim_is_whole_with_all_runs_of_the_method_and_of_dist_sync(
    check, new_results, missing
):
    def has(run):
        return run.method != missing or run.seed < 3

    # Results of another setting do not fill the gap.
    results = new_results("mnist", has=has)
    results += [with_run(result, epochs=3) for result in new_results("mnist")]
    found = check(results)
    assert found["mnist: mirror is as good as dist_sync"].verdict == "met so far"
    other = found["mnist: replica is as good as dist_sync"].verdict
    assert other == ("met" if missing == "mirror" else "met so far")


@pytest.mark.parametrize(
    ("seconds", "mirror", "verdict", "text"),
    [
        (8.0, 0, "met", "0.40 of its time (0.40, 0.40)"),
        (30.0, 0, "NOT met", "1.50 of its time (1.50, 1.50)"),
        (8.0, -2, "NOT met", "never of its time (never, never)"),
    ],
)
def test_the_time_to_an_accuracy_is_claimed(
    check, new_results, seconds, mirror, verdict, text
):
    found = check(new_results("time", seconds, mirror=mirror))
    faster = found[f"{FASTER}than dist_sync"]
    assert (faster.verdict, faster.found) == (verdict, text)


@pytest.mark.parametrize(
    ("accuracies", "verdict", "text"),
    [
        ((-1, -1), "not measured", "dist_sync never reaches it in 2 of 2 pairs"),
        (
            (0, -1),
            "met",
            "0.40 of its time (0.40); dist_sync never reaches it in 1 of 2 pairs",
        ),
    ],
)
def test_it_is_said_where_dist_sync_never_reaches_the_accuracy(
    check, new_results, accuracies, verdict, text
):
    found = check(new_results("time", 8.0, dist_sync=accuracies))
    faster = found[f"{FASTER}than dist_sync"]
    assert (faster.verdict, faster.found) == (verdict, text)


def test_optimizers_and_data_are_kept_apart_in_the_claims(check, new_results):
    results = new_results("optimizers", mirror=-0.9)
    results += new_results("cifar", has=lambda run: run.learning_rate == 0.02)
    results += new_results("noniid")
    found = check(results)
    for name in ("nag", "adam"):
        claim = found[f"mnist, {name}: mirror is as good as dist_sync"]
        assert claim.verdict == "NOT met"
    claim = found["cifar10: mirror is as good as dist_sync"]
    assert claim.verdict == "met so far"
    assert found["mnist: mirror is as good as dist_sync"].verdict == "not measured"
