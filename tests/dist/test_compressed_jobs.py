"""Real jobs with compression, against numpy and against MXNet's own '2bit'."""

import mxnet as mx
import numpy as np
import pytest
from large import (
    ALONE,
    CUT,
    PACKED,
    SHAPES,
    SLICED,
    STEPS,
    Float16,
    TwoBit,
    assert_is,
    backward,
    gradient,
    make_params,
    ours,
    plain,
    rank,
    replay,
    train,
)
from oracle import Case

from odsgd_kvstore.testing import run_local

LIMIT_S = 120
WARMUP = 2  # of the plain gluon.Trainer: ODSGD_WARMUP_STEPS
SGD = {"learning_rate": 0.0625, "momentum": 0.75, "wd": 0.01}
ADAM = {"learning_rate": 0.01, "wd": 0.01}
MULTIPLIERS = {
    1: {0: (2.0, 0.0), 3: (0.5, 1.0)}, 4: {0: (1.0, 3.0), 3: (1.0, 1.0), 6: (0.0, 0.5)},
}  # fmt: skip
ASSIGNED = [(5, 0, 2.6), (5, 3, -1.3), (5, 2, 0.7)]  # sliced, packed, alone
FP16 = {"type": "fp16"}
LEFT_OUT, EVERY, THIRD = (
    {"type": "2bit", "threshold": 0.37, **more}
    for more in ({}, {"full_every": 1}, {"full_every": 3})
)
NATIVE = {"type": "2bit", "threshold": 0.37}
NATIVE_LR = 0.125
SHAPES_OF_TWO = (0, 1, 2, 3)  # of the parameters that are trained on two devices

RUNS = {  # name: (compression_params, case, delay, assigned)
    "fp16": (FP16, Case(params=SGD, rule="replica"), 1, ()),
    "fp16, warm-up": (
        FP16, Case(params=SGD, rule="replica", warmup=3, multipliers=MULTIPLIERS), 1, ()
    ),
    "fp16, delay 0": (FP16, Case(params=SGD), 0, ()),
    "fp16, sgd": (FP16, Case(params=SGD, rule="sgd", batch=4), 1, ()),
    "fp16, adam": (FP16, Case("adam", ADAM, rule="replica", warmup=1), 1, ()),
    "fp16, assigned": (FP16, Case(params=SGD, rule="replica"), 1, ASSIGNED),
    "2bit": (LEFT_OUT, Case(params=SGD), 1, ()),
    "2bit, warm-up": (LEFT_OUT, Case(params=SGD, warmup=2), 1, ()),
    "2bit, delay 0": (LEFT_OUT, Case(params=SGD, warmup=2), 0, ()),
    "2bit, every 1st whole": (EVERY, Case(params=SGD), 1, ()),
    "2bit, every 3rd whole": (THIRD, Case(params=SGD), 1, ()),
    "2bit, warm-up, every 3rd": (
        THIRD, Case(params=SGD, warmup=2, multipliers=MULTIPLIERS), 1, ()
    ),
    "2bit, delay 0, every 3rd": (THIRD, Case(params=SGD, batch=4), 0, ()),
    "2bit, replica": (THIRD, Case(params=SGD, rule="replica", warmup=2), 1, ()),
    "2bit, adam": (LEFT_OUT, Case("adam", ADAM, warmup=2), 1, ()),
    "2bit, assigned": (LEFT_OUT, Case(params=SGD), 1, ASSIGNED),
    "2bit, frozen": (
        LEFT_OUT, Case(params=SGD, paused={0: range(4, 6), 3: range(4, 6)}), 1, ()
    ),
}  # fmt: skip
PLAIN = {  # with gluon.Trainer, after a warm-up
    "plain fp16": (FP16, Case(params=SGD, rule="replica", warmup=WARMUP), 1, ()),
    "plain 2bit": (THIRD, Case(params=SGD, warmup=WARMUP), 1, ()),
}
ALL = {**RUNS, **PLAIN}
THREE = ("fp16", "2bit, warm-up, every 3rd", "2bit, adam")


