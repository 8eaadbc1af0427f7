"""Sections, tables, pictures and the page of benchmark_convergence.py."""

import functools
import re
import sys

import pytest
from convergence_results import make_run, outcome

# Matplotlib 3.7 calls pyparsing by names that later versions of it warn about.
DRAWS = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ORDER = ("dist_sync", "dist_async scaled", "none", "sgd", "mirror", "replica")


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


def test_only_workers_and_learning_rates_are_pooled(modules, new_result):
    results = [
        new_result(method, 1, 97, **fields)
        for fields in (
            {}, {"learning_rate": 0.04}, {"num_workers": 2}, {"num_evaluations": 3},
            {"epochs": 1}, {"epochs": 1, "batch_size": 8}, {"optimizer": "nag"},
        )
        for method in ("dist_sync", "mirror")
    ]  # fmt: skip
    found = modules("convergence_sections").pools(results)
    assert {title: len(group) for title, group in found.items()} == {
        "mnist, lenet5, sgd, 1 epoch, batch 8": 2,
        "mnist, lenet5, sgd, 1 epoch": 2,
        "mnist, lenet5, sgd, 2 epochs": 8,
        "mnist, lenet5, nag, 2 epochs": 2,
    }


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
    assert table.header[-2:] == ("seconds", "ms per step")
    assert table.rows[0][-2:] == ["20.0", "202.0"]  # 100 steps, the first is not timed
    assert times.rows[1] == ["mirror", "2 of 2", "9.9", "0.50", "0.50, 0.50"]
    assert times.rows[0][3] == "-"


def test_a_table_is_text_and_markdown(modules):
    table = modules("convergence_tables").Table("T", ("a", "b"), [("x|y", "1")])
    assert table.text() == "T\na    b\nx|y  1"
    assert table.markdown() == "**T**\n\n| a | b |\n| --- | --: |\n| x\\|y | 1 |"


@DRAWS
def test_the_report_is_the_same_each_time_and_says_what_is_missing(
    modules, store, new_run, new_result, capsys
):
    for load, result in enumerate(mnist_results(new_result)):
        content = outcome(result.run, result.accuracy)
        content["provenance"] = {"machine": {"load": load / 2}}
        store.save(result.run, content)
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
    assert "- 24 runs" in text and "- load of the machine: 0.0 to 11.5\n" in text
    for line in (
        "Accuracy (SGD)\n====",
        "met so far: mnist: mirror is",
        "not measured: 10 of 15",
    ):
        assert line in printed
    names = [picture.name for picture in pictures]
    assert names == [
        f"accuracy-{name}.png"
        for name in (
            "loss-steps", "accuracy-steps", "differences",
        )
    ]  # fmt: skip
    contents = [picture.read_bytes() for picture in pictures]
    assert all(each.startswith(b"\x89PNG") for each in contents)
    assert len(set(contents)) == 3
    assert [f"![{name}]({name})" in text for name in names] == [True] * 3
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
    assert len(pictures) == 2  # no differences
    assert "2.000 / nan / nan / nan | 1 |" in page.read_text()


@DRAWS
@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({"rate": "70mbit"}, 4),
        ({"straggler_ms": 20.0}, 4),
        ({"dataset": "imagenet"}, 4),
        ({"dataset": "digits"}, 2),
        ({"num_workers": 8}, 2),
    ],
)
def test_curves_over_seconds_are_drawn_where_seconds_mean_something(
    modules, store, new_run, fields, number
):
    run = new_run(**fields)
    section = modules("convergence_sections").section_of(run)
    store.save(run, outcome(run))
    results = list(store.read().results.values())
    drawn = modules("convergence_plot").draw(section, results, store.folder)
    assert sum("-seconds" in path.name for path in drawn) == number - 2
    assert len(drawn) == number
    (store.folder / f"{section.slug}-loss-seconds.png").touch()  # of earlier times
    names = modules("convergence_report").pictures(section, store.folder)
    assert len(names) == number


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
