"""The rule `dcsgd` against numpy, on arrays and in a job of one worker.

L(i,t+1) = W(t) - lr (g + wd W(t) + lamda g g (W(t) - L(i,t)))
"""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet import ndarray as nd
from mxnet import optimizer as opt

import odsgd_kvstore
from odsgd_kvstore import connection, local_update
from odsgd_kvstore.errors import ConfigError
from odsgd_kvstore.local_update import Part
from odsgd_kvstore.optimizer_state import Run

RESCALE = 0.25
SIZE = 12
SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
ACCEPTED = ("lamda", "adaptive", "learning_rate", "lr_scheduler", "wd", "clip_gradient")
ACCEPTED += ("rescale_grad",)


@pytest.fixture(autouse=True)
def own_connection(monkeypatch):
    """A job of one worker for each test."""
    monkeypatch.setattr(connection, "_failure", None)
    monkeypatch.setattr(connection, "_open", None)


def draw(seed):
    """A float32 array."""
    return np.random.RandomState(seed).randn(SIZE).astype(np.float32)


def make(params=None, optimizer=None):
    """The rule; the optimizer's own rescale_grad must not be used."""
    optimizer = optimizer or opt.SGD(**SGD)
    optimizer.rescale_grad = 77.0
    rule = local_update.create("dcsgd", params or {}, optimizer, RESCALE)
    rule.follow({}, 1)
    return rule


def part_of(weight, index=0, count=0):
    """All numbers of a parameter that is a key of its own."""
    return Part(index, 10 + index, Run(0, weight.size, (0,)), count, nd.array(weight))


def updated(rule, weight, beneath, gradient, index=0):
    """L(i,t+1) from W(t), L(i,t) and g; the inputs must stay as they are."""
    arrays = [nd.array(array) for array in (weight, gradient)]
    local_weight = nd.array(beneath)
    rule.update(part_of(weight, index), local_weight, arrays[0], None, arrays[1])
    assert np.array_equal(arrays[0].asnumpy(), weight)
    assert np.array_equal(arrays[1].asnumpy(), gradient)
    return local_weight.asnumpy()


def formula(weight, beneath, gradient, lr=0.1, wd=0.01, lamda=0.04, clip=None):
    """L(i,t+1) in float64; the gradient is scaled already."""
    weight, beneath, g = (a.astype("float64") for a in (weight, beneath, gradient))
    if clip is not None:
        g = np.clip(g, -clip, clip)
    return weight - lr * (g + wd * weight + lamda * g * g * (weight - beneath))


def close(one, other):
    """Equal to 2e-6 of the largest weight."""
    assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max()


def test_by_hand():
    # W = 2, L = 1.5, g = 8 / 4: 2 - 0.1 (2 + 0.5 * 2 + 0.04 * 4 * 0.5) = 1.692
    rule = make(optimizer=opt.SGD(learning_rate=0.1, wd=0.5, momentum=0.9))
    ones = np.ones(SIZE, np.float32)
    close(updated(rule, 2 * ones, 1.5 * ones, 8 * ones), 1.692 * ones)


def test_adaptive_by_hand():
    # The same; M = 0.05 * 4: lamda is 2 / sqrt(0.2) = 4.4721, so that
    # 2 - 0.1 (2 + 1 + 4.4721 * 4 * 0.5) = 0.8055728; then M = 0.95 * 0.2 + 0.2.
    optimizer = opt.SGD(learning_rate=0.1, wd=0.5)
    rule = make({"adaptive": True}, optimizer)
    ones = np.ones(SIZE, np.float32)
    close(updated(rule, 2 * ones, 1.5 * ones, 8 * ones), 0.8055728 * ones)
    second = 2 - 0.1 * (2 + 1 + 2 / np.sqrt(0.39) * 4 * 0.5)
    close(updated(rule, 2 * ones, 1.5 * ones, 8 * ones), second * ones)


@pytest.mark.parametrize(
    "params, used",
    [
        ({}, {}),
        ({"lamda": 0}, {"lamda": 0}),
        ({"lamda": 1.5}, {"lamda": 1.5}),
        ({"learning_rate": 0.3, "wd": 0.2}, {"lr": 0.3, "wd": 0.2}),
        ({"clip_gradient": 0.1}, {"clip": 0.1}),
    ],
)
def test_formula_with_what_is_given(params, used):
    weight, beneath, gradient = draw(0), draw(1), draw(2)
    want = formula(weight, beneath, gradient * RESCALE, **used)
    close(updated(make(params), weight, beneath, gradient), want)


def test_clipping_comes_before_the_square():
    weight, beneath, gradient = draw(0), draw(1), draw(2)
    rule = make({"lamda": 3.0}, opt.SGD(**SGD, clip_gradient=0.1))
    want = formula(weight, beneath, gradient * RESCALE, lamda=3.0, clip=0.1)
    close(updated(rule, weight, beneath, gradient), want)


