"""The statistics of benchmark_convergence.py, against numbers computed by hand."""

import dataclasses
import math

import pytest
from scipy import stats


@pytest.fixture
def statistics(modules):
    return modules("convergence_statistics")


@pytest.fixture
def result(modules):
    """Make what a run came to."""
    run_type = modules("convergence_run").Run
    result_type = modules("convergence_store").Result

    ends = {"evaluations": [(100, 10.0, 50.0)], "losses": [(100, 0.5)]}

    def make(method, seed, accuracy, evaluations=None, losses=None, **fields):
        evaluations, losses = (
            evaluations or ends["evaluations"],
            losses or ends["losses"],
        )
        run = run_type("mnist", "lenet5", method, seed=seed, **fields)
        content = {
            "run": dataclasses.asdict(run), "accuracy": None if math.isnan(accuracy) else accuracy / 100,
            "num_steps": 100, "seconds": 10.0, "wall_s": 12.0, "losses": losses,
            "evaluations": [[s, t, a / 100, 0.1] for s, t, a in evaluations],
        }  # fmt: skip
        return result_type.from_json(content)

    return make


def test_an_estimate_has_the_error_and_student_interval_of_its_figures(statistics):
    found = statistics.estimate([1, 2, 3, 6])
    # Deviations -2, -1, 0, 3: squares 14; sd sqrt(14/3); t(0.975, 3) = 3.182446.
    assert (found.count, found.mean, found.low, found.high) == (4, 3, 1, 6)
    assert found.deviation == pytest.approx(math.sqrt(14 / 3))
    assert found.error == pytest.approx(math.sqrt(14 / 12))
    reach = 3.182446 * math.sqrt(14 / 12)
    assert found.interval == pytest.approx((3 - reach, 3 + reach), rel=1e-6)
    scipy_s = stats.t.interval(0.95, 3, loc=3, scale=stats.sem([1, 2, 3, 6]))
    assert found.interval == pytest.approx(scipy_s)


def test_one_figure_has_no_error_and_none_no_estimate(statistics):
    found = statistics.estimate([7.5])
    assert (found.mean, found.deviation, found.error, found.interval) == (
        7.5, None, None, None,
    )  # fmt: skip
    assert statistics.estimate([]) is None
    assert statistics.estimate([1.0, math.nan]) is None


def test_a_difference_is_between_equal_settings_and_seeds_only(statistics, result):
    results = [
        result("dist_sync", 1, 97.0), result("mirror", 1, 97.5),
        result("dist_sync", 2, 96.0), result("mirror", 2, 95.5),
        result("mirror", 3, 50.0),  # no dist_sync with this seed
        result("dist_sync", 1, 90.0, learning_rate=0.04),
        result("mirror", 1, 93.0, learning_rate=0.04),
        result("mirror", 1, 10.0, learning_rate=0.08),  # nor with this rate
    ]  # fmt: skip
    found = statistics.differences(results, "mirror")
    by_rate = {setting.learning_rate: pairs for setting, pairs in found.items()}
    assert by_rate == {
        0.01: pytest.approx({1: 0.5, 2: -0.5}), 0.04: pytest.approx({1: 3.0})
    }  # fmt: skip
    assert {setting.method for setting in found} == {""}


def test_pooling_counts_each_pair_alike_and_finds_the_worst_setting(statistics, result):
    results = [
        result(method, seed, accuracy, num_workers=workers)
        for workers, method, accuracies in (
            (2, "dist_sync", (90, 90)), (2, "sgd", (89, 88)),
            (4, "dist_sync", (90, 90)), (4, "sgd", (91, 92)),
        )
        for seed, accuracy in enumerate(accuracies, 1)
    ]  # fmt: skip
    pooled = statistics.pool(statistics.differences(results, "sgd"))
    assert (pooled.estimate.count, pooled.num_settings) == (4, 2)
    assert pooled.estimate.mean == pytest.approx(0)
    assert pooled.worst == pytest.approx(-1.5)
    # sd of -1, -2, 1, 2 is sqrt(10/3); half of it times t(0.975, 3).
    reach = 3.182446 * math.sqrt(10 / 3) / 2
    assert pooled.estimate.interval == pytest.approx((-reach, reach), rel=1e-6)
    assert pooled.reaches_zero is True
    assert statistics.pool({}) is None