def wire_of(name):
    """What travels in a run, for the oracle."""
    params, case, delay, _ = ALL[name]
    if params["type"] == "fp16":
        return Float16()
    warmup = case.warmup if delay else 0
    return TwoBit(params["threshold"], warmup, params.get("full_every", 0))


def run_all(names):
    """On a worker: every run, and one without compression."""
    seen = {}
    for name in names:
        params, case, delay, assigned = ALL[name]
        if name in PLAIN:
            make = plain(compression_params=params)
        else:
            make = ours(compression_params=params, delay=delay)
        seen[name] = train(make, case, assigned)
    if len(names) == len(ALL):
        seen["none"] = train(ours(), Case(params=SGD))
        seen["as native"] = train_as_native()
        for kind in ("fp16", "2bit"):
            options = {**LEFT_OUT, "threshold": 1.0} if kind == "2bit" else FP16
            seen["two devices", kind] = train_on_two_devices(options)
    return seen


def train_on_two_devices(params):
    """The last W of each device, and what differs between the devices in any step."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    made = [mx.gluon.Parameter(f"p{key}", shape=SHAPES[key]) for key in SHAPES_OF_TWO]
    for param in made:
        param.initialize(mx.init.One(), ctx=contexts)
    case = Case(params={"learning_rate": 0.0625}, warmup=2)
    trainer, differ = ours(compression_params=params)(made, case), []
    for step in range(1, STEPS + 1):
        with mx.autograd.record():
            outputs = [
                p.data(c) * (step - 3.0 + rank()) for p in made for c in contexts
            ]
        mx.autograd.backward(outputs)
        trainer.step(1)
        local = [[p.data(c).asnumpy() for p in made] for c in contexts]
        with trainer.global_weights():
            weights = [[p.data(c).asnumpy() for p in made] for c in contexts]
        for one, other in (local, weights):
            differ += [step for a, b in zip(one, other) if (a != b).any()]
    return weights[0], differ


def train_as_native():
    """W after each step of ours that is like MXNet's own."""
    case = Case(params={"learning_rate": NATIVE_LR})
    return train(ours(compression_params=NATIVE, delay=0), case)


@pytest.fixture(scope="module")
def two_workers():
    env = {**CUT, "ODSGD_WARMUP_STEPS": str(WARMUP)}
    return run_local(lambda: run_all(tuple(ALL)), 2, 2, LIMIT_S, env)


@pytest.fixture(scope="module")
def three_workers():
    return run_local(lambda: run_all(THREE), 3, 3, LIMIT_S, CUT)


@pytest.mark.parametrize("name", ALL)
def test_weights_equal_the_oracle_after_every_step(two_workers, name):
    _, case, delay, assigned = ALL[name]
    want = replay(case, wire_of(name), delay, 2, assigned)
    ranks = [seen[name] for seen in two_workers]
    if case.optimizer == "adam":  # W may fall on the other side of a float16
        assert_is(ranks, want, 1e-3 if "fp16" in name else 2e-6)
    else:
        assert_is(ranks, want)


@pytest.mark.parametrize("name", THREE)
def test_weights_of_three_workers_equal_the_oracle(three_workers, name):
    _, case, delay, assigned = ALL[name]
    want = replay(case, wire_of(name), delay, 3, assigned)
    tolerance = 1e-3 if "fp16" in name else 2e-6
    assert_is([seen[name] for seen in three_workers], want, tolerance)


def test_every_push_whole_is_no_compression_bit_for_bit(two_workers):
    for seen in two_workers:
        np.testing.assert_equal(
            seen["2bit, every 1st whole"]["seen"], seen["none"]["seen"]
        )
        assert seen["2bit, every 1st whole"]["pushed"] == seen["none"]["pushed"]


def test_compression_changes_the_weights(two_workers):
    for seen in two_workers:
        for name in ("fp16", "2bit"):
            for key in (*SLICED, *ALONE):
                last = seen[name]["seen"][-1][1][key]
                assert not np.array_equal(last, seen["none"]["seen"][-1][1][key])