def test_a_negative_clip_gradient_is_none_as_for_the_operators():
    weight, beneath, gradient = draw(0), draw(1), draw(2)
    rule = make({}, opt.SGD(**SGD, clip_gradient=-1))
    want = formula(weight, beneath, gradient * RESCALE)
    close(updated(rule, weight, beneath, gradient), want)


def test_own_rescale_takes_the_place_of_the_workers_sum():
    weight, beneath, gradient = draw(0), draw(1), draw(2)
    rule = make({"rescale_grad": 0.5})
    close(
        updated(rule, weight, beneath, gradient),
        formula(weight, beneath, 0.5 * gradient),
    )


def test_it_follows_the_global_optimizer():
    weight, beneath, gradient = draw(0), draw(1), draw(2)
    optimizer = opt.NAG(**SGD)
    optimizer.set_lr_mult({0: 0.5})
    optimizer.set_wd_mult({0: 3})
    rule = make({}, optimizer)
    rule.follow({"lr": 0.4, "wd": 0.02, "clip_gradient": 0.05, "momentum": 0.1}, 2)
    want = formula(weight, beneath, gradient * RESCALE, 0.2, 0.06, clip=0.05)
    close(updated(rule, weight, beneath, gradient), want)


def test_what_is_given_does_not_follow():
    weight, beneath, gradient = draw(0), draw(1), draw(2)
    rule = make({"learning_rate": 0.3, "wd": 0.2, "clip_gradient": 0.1})
    rule.follow({"lr": 0.4, "wd": 0.02, "clip_gradient": 0.05}, 2)
    want = formula(weight, beneath, gradient * RESCALE, 0.3, 0.2, clip=0.1)
    close(updated(rule, weight, beneath, gradient), want)


@pytest.mark.parametrize("whose", ["global", "own"])
def test_schedule_is_the_step_s(whose):
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.1, base_lr=0.2)
    if whose == "own":
        rule = make({"lr_scheduler": schedule})
    else:
        rule = make({}, opt.SGD(wd=0.01, learning_rate=0.2, lr_scheduler=schedule))
    for step, lr in ((1, 0.2), (2, 0.2), (3, 0.02), (4, 0.02), (5, 0.002)):
        rule.follow({}, step)
        want = formula(draw(0), draw(1), draw(2) * RESCALE, lr)
        close(updated(rule, draw(0), draw(1), draw(2)), want)


def test_mean_square_is_fed_in_warm_up_and_each_parameter_has_its_own():
    rule, mean = make({"adaptive": True}), np.zeros(SIZE)
    for seed in range(5):
        gradient, other = draw(seed), draw(90 + seed)
        square = (gradient * RESCALE) ** 2
        mean = 0.95 * mean + 0.05 * square
        if seed < 3:
            for index, g in ((0, gradient), (1, other)):
                arrays = nd.zeros(SIZE), nd.array(draw(7)), None, nd.array(g)
                rule.observe(part_of(draw(7), index, seed), *arrays)
            continue
        lamda = 2 / np.sqrt(mean + 1e-7)
        weight, beneath = draw(20 + seed), draw(30 + seed)
        want = formula(weight, beneath, gradient * RESCALE, lamda=lamda)
        close(updated(rule, weight, beneath, gradient), want)
        updated(rule, weight, beneath, other, index=1)


def test_a_gradient_of_zero_is_no_division_by_zero():
    rule = make({"adaptive": True})
    zero = np.zeros(SIZE, np.float32)
    close(updated(rule, draw(0), draw(1), zero), draw(0) * (1 - 0.1 * 0.01))


# In a job of one worker, with a gradient that does not depend on the weights


def parameters(contexts=None, shapes=((3, 2), (90, 100))):
    """One that is packed alone, one that may be cut."""
    params = [gluon.Parameter(f"p{i}", shape=shape) for i, shape in enumerate(shapes)]
    for param in params:
        param.initialize(mx.init.One(), ctx=contexts or mx.cpu())
    return params


def slope(step):
    """The gradient of every number."""
    return 0.5 + step % 3


def backward(params, step, contexts=None):
    """On each device an equal part of the gradient."""
    contexts = contexts or [mx.cpu()]
    share = slope(step) / len(contexts)
    with autograd.record():
        outputs = [param.data(c) * share for c in contexts for param in params]
    autograd.backward(outputs)


def numbers(params):
    """The first number of each parameter, after a check that all are equal."""
    arrays = [array.asnumpy() for param in params for array in param.list_data()]
    for array in arrays:
        np.testing.assert_array_equal(array, array.flat[0])
    return np.array([array.flat[0] for array in arrays], "float64")


