"""Real jobs with arrays that are sliced, packed, or neither, against numpy.

No worker or server waits for another slice or member than what it needs: what each
number becomes does not depend on how it travels.
"""

import mxnet as mx
import numpy as np
import pytest
from large import (
    ALONE,
    BOUND,
    CUT,
    PACKED,
    SHAPES,
    SLICED,
    STEPS,
    Float16,
    assert_is,
    backward,
    make_params,
    ours,
    plain,
    rank,
    replay,
    to_numpy,
    train,
)
from oracle import Case

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
SGD = {"learning_rate": 0.0625, "momentum": 0.75, "wd": 0.01}
ADAM = {"learning_rate": 0.01, "wd": 0.01}
MULTIPLIERS = {
    1: {0: (2.0, 0.0), 3: (0.5, 1.0)}, 4: {0: (1.0, 3.0), 3: (1.0, 1.0), 6: (0.0, 0.5)},
}  # fmt: skip
PAUSES = {0: range(4, 6), 3: range(4, 6), 5: range(3, 6)}  # sliced, packed, alone
WARM = STEPS + 1
CASES = {  # name: (case, how the trainer is made)
    "mirror": (Case(params=SGD), ours()),
    "warm-up, multipliers": (
        Case(params=SGD, warmup=3, multipliers=MULTIPLIERS, batch=4), ours()
    ),
    "replica": (Case(params=SGD, rule="replica", warmup=2), ours()),
    "sgd": (Case(params=SGD, rule="sgd", multipliers=MULTIPLIERS), ours()),
    "adam": (Case("adam", ADAM, warmup=2, multipliers=MULTIPLIERS), ours()),
    "frozen": (Case(params=SGD, paused=PAUSES), ours()),
    "frozen in warm-up": (Case(params=SGD, warmup=5, paused=PAUSES), ours()),
    "plain": (Case(params=SGD, warmup=3), plain()),
    "synchronous": (Case(params=SGD, warmup=WARM), ours()),
    "fp16": (
        Case(params=SGD, rule="replica"), ours(compression_params={"type": "fp16"})
    ),
    "2bit": (Case(params=SGD), ours(compression_params={"type": "2bit"})),
}  # fmt: skip
COMPRESSED = ("fp16", "2bit")  # see also test_compression.py
MANY = tuple(name for name in CASES if name not in COMPRESSED)
ASSIGNED = [(5, 0, 2.5), (5, 3, -1.5), (5, 2, 0.75)]  # sliced, packed, alone
FEW = ("mirror", "warm-up, multipliers", "adam", "plain")
ENV = {"ODSGD_WARMUP_STEPS": "3"}
JOBS = {  # workers, servers, environment, cases
    "2 and 2": (2, 2, {**CUT, **ENV}, MANY),
    "3 and 3": (3, 3, {**CUT, **ENV}, FEW),
    "tiny bound": (
        2,
        2,
        {"MXNET_KVSTORE_BIGARRAY_BOUND": "100", **ENV},
        FEW + COMPRESSED,
    ),
}


def layout_of(trainer):
    """Slices of each parameter, members of each pack, numbers of the largest key."""
    records = list(trainer._kvstore.pipeline.records)
    blocks = {record.block for record in records}
    return {
        "blocks": [len(record.block.slices) for record in records],
        "packs": sorted(len(b.records) for b in blocks if b.is_pack),
        "largest": max(size for block in blocks for _, size in block.keys()),
    }


def run_cases(names, assigned):
    """On a worker: every case, with what the last one's layout was."""
    made = []

    def noted(make):
        def make_trainer(params, case):
            made.append(make(params, case))
            return made[-1]

        return make_trainer

    seen = {name: train(noted(CASES[name][1]), CASES[name][0]) for name in names}
    if assigned:
        for warmup in (0, WARM):
            case = Case(params=SGD, warmup=warmup)
            seen["assigned", warmup] = train(ours(), case, assigned)
    return seen, layout_of(made[0])


@pytest.fixture(scope="module")
def jobs():
    """What each rank of a job saw; a job runs when it is first asked for."""
    done = {}

    def run(name):
        if name not in done:
            workers, servers, env, cases = JOBS[name]
            given = ASSIGNED if cases == MANY else ()
            done[name] = run_local(
                lambda: run_cases(cases, given), workers, servers, LIMIT_S, env
            )
        return done[name]

    return run


@pytest.mark.parametrize(
    "job, name", [(job, name) for job, (*_, names) in JOBS.items() for name in names]
)
def test_weights_equal_the_oracle_after_every_step(jobs, job, name):
    ranks = [seen[name] for seen, _ in jobs(job)]
    case = CASES[name][0]
    exact = len(ranks) == 2 and case.optimizer == "sgd"
    # What ps-lite cuts itself, below the tiny bound, is not sent as codes.
    wire = Float16() if name == "fp16" else None
    want = replay(case, wire, workers=len(ranks))
    assert_is(ranks, want, 0.0 if exact else 2e-6)