def test_each_device_of_a_worker_has_the_same_weights(two_workers):
    # A worker's gradient is 2 (step - 3 + rank) everywhere; a code stands for 1.
    residuals, sums = [0.0, 0.0], {"whole": 0.0, "codes": 0.0}
    for step in range(1, STEPS + 1):
        for worker in (0, 1):
            gradient_ = 2 * (step - 3.0 + worker)
            sums["whole"] += gradient_
            code = gradient_
            if step > 2:
                left = residuals[worker] + gradient_
                code = float(np.sign(left) * (abs(left) >= 1))
                residuals[worker] = left - code
            sums["codes"] += code
    for seen in two_workers:
        for kind in ("fp16", "2bit"):
            weights, differ = seen["two devices", kind]
            assert differ == []
            for key, weight in zip(SHAPES_OF_TWO, weights):
                coded = kind == "2bit" and key not in PACKED
                wanted = 1 - 0.0625 * sums["codes" if coded else "whole"]
                assert (weight == wanted).all(), (kind, key)


# Bytes

LARGE = sum(int(np.prod(SHAPES[key])) for key in (*SLICED, *ALONE))
FEW = sum(int(np.prod(SHAPES[key])) for key in PACKED) + len(PACKED)  # with marks


def test_a_worker_counts_what_it_pushes_and_pulls(two_workers):
    for seen in two_workers:
        assert seen["none"]["pushed"] == [4 * (LARGE + FEW)] * STEPS
        assert seen["none"]["pulled"] == 4 * (LARGE + FEW) * STEPS
        assert seen["fp16"]["pushed"] == [2 * (LARGE + FEW)] * STEPS
        assert seen["fp16"]["pulled"] == 2 * (LARGE + FEW) * STEPS
        assert seen["2bit"]["pulled"] == 4 * (LARGE + FEW) * STEPS


def test_codes_are_a_ninth_of_the_gradients_with_two_workers(two_workers):
    for seen in two_workers:
        first, *codes = seen["2bit"]["pushed"]
        assert first == 4 * (LARGE + FEW)
        for pushed in codes:
            words = (pushed - 4 * FEW) / 4
            assert LARGE / 9 <= words <= LARGE / 9 + 8  # one more per block at most
        third = seen["2bit, delay 0, every 3rd"]["pushed"]
        assert third == [first, codes[0], codes[0]] * 2 + [first, codes[0]]
        warm = seen["2bit, warm-up"]["pushed"]
        assert warm == [first] * 2 + codes[:1] * (STEPS - 2)


# MXNet's own


def native():
    """On a worker: dist_sync with 2bit, pushed and pulled, after our first step."""
    kv = mx.kv.create("dist_sync")
    kv.set_gradient_compression(NATIVE)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=NATIVE_LR))
    case = Case(params={"learning_rate": NATIVE_LR})
    weights = replay(case, delay=0, steps=1).global_weights[0]
    large = (*SLICED, *ALONE)
    kv.init(list(large), [mx.nd.array(weights[key]) for key in large])
    seen = []
    for step in range(2, STEPS + 1):
        out = {key: mx.nd.zeros(SHAPES[key]) for key in large}
        for key in large:
            kv.push(key, mx.nd.array(gradient(step, rank(), key)))
            kv.pull(key, out=out[key])
        seen.append({key: array.asnumpy() for key, array in out.items()})
    return seen


def test_values_are_those_of_mxnet_s_own_2bit_bit_for_bit(two_workers):
    stock = run_local(native, 2, 1, LIMIT_S, stock_servers=True)
    for mine, theirs in zip(two_workers, stock):
        steps = [weights for _, weights in mine["as native"]["seen"][1:STEPS]]
        for step, (got, want) in enumerate(zip(steps, theirs)):
            for key, value in want.items():
                where = f"parameter {key}, step {step + 2}"
                np.testing.assert_array_equal(got[key], value, err_msg=where)
        assert len(steps) == len(theirs) == STEPS - 1