def train(between=None, contexts=None, steps=6, **controls):
    """(L, W) by step of a run with lamda 2 and lr 0.1; by the store, by the formula."""
    params = parameters(contexts)
    controls = {"warmup_steps": 1, "local_optimizer_params": {"lamda": 2}, **controls}
    trainer = odsgd_kvstore.Trainer(
        params, "sgd", {"learning_rate": 0.1}, local_optimizer="dcsgd", **controls
    )
    weight = beneath = 1.0
    got, want = [], []
    for step in range(steps):
        if between is not None and step == 3:
            weight, beneath = between(trainer, params, weight, beneath)
        backward(params, step, contexts)
        trainer.step(1)
        local = numbers(params)
        with trainer.global_weights():
            got.append((local, numbers(params)))
        g, before = slope(step), weight
        weight = before - 0.1 * g
        made = before - 0.1 * (g + 2 * g * g * (before - beneath))
        beneath = made if step >= 1 else weight
        want.append((beneath, weight))
    return got, want


def assert_same(got, want, tolerance=2e-6):
    for step, (mine, theirs) in enumerate(zip(got, want)):
        for what, array, number in zip("LW", mine, theirs):
            error = np.abs(array - number).max()
            assert error <= tolerance, f"{what} after step {step}: off by {error}"


def look(trainer, params, weight, beneath):
    """Evaluation puts the local weights back."""
    with trainer.global_weights():
        np.testing.assert_allclose(numbers(params), weight, 0, 1e-6)
    return weight, beneath


def synchronize(trainer, params, weight, beneath):
    """The parameters are W from here on, and so is what a gradient is computed at."""
    trainer.synchronize()
    return weight, weight


def assign(trainer, params, weight, beneath):
    """New weights are W and L."""
    for param in params:
        param.set_data(nd.full(param.shape, 3))
    return 3.0, 3.0


@pytest.mark.parametrize("between", [None, look, synchronize, assign])
def test_compensation_is_from_the_weights_beneath_the_gradient(between):
    assert_same(*train(between))


def test_two_devices_are_one_worker():
    assert_same(*train(contexts=[mx.cpu(0), mx.cpu(1)]))


def test_pulls_in_float16_change_no_more_than_their_rounding():
    # W(t) is off by 2**-12 of 1 at most, and so is L(i,t) through it; the latter comes
    # back times 0.1 lamda g g, which is 1.25 at most.
    got, want = train(compression_params={"type": "fp16"})
    assert_same(got, want, 2e-3)


def test_compression_to_two_bits_leaves_the_local_update_whole():
    two_bits = {"type": "2bit", "threshold": 0.5, "full_every": 1}
    assert_same(*train(compression_params=two_bits))


def test_adaptive_forgets_a_gradient_that_is_not_finite():
    # L of that step is lost; the mean square of the next ones is not.
    rule, twin = (make({"adaptive": True}) for _ in range(2))
    weight, beneath, gradient = draw(1), draw(2), draw(3)
    lost = updated(rule, weight, beneath, np.full(SIZE, np.inf, np.float32))
    assert not np.isfinite(lost).any()
    updated(twin, weight, beneath, np.zeros(SIZE, np.float32))
    for _ in range(2):
        made = updated(rule, weight, beneath, gradient)
        assert np.array_equal(made, updated(twin, weight, beneath, gradient))


# Refusals


@pytest.mark.parametrize(
    "params, parts",
    [
        ({"momentum": 0.9}, ["momentum", *ACCEPTED]),
        ({"lambda": 0.1}, ["lambda", *ACCEPTED]),
        ({"lamda": 0.1, "beta1": 0.9, "eps": 1}, ["beta1", "eps", *ACCEPTED]),
        ({"lamda": -0.1}, ["lamda", "-0.1", "0.04"]),
        ({"lamda": "big"}, ["lamda", "'big'", "0.04"]),
        ({"lamda": True}, ["lamda", "True", "0.04"]),
        ({"lamda": float("nan")}, ["lamda", "nan"]),
        ({"lamda": float("inf")}, ["lamda", "inf"]),
        ({"learning_rate": "big"}, ["learning_rate", "'big'", "finite number"]),
        ({"wd": float("nan")}, ["wd", "nan", "finite number"]),
        ({"adaptive": 1}, ["adaptive", "1", "True", "False"]),
        ({"adaptive": "yes"}, ["adaptive", "'yes'", "True", "False"]),
        ({"adaptive": None}, ["adaptive", "None", "True", "False"]),
    ],
)
def test_wrong_parameters_are_named_at_construction(params, parts):
    controls = {"local_optimizer": "dcsgd", "local_optimizer_params": params}
    for call in (
        lambda: local_update.create("dcsgd", params, opt.SGD(), 1.0),
        lambda: odsgd_kvstore.Trainer(parameters(), "sgd", **controls),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        missing = [
            part for part in ["'dcsgd'", *parts] if part not in str(caught.value)
        ]
        assert not missing, f"{missing} not in: {caught.value}"
