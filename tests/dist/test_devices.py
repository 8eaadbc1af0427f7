"""Several devices per worker, a smaller last batch, a refused step, statistics.

The loss is linear in the weights and its factors are dyadic, so that gradients are
known and an oracle has the same bits.
"""

import os

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, lr_scheduler

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
WORKERS = 2
SHAPE = (4, 3)
RULE = {"learning_rate": 0.5, "momentum": 0.5}
TWO_DEVICES = [mx.cpu(0), mx.cpu(1)]


def rank():
    return int(os.environ["ODSGD_LOCAL_RANK"])


def values(params):
    return [param.list_data()[0].asnumpy() for param in params]


def global_values(host, params):
    with odsgd_kvstore.global_weights(host):
        return values(params)


def same_everywhere(ranks):
    """The value that all ranks have; their arrays are compared bit by bit."""
    for other in ranks[1:]:
        np.testing.assert_equal(other, ranks[0])
    return ranks[0]


def factor(step, worker, half=None, which=0):
    """A dyadic gradient; without `half`, the sum of the two halves of a batch."""
    if half is None:
        return sum(factor(step, worker, h, which) for h in (0, 1))
    ramp = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return ((step * 5 + worker * 3 + half * 4 + which * 2) % 7 - 3 + ramp % 5) / 8


def total(step, which=0):
    return sum(factor(step, worker, None, which) for worker in range(WORKERS))


def make_param(ctx=None, name="w"):
    param = gluon.Parameter(name, shape=SHAPE)
    param.initialize(mx.init.One(), ctx=ctx)
    return param


def backward(param, step, which=0):
    """The halves of a batch on two devices, or the whole on one."""
    datas = param.list_data()
    halves = [None] if len(datas) == 1 else [0, 1]
    with autograd.record():
        outputs = [
            data * mx.nd.array(factor(step, rank(), half, which), ctx=data.context)
            for data, half in zip(datas, halves)
        ]
    autograd.backward(outputs)


def halving():
    return lr_scheduler.FactorScheduler(step=3, factor=0.5, base_lr=0.5)


def device_run(ctx, kvstore, host):
    """Every device's L, and W, after each step; the rate falls with the steps."""
    param = make_param(ctx)
    rule = {**RULE, "lr_scheduler": halving()}
    make = odsgd_kvstore.Trainer if host == "ours" else gluon.Trainer
    trainer = make([param], "sgd", rule, kvstore=kvstore)
    seen = []
    for step in range(10):
        backward(param, step)
        trainer.step(2)
        local = [data.asnumpy() for data in param.list_data()]
        seen.append((local, global_values(trainer, [param])[0]))
    return seen, trainer._optimizer.num_update


def last_batch():
    """W and L with a last batch of 4 after batches of 8."""
    param, seen = make_param(), []
    trainer = odsgd_kvstore.Trainer([param], "sgd", RULE, warmup_steps=1)
    for step, size in enumerate((8, 8, 4)):
        backward(param, step)
        trainer.step(size)
        seen.append((values([param])[0], global_values(trainer, [param])[0]))
    return seen


def inside():
    """A step inside `global_weights`, then one outside; what `stats` says."""
    param = make_param()
    trainer = odsgd_kvstore.Trainer([param], "sgd", RULE, warmup_steps=0)
    before = trainer.stats()
    for step in range(3):
        backward(param, step)
        trainer.step(1)
    local = values([param])[0]
    backward(param, 3)
    with trainer.global_weights(), pytest.raises(RuntimeError, match="global_weights"):
        trainer.step(1)
    back = values([param])[0]
    try:
        trainer.step(1)  # its gradient is still there
        retried = ""
    except UserWarning as warning:
        retried = str(warning)
        backward(param, 3)
        trainer.step(1)
    w = global_values(trainer, [param])[0]
    stats = before, trainer.stats()
    return {"L": (local, back), "W": w, "stats": stats, "retried": retried}


DEVICES = [
    (kind, host) for kind in ("dist_odsgd", "dist_device_odsgd")
    for host in ("ours", "plain")
]  # fmt: skip


@pytest.fixture(scope="module")
def devices():
    def run():
        two = {how: device_run(TWO_DEVICES, *how) for how in DEVICES}
        one = device_run([mx.cpu(0)], "dist_odsgd", "ours")
        return {**two, "one": one, "last": last_batch(), "inside": inside()}

    env = {"ODSGD_WARMUP_STEPS": "3"}
    return run_local(run, WORKERS, 2, timeout=LIMIT_S, env=env)


@pytest.mark.parametrize("how", DEVICES, ids="-".join)
def test_two_devices_train_as_one_with_the_summed_gradient(devices, how):
    for runs in devices:
        (two, updates), (one, _) = runs[how], runs["one"]
        assert updates == 10
        for (locals_, global_), (expected, w) in zip(two, one):
            np.testing.assert_array_equal(global_, w)
            np.testing.assert_array_equal(locals_[0], expected[0])
            np.testing.assert_array_equal(locals_[0], locals_[1])


@pytest.mark.parametrize("how", [*DEVICES, "one"], ids=str)
def test_a_schedule_counts_once_a_step_whatever_the_devices(devices, how):
    weight, momentum = np.ones(SHAPE, np.float32), 0
    seen = same_everywhere([[w for _, w in runs[how][0]] for runs in devices])
    for step, got in enumerate(seen):
        momentum = 0.5 * momentum - halving()(step + 1) * total(step) / 2
        weight = weight + momentum
        np.testing.assert_allclose(got, weight, rtol=0, atol=2e-6)


def test_a_smaller_last_batch_counts_by_its_own_size(devices):
    weight, momentum, sizes = np.ones(SHAPE, np.float32), 0, (8, 8, 4)
    for step, size in enumerate(sizes):
        for worker, seen in enumerate(r["last"] for r in devices):
            own = 0.5 * WORKERS * factor(step, worker) / size
            local = weight + 0.5 * momentum - own
            if step > 0:
                np.testing.assert_allclose(seen[step][0], local, 0, 1e-6)
        momentum = 0.5 * momentum - 0.5 * total(step) / size
        weight = weight + momentum
        for seen in (r["last"] for r in devices):
            np.testing.assert_allclose(seen[step][1], weight, 0, 1e-6)


def test_a_step_inside_global_weights_is_refused_and_changes_nothing(devices):
    weight, momentum = np.ones(SHAPE, np.float32), 0
    for step in range(4):
        momentum = 0.5 * momentum - 0.5 * total(step)
        weight = weight + momentum
    for seen in (rank["inside"] for rank in devices):
        np.testing.assert_array_equal(*seen["L"])
        np.testing.assert_allclose(seen["W"], weight, rtol=0, atol=1e-5)


def test_a_step_refused_inside_global_weights_can_be_made_after_it(devices):
    assert [rank["inside"]["retried"] for rank in devices] == [""] * WORKERS


def test_stats_count_steps_bytes_and_waiting(devices):
    for rank in devices:
        before, after = rank["inside"]["stats"]
        assert before == {}
        assert (after["steps"], after["staleness"], after["max_staleness"]) == (4, 1, 1)
        assert after["pushed_bytes"] == after["pulled_bytes"] == 4 * 4 * 12
        assert after["wait_s"] > 0
