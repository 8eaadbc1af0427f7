"""The store of benchmark_convergence.py keeps everything and mixes up nothing."""

import functools
import json
import math
import threading

import pytest
from convergence_results import make_run, outcome


@pytest.fixture
def new_run(modules):
    """Make a run, by default a short one of the mnist preset."""
    return functools.partial(make_run, modules("convergence_run").Run)


@pytest.fixture
def store(modules, tmp_path):
    return modules("convergence_store").Store(tmp_path / "results")


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_a_result_is_read_as_it_was_written(store, new_run):
    run = new_run(learning_rate=0.04)
    content = outcome(run, 97.5)
    content["losses"][1][1] = math.nan
    content["provenance"] = {"commit": "abc"}
    path = store.save(run, content)
    assert path.name == f"{run.name}.json" and names(store) == [path.name]
    assert json.loads(path.read_text())["losses"][1] == [25, None]
    ((found, result),) = store.read().results.items()
    assert found == run and result.run == run
    assert result.accuracy == pytest.approx(97.5)
    assert result.evaluations.tolist()[1] == pytest.approx([100, 10, 97.5, 0.1])
    assert math.isnan(result.losses[1, 1]) and result.losses[3, 1] == 0.5
    assert (result.num_steps, result.wall_s) == (100, 15)
    assert result.origin == {"commit": "abc"}


def test_a_broken_job_is_kept_beside_and_does_not_count(store, new_run):
    run = new_run()
    for number in (1, 2):
        path = store.save(run, outcome(run, status="failed"))
        assert path.name == f"{run.name}-failed-{number}.json"
    contents = store.read()
    assert contents.results == {} and contents.failed == {run: "a\nwhy"}
    store.save(run, outcome(run))
    contents = store.read()
    assert list(contents.results) == [run] and contents.failed == {}
    assert len(names(store)) == 3


@pytest.mark.parametrize("content", ["", '{"status": "ok", "run": {', "[]", '{"a":1}'])
def test_an_unreadable_file_is_named_and_left_alone(store, new_run, content):
    run = new_run()
    path = store.folder / f"{run.name}.json"
    store.folder.mkdir()
    path.write_text(content)
    contents = store.read()
    assert contents.unreadable == (path.name,) and contents.results == {}
    assert store.save(run, outcome(run)).name == f"{run.name}-2.json"
    assert list(store.read().results) == [run]
    assert path.read_text() == content


@pytest.mark.parametrize("origin", [None, "abc", [1], {"versions": 1, "machine": "x"}])
def test_where_it_was_measured_may_be_unknown(store, new_run, modules, origin):
    run = new_run()
    store.save(run, {**outcome(run), "provenance": origin, "data": "abc"})
    contents = store.read()
    assert contents.unreadable == () and contents.results[run].data == "abc"
    lines = modules("convergence_report").origins(contents.results.values())
    assert lines.splitlines()[:2] == ["- 1 runs", "- commits: unknown"]


@pytest.mark.parametrize("status", ["ok", "failed"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "x"), ("seed", 1.5), ("seed", True), ("learning_rate", "a"),
        ("learning_rate", math.nan), ("dataset", "nonesuch"), ("dataset", []),
        ("method", "nonesuch"), ("num_workers", None), ("num_workers", 0),
        ("rate", None), ("max_train", "all"), ("nonesuch", 1),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_is_no_result(store, new_run, status, name, value):
    content = outcome(new_run(), status=status)
    content["run"][name] = value
    assert is_no_result(store, new_run, content)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", 17), ("accuracy", -0.1), ("accuracy", "a"), ("accuracy", 10**400),
        ("num_steps", "x"), ("num_steps", None), ("max_staleness", "x"), ("losses", []),
        ("evaluations", [[1, 2]]), ("evaluations", None), ("data", 5), ("run", None),
    ],
)  # fmt: skip
def test_figures_that_cannot_be_are_no_result(store, new_run, name, value):
    assert is_no_result(store, new_run, {**outcome(new_run()), name: value})


def is_no_result(store, new_run, content):
    """Whether a file with that content is told apart from a good one beside it."""
    store.folder.mkdir()
    (store.folder / "odd.json").write_text(json.dumps(content))
    good = new_run(seed=7)
    store.save(good, outcome(good))
    contents = store.read()
    others = [list(contents.results), contents.failed]
    return contents.unreadable == ("odd.json",) and others == [[good], {}]


def test_a_result_is_never_overwritten_and_the_first_counts(store, new_run):
    run = new_run()
    for accuracy in (97, 50, 60):
        store.save(run, outcome(run, accuracy))
    assert names(store) == [f"{run.name}{n}.json" for n in ("-2", "-3", "")]
    assert store.read().results[run].accuracy == pytest.approx(97)


def test_writers_at_once_lose_nothing(store, new_run):
    run = new_run()
    barrier = threading.Barrier(8)

    def write(accuracy):
        barrier.wait(30)
        store.save(run, outcome(run, accuracy))

    writers = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    found = [json.loads(path.read_text()) for path in store.folder.iterdir()]
    assert sorted(round(100 * each["accuracy"]) for each in found) == list(range(8))


def test_an_interrupted_write_leaves_no_result(store, new_run, modules, monkeypatch):
    run = new_run()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(modules("convergence_store").os, "link", stop)
    with pytest.raises(KeyboardInterrupt):
        store.save(run, outcome(run))
    assert names(store) == [] and store.read().results == {}