def test_an_interval_below_zero_does_not_reach_it_and_one_pair_does_not_tell(
    statistics, result
):
    runs = [result("dist_sync", s, 97) for s in (1, 2)]
    runs += [result("none", s, 95 + s / 10) for s in (1, 2)]
    assert statistics.pool(statistics.differences(runs, "none")).reaches_zero is False
    alone = [run for run in runs if run.run.seed == 1]
    assert statistics.pool(statistics.differences(alone, "none")).reaches_zero is None


@pytest.mark.parametrize(
    ("accuracy", "fields", "failed"),
    [
        (19.9, {}, True),
        (20.1, {}, False),
        (math.nan, {}, True),
    ],
)
def test_a_training_fails_below_twice_chance(
    statistics, result, accuracy, fields, failed
):
    assert statistics.is_failed(result("none", 1, accuracy, **fields)) is failed


def test_chance_depends_on_the_number_of_classes(statistics, result):
    run = result("none", 1, 0.3)
    imagenet = dataclasses.replace(run.run, dataset="imagenet")
    assert statistics.count_failed([run, dataclasses.replace(run, run=imagenet)]) == 1


def test_the_loss_at_a_fraction_is_that_of_the_point_that_covers_it(statistics, result):
    losses = [[5, 2.0], [25, 1.0], [50, None], [100, 0.25]]
    run = result("mirror", 1, 97, losses=losses)
    at = [statistics.loss_at(run, fraction) for fraction in (0.05, 0.1, 0.25, 1)]
    assert at == [2.0, 1.0, 1.0, 0.25]
    assert math.isnan(statistics.loss_at(run, 0.5))


def test_the_time_to_an_accuracy_is_linear_between_evaluations(statistics, result):
    run = result("mirror", 1, 97, [(25, 2, 90), (50, 4, 94), (75, 6, 93), (100, 8, 98)])
    assert statistics.time_to(run, 97) == pytest.approx(6 + 2 * 4 / 5)
    assert statistics.time_to(run, 94) == 4
    assert statistics.time_to(run, 92) == 3
    assert statistics.time_to(run, 80) == 2  # good enough at the first one
    assert statistics.time_to(run, 98.5) is None


def test_ratios_of_times_are_paired_and_infinite_where_only_dist_sync_arrives(
    statistics, result
):
    def run(method, seed, seconds, accuracy=98):
        return result(method, seed, accuracy, [(1, 0, 0), (100, seconds, accuracy)])

    results = [
        run("dist_sync", 1, 10), run("mirror", 1, 5),
        run("dist_sync", 2, 10), run("mirror", 2, 20),
        run("dist_sync", 3, 10, accuracy=96), run("mirror", 3, 5),  # sync never does
        run("none", 1, 10, accuracy=90),
    ]  # fmt: skip
    ratios = statistics.time_ratios(results, "mirror", 97)
    assert ratios == pytest.approx([0.5, 2])
    assert statistics.geometric_mean(ratios) == pytest.approx(1)
    assert statistics.time_ratios(results, "none", 97) == [math.inf]
    assert statistics.geometric_mean([math.inf, 0.5]) == math.inf
    assert statistics.geometric_mean([]) is None


def test_settings_are_ordered_by_number_and_methods_as_they_are_listed(
    statistics, result
):
    results = [
        result("mirror", 2, 97, num_workers=10), result("none", 1, 97, num_workers=10),
        result("dist_sync", 1, 97, num_workers=10), result("mirror", 1, 97),
        result("mirror", 1, 97, num_workers=10, max_train=9),
    ]  # fmt: skip
    groups = statistics.by_setting(results)
    assert [(s.num_workers, s.max_train) for s in groups] == [
        (2, None), (10, None), (10, 9),
    ]  # fmt: skip
    methods = statistics.by_method(list(groups.values())[1])
    assert list(methods) == ["dist_sync", "none", "mirror"]
