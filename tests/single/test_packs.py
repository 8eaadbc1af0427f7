"""Packs and slices in one process: bit for bit what each parameter alone would give."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet import optimizer as opt

import odsgd_kvstore
from odsgd_kvstore import connection, placement
from odsgd_kvstore.errors import ConfigError, JobError
from odsgd_kvstore.optimizer_state import ELEMENTWISE
from odsgd_kvstore.transport import Standalone

SHAPES = [(3,), (4, 5), (90, 100), (1,), (9, 2, 2), (13,), (30, 40)]  # one is cut
LATE, PAUSED, NEVER = 1, 4, 5  # numbers of parameters
STEPS = 12
DECAY = {"learning_rate": 0.03, "wd": 0.02}


@pytest.fixture(autouse=True)
def own_connection(monkeypatch):
    """A job of one worker for each test."""
    monkeypatch.setattr(connection, "_failure", None)
    monkeypatch.setattr(connection, "_open", None)


def parameters():
    """The same first weights each time."""
    params = []
    for i, shape in enumerate(SHAPES):
        params.append(gluon.Parameter(f"p{i}", shape=shape))
        params[-1].initialize(mx.init.Zero())
        values = np.random.RandomState(i).normal(0, 1, shape)
        params[-1].set_data(nd.array(values))
    return params


def gradients(step):
    """One for each parameter."""
    random = np.random.RandomState(1000 + step)
    return [nd.array(random.normal(0, 1, shape)) for shape in SHAPES]


def backward(params, step, absent=()):
    """Make the gradients of a step in all parameters but the absent."""
    with autograd.record():
        outputs = [
            param.data() * gradient
            for i, (param, gradient) in enumerate(zip(params, gradients(step)))
            if i not in absent and param.grad_req != "null"
        ]
    autograd.backward(outputs)


def is_absent(which, step):
    """Whether a step leaves a parameter out."""
    late, paused = which == LATE and step < 4, which == PAUSED and 5 <= step < 8
    return late or paused or which == NEVER


def train(make_trainer, absent=is_absent, change=None):
    """(blocks, (L, W) of every parameter after every step)."""
    params = parameters()
    trainer, seen = make_trainer(params), []
    for step in range(STEPS):
        if change:
            change(step, params, trainer)
        backward(params, step, [i for i in range(len(params)) if absent(i, step)])
        trainer.step(2, ignore_stale_grad=True)
        local = [param.data().copy() for param in params]
        with odsgd_kvstore.global_weights(trainer):
            seen.append((local, [param.data().copy() for param in params]))
    records = trainer._kvstore.pipeline.records
    blocks = {record.block for record in records}
    return blocks, [[[a.asnumpy() for a in part] for part in pair] for pair in seen]


def ours(optimizer, **controls):
    """Our Trainer with an optimizer, made anew each time."""
    return lambda params: odsgd_kvstore.Trainer(params, optimizer(), **controls)


def plain(optimizer):
    """MXNet's own Trainer with our store."""
    return lambda params: gluon.Trainer(params, optimizer(), kvstore="dist_odsgd")


def compare(monkeypatch, make_trainer, **settings):
    """Train with packs and slices, then without either; both are the same."""
    with monkeypatch.context() as patch:
        patch.setattr(Standalone, "bigarray_bound", 2 * placement.PACK_NUMBERS + 2)
        patch.setattr(connection, "_open", None)
        blocks, seen = train(make_trainer, **settings)
    assert sum(block.size for block in blocks if block.is_pack) >= 1200
    sliced = [len(block.slices) for block in blocks if block.is_sliced]
    assert sliced and max(sliced) >= 2
    with monkeypatch.context() as patch:
        patch.setattr(placement, "PACK_NUMBERS", 0)
        patch.setattr(connection, "_open", None)
        blocks, want = train(make_trainer, **settings)
    assert [len(b.records) * len(b.slices) for b in blocks] == [1] * len(SHAPES)
    for step, (got, wanted) in enumerate(zip(seen, want)):
        for what, mine, theirs in zip(("L", "W"), got, wanted):
            for i, (one, other) in enumerate(zip(mine, theirs)):
                message = f"{what} of parameter {i} after step {step}"
                np.testing.assert_array_equal(one, other, err_msg=message)
    return seen


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_every_optimizer_updates_members_as_if_alone(monkeypatch, kind):
    make = ours(lambda: kind(**DECAY), warmup_steps=3)
    seen = compare(monkeypatch, make)
    moved = [np.any(a != b) for a, b in zip(seen[0][1], seen[-1][1])]
    assert moved == [i != NEVER for i in range(len(SHAPES))]


MOMENTUM = {"learning_rate": 0.03, "wd": 0.02, "momentum": 0.9}


def momentum_sgd():
    """With momentum, weight decay and clipping."""
    return opt.SGD(**MOMENTUM, clip_gradient=0.8)