@pytest.mark.parametrize("warmup", [0, WARM])
def test_assigned_weights_go_everywhere_and_momentum_stays(jobs, warmup):
    ranks = [seen["assigned", warmup] for seen, _ in jobs("2 and 2")]
    case = Case(params=SGD, warmup=warmup)
    assert_is(ranks, replay(case, assigned=ASSIGNED))


def test_arrays_are_sliced_packed_or_neither_as_meant(jobs):
    for _, layout in jobs("2 and 2"):
        assert [layout["blocks"][i] >= 3 for i in SLICED] == [True]
        assert [layout["blocks"][i] for i in PACKED] == [1] * len(PACKED)
        assert sum(layout["packs"]) == len(PACKED)
        assert layout["largest"] < BOUND
    for _, layout in jobs("tiny bound"):  # ps-lite's own cut
        assert layout["blocks"] == [1] * len(SHAPES) and layout["packs"] == []


# dist_sync


def dist_sync():
    """On a worker, with MXNet's own store: every parameter after each step."""
    params, seen = make_params(), []
    trainer = mx.gluon.Trainer(params, "sgd", SGD, kvstore="dist_sync")
    for step in range(1, STEPS + 1):
        backward(params, step)
        trainer.step(1)
        seen.append({key: p.data().asnumpy() for key, p in enumerate(params)})
    return seen


def test_warmup_is_dist_sync_bit_for_bit(jobs):
    stock = run_local(dist_sync, 2, 1, LIMIT_S, stock_servers=True)
    for (mine, _), want in zip(jobs("2 and 2"), stock):
        for step, weights in enumerate(want):
            for what in (0, 1):  # L and W
                got = mine["synchronous"]["seen"][step][what]
                np.testing.assert_equal(got, weights)
            if step < 3:  # the plain gluon.Trainer's warm-up
                np.testing.assert_equal(mine["plain"]["seen"][step][0], weights)


# An array above what a slice may have at most


def train_largest():
    """On a worker: how an array of 300,000 numbers travels, and what it becomes."""
    param = mx.gluon.Parameter("large", shape=(600, 500))
    few = mx.gluon.Parameter("few", shape=(7,))
    for p in (param, few):
        p.initialize(mx.init.One())
    trainer = odsgd_kvstore.Trainer([param, few], "sgd", SGD, warmup_steps=1)
    slope = mx.nd.array(np.arange(300000).reshape(600, 500) % 97 / 128 + rank())
    seen = []
    for _ in range(4):
        with mx.autograd.record():
            loss = (param.data() * slope).sum() + few.data().sum()
        loss.backward()
        trainer.step(1)
        with trainer.global_weights():
            seen.append(to_numpy({0: param.data()})[0])
    first = next(iter(trainer._kvstore.pipeline.records))
    return seen, [size for _, size in first.block.keys()]


def test_an_array_above_the_largest_slice_is_updated_everywhere():
    ranks = run_local(train_largest, 2, 2, LIMIT_S)
    total = np.arange(300000).reshape(600, 500) % 97 / 64 + 1
    weight, momentum = np.ones((600, 500)), 0
    for step in range(4):
        momentum = 0.75 * momentum - 0.0625 * (total + 0.01 * weight)
        weight = weight + momentum
        for seen, sizes in ranks:
            assert len(sizes) > 1 and sum(sizes) == 300000
            np.testing.assert_allclose(seen[step], weight, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(seen[step], ranks[0][0][step])


# Different members on different ranks


def said(call):
    """(kind, message) of what a call raises."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def freeze_different_members():
    """On a worker: rank 1 freezes a small parameter before the first step."""
    params = make_params()
    params[3].grad_req = "null" if rank() == 1 else "write"
    trainer = odsgd_kvstore.Trainer(params, "sgd", SGD)
    backward(params, 1)
    trainer.step(1)


def step_different_members():
    """On a worker: rank 1 leaves a member of a pack out from step 3 on."""
    params = make_params()
    trainer = odsgd_kvstore.Trainer(params, "sgd", SGD, warmup_steps=1)
    for step in range(1, STEPS + 1):
        backward(params, step, absent=(3,) if rank() == 1 and step > 2 else ())
        trainer.step(1, ignore_stale_grad=True)
        trainer.synchronize()
        assert step < 3


@pytest.fixture(scope="module")
def different():
    """What each rank was told, of members that differ."""
    calls = freeze_different_members, step_different_members
    return run_local(lambda: [said(call) for call in calls], 2, 1, 60, CUT)


def test_members_that_only_some_ranks_step_are_reported_to_all(different):
    for _, (kind, text) in different:
        assert kind == "ServerError"
        assert "MismatchError" in text and "some of the workers only (1 of 2)" in text
        assert "Every rank must step the same parameters" in text


def test_members_that_only_some_ranks_train_are_refused_on_all(different):
    for (kind, text), _ in different:
        assert kind == "MismatchError"
        assert "different trained parameters" in text
        assert "Set grad_req alike on every rank" in text


def test_the_lists_name_every_parameter():
    assert sorted(SLICED + PACKED + ALONE) == list(range(len(SHAPES)))
