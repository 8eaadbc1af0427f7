"""Jobs of the convergence benchmark, on the digits and on images made here."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from pictures import pack_records

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
LIMIT_S = 180
NUM_TEST = 359
STEPS = 1438 // 64  # of an epoch with 2 workers and batches of 32


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Decoded data, for all jobs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def execute(modules, cache, monkeypatch):
    """Run a job, of the digits unless said otherwise."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the workers
    run = modules("convergence_run").Run
    job = modules("convergence_job")

    def call(method, dataset="digits", network="mlp", data=None, **values):
        values = {"learning_rate": 0.1, "num_evaluations": 3, **values}
        planned = run(dataset, network, method, **values)
        outcome = job.execute(planned, data, cache, timeout_s=LIMIT_S)
        assert outcome["run"] == dataclasses.asdict(planned)
        json.dumps(outcome, allow_nan=False)
        return outcome

    return call


def write_records(path, count, shape):
    """A RecordIO file of noise in 10 colours, which are the labels."""
    random = np.random.RandomState(count)
    labels = np.arange(count) % 10
    colours = np.stack([25 * labels, 255 - 25 * labels, 50 * (labels % 5)], axis=1)
    noise = random.normal(0, 5, (count, *shape, 3))
    pictures = np.clip(colours[:, np.newaxis, np.newaxis] + noise, 0, 255)
    pack_records(path, pictures, labels)


def count_right(outcome, num_test):
    """Right answers; the accuracy must be such a number over that of the images."""
    right = outcome["accuracy"] * num_test
    assert right == pytest.approx(round(right))
    return round(right)


def test_a_job_that_only_warms_up_is_dist_sync_bit_for_bit(execute, cache):
    jobs = [
        execute(method, network="conv", epochs=2, warmup_steps=1000)
        for method in ("dist_sync", "mirror")
    ]
    for outcome in jobs:
        assert (outcome["status"], outcome["reason"]) == ("ok", "")
        assert outcome["num_steps"] == 2 * STEPS
        assert outcome["num_parameters"] == 38_282
    stock, ours = jobs
    assert stock["losses"] == ours["losses"]
    same = [[(e[0], *e[2:]) for e in outcome["evaluations"]] for outcome in jobs]
    assert same[0] == same[1]
    assert [e[0] for e in same[0]] == [15, 30, 44]
    assert stock["accuracy"] == same[0][-1][1] > 0.8
    assert 0.8 * NUM_TEST < count_right(stock, NUM_TEST) <= NUM_TEST
    assert (stock["max_staleness"], ours["max_staleness"]) == (None, 0)
    for outcome in jobs:
        seconds = [e[1] for e in outcome["evaluations"]]
        assert 0 < seconds[0] < seconds[1] < seconds[2] == outcome["seconds"]
        assert outcome["seconds"] < outcome["wall_s"]
        steps, losses = zip(*outcome["losses"])
        assert steps[:3] == (2, 3, 4) and steps[-1] == 44
        assert losses[-1] < losses[0] / 2
    (folder,) = cache.iterdir()
    assert folder.name.startswith("digits-")


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("mirror", {"schedule": "cosine", "lr_warmup_epochs": 0.2}),
        ("none", {"partition": "classes", "compute_ms": 5}),
        ("dist_async scaled", {"schedule": "step", "momentum": 0.5}),
    ],
)
def test_delayed_and_asynchronous_jobs_learn(execute, method, values):
    outcome = execute(method, epochs=3, warmup_steps=5, **values)
    assert outcome["status"] == "ok", outcome["reason"]
    assert outcome["num_steps"] == 3 * STEPS
    assert outcome["evaluations"][-1][0] == 3 * STEPS
    assert 0.6 < outcome["accuracy"] <= 1
    expected = None if method == "dist_async scaled" else 1
    assert outcome["max_staleness"] == expected
    if "compute_ms" in values:  # the first step is not counted
        assert outcome["seconds"] >= (3 * STEPS - 1) * 0.005 * 0.9


def test_rank_0_waits_for_a_straggler_whose_accelerator_is_slower(execute):
    outcome = execute("dist_sync", compute_ms=40, straggler_ms=40)
    assert outcome["status"] == "ok", outcome["reason"]
    assert outcome["seconds"] == max(outcome["rank_seconds"])
    # The watch starts after the first step; a rank may leave the barrier a step late.
    assert outcome["rank_seconds"][0] >= (STEPS - 2) * 0.080


def test_divergence_is_a_result(execute):
    outcome = execute("dist_sync", learning_rate=1e30, wd=1.0)
    assert outcome["status"] == "ok", outcome["reason"]
    assert outcome["losses"][-1] == [STEPS, None]
    assert outcome["evaluations"][-1][3] is None
    assert 0 <= outcome["accuracy"] < 0.3


@pytest.mark.parametrize(
    ("staleness", "highest"), [((0, 2, 1), 2), ((None, None), None)]
)
def test_the_highest_staleness_of_all_ranks_counts(modules, staleness, highest):
    reports = [
        {
            "num_steps": 1, "num_parameters": 1, "losses": [[1, 2.0]],
            "evaluations": [[1, 3.0 + rank, 1, 2.0, 4]], "max_staleness": steps,
        }
        for rank, steps in enumerate(staleness)
    ]  # fmt: skip
    figures = modules("convergence_job").combine(reports)
    assert figures["max_staleness"] == highest
    assert figures["rank_seconds"] == [3.0, 4.0, 5.0][: len(staleness)]
    assert (figures["accuracy"], figures["seconds"]) == (0.25, 2.0 + len(staleness))


def test_batchnorm_learns_from_recordio_with_flips(execute, tmp_path):
    write_records(tmp_path / "train.rec", 400, (32, 32))
    write_records(tmp_path / "test.rec", 50, (32, 32))
    outcome = execute(
        "mirror", "cifar10", "bn_cnn", tmp_path,
        epochs=4, batch_size=20, warmup_steps=5, num_evaluations=2, learning_rate=0.01,
    )  # fmt: skip
    assert outcome["status"] == "ok", outcome["reason"]
    assert outcome["num_steps"] == 40
    assert outcome["num_parameters"] == 11_218
    assert outcome["accuracy"] > 0.3
    assert math.isfinite(outcome["evaluations"][-1][3])


def test_imagenet_is_trained_from_recordio(execute, tmp_path):
    write_records(tmp_path / "train.rec", 9, (230, 260))
    write_records(tmp_path / "val.rec", 5, (230, 260))
    outcome = execute(
        "sgd", "imagenet", "lenet5", tmp_path,
        batch_size=2, warmup_steps=0, num_evaluations=1, learning_rate=1e-3,
    )  # fmt: skip
    assert outcome["status"] == "ok", outcome["reason"]
    assert outcome["num_steps"] == 9 // 4
    assert 0 <= count_right(outcome, 5) <= 5  # each image counted once
    assert math.isfinite(outcome["evaluations"][0][3])


def test_a_job_that_breaks_is_failed_with_the_launchers_message(execute):
    outcome = execute("dist_sync", optimizer="nonesuch")
    assert outcome["status"] == "failed"
    assert "worker" in outcome["reason"] and "nonesuch" in outcome["reason"]
    assert "accuracy" not in outcome