@pytest.mark.parametrize("rule", ["mirror", "replica", "none", "sgd", "adam", "dcsgd"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_every_rule_updates_members_as_if_alone(monkeypatch, rule, warmup):
    controls = {"local_optimizer": rule, "warmup_steps": warmup}
    compare(monkeypatch, ours(momentum_sgd, **controls))


def test_members_without_a_delay_are_as_if_alone(monkeypatch):
    compare(monkeypatch, ours(momentum_sgd, delay=0))


def multiply(step, params, trainer):
    """Multipliers that differ from the first step on, and change."""
    if step == 0:
        params[1].lr_mult, params[2].wd_mult, params[6].lr_mult = 0.5, 3.0, 2.0
    if step == 6:
        params[0].lr_mult, params[1].wd_mult, params[6].lr_mult = 0.0, 0.0, 1.0
    if step == 9:
        trainer.set_learning_rate(0.01)


@pytest.mark.parametrize("optimizer", [momentum_sgd, lambda: opt.Adam(**DECAY)])
@pytest.mark.parametrize("rule", ["auto", "sgd"])
def test_multipliers_are_each_member_s_own(monkeypatch, optimizer, rule):
    make = ours(optimizer, warmup_steps=2, local_optimizer=rule)
    seen = compare(monkeypatch, make, change=multiply)
    for step in range(7, STEPS):  # lr_mult 0: only SGD's momentum is left
        moved = np.any(seen[step][1][0] != seen[step - 1][1][0])
        assert moved == (optimizer is momentum_sgd)


def freeze(step, params, trainer):
    """A parameter that is frozen by its grad_req for a while."""
    if step in (5, 8):
        params[PAUSED].grad_req = "null" if step == 5 else "write"


def thaw(step, params, trainer):
    """A parameter that is frozen at first, so that it is in no pack."""
    if step in (0, 3):
        params[PAUSED].grad_req = "null" if step == 0 else "write"


def assign(step, params, trainer):
    """Weights assigned to two members, and to an array that is sliced."""
    if step == 6:
        for i in (0, 2, PAUSED):
            params[i].set_data(nd.full(SHAPES[i], 0.5 + i))


@pytest.mark.parametrize("warmup", [0, 9])
@pytest.mark.parametrize(
    "make, change",
    [(ours, freeze), (plain, freeze), (ours, thaw), (plain, thaw), (ours, assign)],
)
def test_frozen_and_assigned_members_are_as_if_alone(monkeypatch, warmup, make, change):
    monkeypatch.setenv("ODSGD_WARMUP_STEPS", str(warmup))
    settings = {"absent": lambda i, step: False, "change": change}
    seen = compare(monkeypatch, make(momentum_sgd), **settings)
    if change is freeze:
        for step in range(5, 8):
            np.testing.assert_array_equal(seen[step][1][PAUSED], seen[4][1][PAUSED])
    if change is assign:
        moved = np.abs(seen[6][1][0] - 0.5).max()  # from the assigned weights on
        assert 0 < moved < 0.5


def test_a_scheduled_learning_rate_is_the_step_s_for_late_members(monkeypatch):
    def optimizer():
        schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.2)
        return opt.SGD(learning_rate=0.2, lr_scheduler=schedule, momentum=0.5)

    compare(monkeypatch, ours(optimizer, warmup_steps=1))


@pytest.mark.parametrize("kind", ["fp16", "2bit"])
def test_compressed_training_is_the_same_in_packs(monkeypatch, kind):
    make = ours(momentum_sgd, warmup_steps=2, compression_params={"type": kind})
    # What is large is compressed alike, packs are whole either way.
    compare(monkeypatch, make, change=multiply)


def test_a_member_that_gluon_s_store_never_gets_is_named():
    params = parameters()
    trainer = gluon.Trainer(params, "sgd", kvstore="dist_odsgd")
    backward(params, 0)
    trainer.step(1)
    store = trainer._kvstore
    store.pushpull(0, nd.ones(3), out=params[0].data())
    with pytest.raises(JobError) as caught:  # the next step begins
        store.pushpull(0, nd.ones(3), out=params[0].data())
    text = str(caught.value)
    assert "Parameter 1, 3, 4, 5, 6 did not come" in text and "0 did" in text


def test_a_pack_sums_all_devices_though_its_first_member_comes_late():
    contexts = [mx.cpu(0), mx.cpu(1)]
    params = [gluon.Parameter(f"d{i}", shape=(4,)) for i in range(3)]
    for param in params:
        param.initialize(mx.init.Zero(), ctx=contexts)
    trainer = odsgd_kvstore.Trainer(params, "sgd", {"learning_rate": 1}, delay=0)
    for step in range(3):
        with autograd.record():
            outputs = [
                param.data(context) * (device + 1)
                for device, context in enumerate(contexts)
                for param in params[step == 0 :]
            ]
        autograd.backward(outputs)
        trainer.step(1, ignore_stale_grad=True)
    for param, steps in zip(params, [2, 3, 3]):  # 1 + 2 in each step
        for context in contexts:
            assert (param.data(context).asnumpy() == -3 * steps).all()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("kind", [None, "fp16", "2bit"])
def test_weights_assigned_before_a_parameter_is_ever_stepped(delay, kind):
    params = [gluon.Parameter(f"a{i}", shape=(4,)) for i in range(3)]
    params.append(gluon.Parameter("a3", shape=(5000,)))
    for param in params:
        param.initialize(mx.init.Zero())
    trainer = odsgd_kvstore.Trainer(
        params,
        "sgd",
        {"learning_rate": 1},
        delay=delay,
        warmup_steps=9,
        compression_params=kind and {"type": kind},
    )
    for step in range(3):
        if step == 2:
            for param in params:
                param.set_data(nd.full(param.shape, 8))
        with autograd.record():
            outputs = [param.data() * 1 for param in params[:2]]
        autograd.backward(outputs)
        trainer.step(1, ignore_stale_grad=True)
    for param, value in zip(params, [7, 7, 8, 8]):
        assert (param.data().asnumpy() == value).all()


def test_a_weight_that_float16_cannot_hold_is_refused():
    param = gluon.Parameter("large", shape=(3,))
    param.initialize(mx.init.Constant(70000))
    trainer = odsgd_kvstore.Trainer([param], "sgd", compression_params={"type": "fp16"})
    param.grad()[:] = 1
    param.data()._fresh_grad = True
    with pytest.raises(ConfigError, match="0 is 70000, and with compression 'fp16'"):
        trainer.step(1)
