"""Sections, tables, claims and pictures of benchmark_convergence.py."""

import functools
import re
import sys
from pathlib import Path

import pytest
from convergence_results import make_run, outcome

import odsgd_kvstore

BENCHMARKS = Path(odsgd_kvstore.__file__).absolute().parents[1] / "benchmarks"
# Matplotlib 3.7 calls pyparsing by names that later versions of it warn about.
DRAWS = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ORDER = ("dist_sync", "dist_async scaled", "none", "sgd", "mirror", "replica")


@pytest.fixture
def modules(monkeypatch):
    """Import from the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__


@pytest.fixture
def new_run(modules):
    """Make a run, by default a short one of the mnist preset."""
    return functools.partial(make_run, modules("convergence_run").Run)


@pytest.fixture
def new_result(modules, new_run):
    """Make a result of a run of `new_run`."""
    result_type = modules("convergence_store").Result

    def make(method, seed, accuracy, seconds=10.0, **fields):
        content = outcome(new_run(method, seed, **fields), accuracy, seconds)
        return result_type.from_json(content)

    return make


@pytest.fixture
def store(modules, tmp_path):
    return modules("convergence_store").Store(tmp_path / "results")


@pytest.mark.parametrize(
    ("fields", "slug"),
    [
        ({}, "accuracy"),
        ({"learning_rate": 0.04, "warmup_steps": 0, "schedule": "step"}, "accuracy"),
        ({"num_workers": 8}, "many"),
        ({"optimizer": "adam", "num_workers": 8}, "optimizers"),
        ({"partition": "classes", "optimizer": "nag"}, "noniid"),
        ({"straggler_ms": 20.0}, "stragglers"),
        ({"compute_ms": 40.0, "rate": "70mbit"}, "time"),
        ({"dataset": "imagenet", "num_workers": 8}, "imagenet"),
        ({"dataset": "digits"}, "small"),
        ({"max_train": 1000}, "small"),
    ],
)
def test_a_run_belongs_to_one_section(modules, new_run, fields, slug):
    assert modules("convergence_sections").section_of(new_run(**fields)).slug == slug


def test_a_setting_in_words_says_what_is_not_usual(modules, new_run):
    describe = modules("convergence_sections").describe
    assert describe(new_run()) == "mnist, lenet5, 4 workers, sgd lr 0.01, 2 epochs"
    run = new_run(epochs=1, straggler_ms=20.0, num_servers=2, momentum=0.0)
    assert describe(run) == (
        "mnist, lenet5, 4 workers, sgd lr 0.01, 1 epoch, 2 servers, momentum 0, "
        "last worker 20 ms slower"
    )


def mnist_results(new_result, num_workers=(4,), seeds=(1, 2), **accuracies):
    """At two learning rates; by default the methods are ordered as predicted."""
    usual = dict.fromkeys(ORDER, 0.0)
    usual.update({"dist_async scaled": -1.0, "none": -3.0, "sgd": -0.5})
    usual.update(accuracies)
    return [
        new_result(
            method,
            seed,
            97 + difference + seed / 10,
            learning_rate=rate,
            num_workers=workers,
        )
        for workers in num_workers
        for rate in (0.01, 0.04)
        for seed in seeds
        for method, difference in usual.items()
    ]


def test_tables_have_the_figures_of_a_setting_and_of_the_pool(modules, new_result):
    sections = modules("convergence_sections")
    results = mnist_results(new_result, mirror=0.25)
    first, second, pooled = sections.tables_of(sections.ACCURACY, results)
    assert first.title == "mnist, lenet5, 4 workers, sgd lr 0.01, 2 epochs"
    assert second.title.count("lr 0.04") == 1
    by_method = {row[0]: row for row in first.rows}
    assert tuple(by_method) == ORDER
    losses = "2.000 / 1.500 / 1.000 / 0.500"
    assert by_method["dist_sync"][1:] == ["2", "97.15 (97.10-97.20)", "-", losses, "0"]
    assert by_method["mirror"][3] == "+0.25 ± 0.00"
    assert {row[0]: row for row in pooled.rows}["none"] == [
        "none", "4", "-3.00 ± 0.00", "-3.00 to -3.00", "no", "-3.00",
    ]  # fmt: skip
    assert "dist_sync" not in {row[0] for row in pooled.rows}


def test_one_run_has_no_error_and_without_dist_sync_nothing_is_compared(
    modules, new_result
):
    sections = modules("convergence_sections")
    (table,) = sections.tables_of(sections.ACCURACY, [new_result("mirror", 1, 97)])
    assert table.rows[0][1:4] == ["1", "97.00", "-"]
    results = [new_result("mirror", 1, 97), new_result("dist_sync", 1, 96)]
    table, pooled = sections.tables_of(sections.ACCURACY, results)
    assert table.rows[1][3] == "+1.00"
    assert pooled.rows[0][1:5] == ["1", "+1.00", "-", "-"]


def test_seconds_and_the_time_to_an_accuracy_are_in_the_section_about_time(
    modules, new_result
):
    sections = modules("convergence_sections")
    results = [
        new_result(method, seed, 98, seconds, rate="70mbit")
        for seed in (1, 2)
        for method, seconds in (("dist_sync", 20.0), ("mirror", 10.0))
    ]
    table, times, _ = sections.tables_of(sections.TIME, results)
    assert (table.header[-1], table.rows[0][-1]) == ("seconds", "20.0")
    assert times.rows[1] == ["mirror", "2 of 2", "9.9", "0.50", "0.50, 0.50"]
    assert times.rows[0][3] == "-"


def test_a_table_is_text_and_markdown(modules):
    table = modules("convergence_tables").Table("T", ("a", "b"), [("x|y", "1")])
    assert table.text() == "T\na    b\nx|y  1"
    assert table.markdown() == "**T**\n\n| a | b |\n| --- | --: |\n| x\\|y | 1 |"


def whole_preset(new_result, **accuracies):
    """What the mnist preset would give."""
    return mnist_results(new_result, (2, 4), (1, 2, 3), **accuracies)


def verdicts(modules, results):
    """The verdict of each claim, by its text without what is in brackets."""
    checks = modules("convergence_claims").check_claims(results)
    found = {re.sub(r" \(.*?\)", "", check.claim): check.verdict for check in checks}
    assert len(found) == len(checks)
    return found


def test_nothing_is_claimed_without_runs(modules):
    found = verdicts(modules, [])
    assert len(found) == 12 and set(found.values()) == {"not measured"}


def test_claims_hold_on_results_that_are_as_they_should_be(modules, new_result):
    found = verdicts(modules, whole_preset(new_result))
    assert found["mnist: mirror is as good as dist_sync"] == "met"
    assert found["mnist: replica is as good as dist_sync"] == "met"
    assert found["mnist, 4 workers, lr 0.04: no run of mirror fails"] == "met"
    assert found["cifar10: mirror is as good as dist_sync"] == "not measured"
    orders = [text for text in found if "sgd between none and dist_sync" in text]
    assert len(orders) == 4
    assert {found[text] for text in orders} == {"as predicted"}


@pytest.mark.parametrize(
    ("changes", "claim", "verdict"),
    [
        # All pairs alike: the interval is a point below zero.
        ({"mirror": -0.5}, "mnist: mirror is as good as dist_sync", "NOT met"),
        ({"replica": -80}, "mnist: replica is as good as dist_sync", "NOT met"),
        ({"mirror": 0.5}, "mnist: mirror is as good as dist_sync", "met"),
        ({"sgd": 0.5}, "sgd between none", "NOT as predicted"),
        ({"sgd": -5}, "sgd between none", "NOT as predicted"),
        ({"dist_async scaled": 0.1}, "sgd between none", "NOT as predicted"),
    ],
)
def test_a_claim_can_fail(modules, new_result, changes, claim, verdict):
    found = verdicts(modules, whole_preset(new_result, **changes))
    assert {found[text] for text in found if claim in text} == {verdict}


def test_one_bad_setting_breaks_a_claim_whose_interval_reaches_zero(
    modules, new_result
):
    results = whole_preset(new_result, mirror=1.0)
    results += [
        new_result(method, 1, accuracy, epochs=1)
        for method, accuracy in (("dist_sync", 97), ("mirror", 95.9))
    ]
    found = verdicts(modules, results)
    assert found["mnist: mirror is as good as dist_sync"] == "NOT met"


def test_one_failed_training_at_the_high_rate_breaks_a_claim(modules, new_result):
    results = whole_preset(new_result)
    results.append(new_result("replica", 4, 11.3, learning_rate=0.04))
    checks = modules("convergence_claims").check_claims(results)
    found = {check.claim: check for check in checks if "no run of" in check.claim}
    (replica,) = [
        c for text, c in found.items() if "mnist" in text and "replica" in text
    ]
    assert replica.verdict == "NOT met"
    assert replica.found == "1 of 4 failed, lowest accuracy 11.30 %"
    (mirror,) = [c for text, c in found.items() if "mnist" in text and "mirror" in text]
    assert mirror.verdict == "met"


@pytest.mark.parametrize(
    ("seconds", "accuracy", "verdict"),
    [(8.0, 98, "met"), (30.0, 98, "NOT met"), (8.0, 96, "NOT met")],
)
def test_the_time_to_an_accuracy_is_claimed(
    modules, new_result, seconds, accuracy, verdict
):
    results = [
        new_result(method, seed, *figures, rate="70mbit")
        for seed in (1, 2, 3)
        for method, figures in (
            ("dist_sync", (98, 20.0)),
            ("mirror", (accuracy, seconds)),
        )
    ]
    found = verdicts(modules, results)
    text = "mnist, links as slow as the computation: mirror reaches 97 % in less time"
    assert found[f"{text} than dist_sync"] == verdict


def test_other_optimizers_and_data_are_kept_apart_in_the_claims(modules, new_result):
    results = [
        new_result(method, seed, accuracy, **fields)
        for fields in (
            {"optimizer": "nag"},
            {"optimizer": "adam", "learning_rate": 0.001, "num_workers": 8},
            {"dataset": "cifar10", "learning_rate": 0.02},
            {"learning_rate": 0.3},  # a stress test of one's own
            {"partition": "classes"},
        )
        for seed in (1, 2)
        for method, accuracy in (
            ("dist_sync", 97),
            ("mirror", 96 if "optimizer" in fields else 97),
        )
    ]
    found = verdicts(modules, results)
    assert found["mnist, nag: mirror is as good as dist_sync"] == "NOT met so far"
    assert found["mnist, adam: mirror is as good as dist_sync"] == "NOT met so far"
    assert found["cifar10: mirror is as good as dist_sync"] == "met so far"
    assert found["mnist: mirror is as good as dist_sync"] == "not measured"


@DRAWS
def test_the_report_is_the_same_each_time_and_says_what_is_missing(
    modules, store, new_run, new_result, capsys
):
    for result in mnist_results(new_result):
        store.save(result.run, outcome(result.run, result.accuracy))
    broken = new_run("none", 9)
    store.save(broken, outcome(broken, status="failed"))
    (store.folder / "odd.json").write_text("{")
    publish = modules("convergence_report").publish
    page, *pictures = publish(store.read(), store.folder, None)
    text = page.read_text()
    printed = capsys.readouterr().out
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == [
        "Claims", "Accuracy (SGD)", "Not counted",
    ]  # fmt: skip
    assert f"- {broken.name}: the job broke: why" in text
    assert "- odd.json: not readable as a result" in text
    assert "- 24 runs" in text
    for line in (
        "Accuracy (SGD)\n====",
        "met so far: mnist: mirror is",
        "not measured: 7 of 13",
    ):
        assert line in printed
    names = [picture.name for picture in pictures]
    assert names == [
        f"accuracy-{name}.png"
        for name in (
            "loss-steps", "loss-seconds", "accuracy-steps", "accuracy-seconds",
            "differences",
        )
    ]  # fmt: skip
    contents = [picture.read_bytes() for picture in pictures]
    assert all(each.startswith(b"\x89PNG") for each in contents)
    assert len(set(contents)) == 5
    assert [f"![{name}]({name})" in text for name in names] == [True] * 5
    page.unlink()
    assert publish(store.read(), store.folder, set()) == [page]  # nothing drawn
    assert page.read_text() == text


@DRAWS
def test_a_diverged_training_can_be_drawn_and_a_lone_method_too(
    modules, store, new_run
):
    run = new_run("none")
    content = outcome(run, 10)
    for point in content["losses"][1:]:
        point[1] = None
    for point in content["evaluations"]:
        point[3] = None
    store.save(run, content)
    contents = store.read()
    publish = modules("convergence_report").publish
    page, *pictures = publish(contents, store.folder, None)
    assert len(pictures) == 4  # no differences
    assert "2.000 / nan / nan / nan | 1 |" in page.read_text()


def test_without_matplotlib_there_are_tables_and_a_note(
    modules, store, new_run, monkeypatch, capsys
):
    store.save(new_run(), outcome(new_run()))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    publish = modules("convergence_report").publish
    (page,) = publish(store.read(), store.folder, None)
    assert "png" not in page.read_text()
    assert capsys.readouterr().out.count("install '.[benchmarks]'") == 1


def test_every_method_has_a_colour_of_its_own(modules):
    colours = modules("convergence_plot").COLOURS
    assert set(modules("convergence_run").METHODS) == set(colours)
    assert len(set(colours.values())) == len(colours)
