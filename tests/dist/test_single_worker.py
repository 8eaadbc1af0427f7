"""One worker is the optimizer itself, and stand-alone is one worker with one server.

The reference is MXNet's: gluon.Trainer with kvstore=None, in the same process. Every
run feeds on its own weights, so an error once made stays.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # without conftest.py, which imports it before MXNet
    import odsgd_kvstore  # noqa: F401

import mxnet as mx
import numpy as np
import pytest

from odsgd_kvstore import Trainer
from odsgd_kvstore.errors import ConfigError
from odsgd_kvstore.testing import run_local

ROOT = Path(__file__).absolute().parents[2]
LIMIT_S = 240
STEPS, SHORT = 100, 10
# Of the largest weight. It holds for Adam's mirror, too: what D says of the momentum is
# off by the rounding of W, 6e-8 of it, and enters the next step times beta1. As Adam
# divides by the gradient's size, such an error counts relative to the gradient. Seen:
# NAG 3.8e-7, Adam 2.2e-7 with gradients of 0.07, and 1.3e-5 where they had fallen to
# 2e-5 (1000 steps on a single batch), which is why each step here has new data.
TOLERANCE = 2e-6
ENV = {"MXNET_KVSTORE_BIGARRAY_BOUND": "64"}  # below the network's first weight
MOMENTUM = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}
NAG = {**MOMENTUM, "learning_rate": 0.03}
ADAM = {"learning_rate": 0.003, "wd": 0.01}
FACTOR = ("FactorScheduler", {"step": 15, "factor": 0.7, "base_lr": 0.03})
LONG_RUNS = {  # optimizer, its parameters, local update
    "SGD": ("sgd", {"learning_rate": 0.1, "wd": 0.01}, "mirror"),
    "SGD, momentum": ("sgd", MOMENTUM, "mirror"),
    "SGD, momentum, clip": ("sgd", {**MOMENTUM, "clip_gradient": 0.01}, "mirror"),
    "SGD by replica": ("sgd", {**MOMENTUM, "clip_gradient": 0.01}, "replica"),
    "Adam by replica": ("adam", ADAM, "replica"),
    "NAG by replica": ("nag", {**MOMENTUM, "clip_gradient": 0.02}, "replica"),
    "NAG": ("nag", NAG, "mirror"),
    "NAG, clip": ("nag", {**NAG, "clip_gradient": 0.02}, "mirror"),
    "NAG, schedule": ("nag", {**NAG, "lr_scheduler": FACTOR}, "mirror"),
    "NAG, changes": ("nag", NAG, "mirror"),
    "NAG, warm-up": ("nag", NAG, "mirror"),
    "Adam": ("adam", ADAM, "mirror"),
    "Adam, clip": ("adam", {**ADAM, "clip_gradient": 0.02}, "mirror"),
    "Adam, schedule": ("adam", {**ADAM, "lr_scheduler": FACTOR}, "mirror"),
    "Adam, changes": ("adam", ADAM, "mirror"),
    "Adam, warm-up": ("adam", ADAM, "mirror"),
    "RMSProp": ("rmsprop", {"learning_rate": 0.003, "wd": 0.01}, "replica"),
    "RMSProp, centered": ("rmsprop", {"centered": True, "wd": 0.01}, "replica"),
}
MULTIPLIERS = {1: (0.5, 3.0), 2: (2.0, 0.0)}  # by parameter: lr_mult, wd_mult
SHARED = {
    50: {"wd": 0.05}, 60: {"multipliers": MULTIPLIERS}, 75: {"clip_gradient": 0.05},
}  # fmt: skip
CHANGES = {  # name: what changes before a step
    "NAG, changes": {
        20: {"learning_rate": 0.01},
        35: {"momentum": 0.5},
        85: {"learning_rate": 0.05, "momentum": 0.8},
        **SHARED,
    },
    "Adam, changes": {
        20: {"learning_rate": 0.001},
        35: {"beta1": 0.8},
        85: {"learning_rate": 0.006, "beta2": 0.99},
        **SHARED,
    },
}
REFUSED = {  # optimizer, its parameters, words of the message
    "random": ("sgld", {}, ["SGLD", "random"]),
    "broken in MXNet": ("dcasgd", {"momentum": 0.5}, ["DCASGD", "momentum"]),
    "needs matrices": ("groupadagrad", {}, ["GroupAdaGrad"]),  # servers hold vectors
}
NEVER = ("sgld", "groupadagrad")
BUILT_IN = sorted(set(mx.optimizer.Optimizer.opt_registry) - set(NEVER))
ANY = {"learning_rate": 0.01, "wd": 0.01}
NORM_BASED = ["lars", "lamb", "lbsgd"]


def build(hidden=16):
    """A small network; its first weight has 8 times `hidden` numbers."""
    mx.random.seed(5)
    net = mx.gluon.nn.HybridSequential()
    net.add(
        mx.gluon.nn.Dense(hidden, in_units=8, activation="tanh"),
        mx.gluon.nn.Dense(4, in_units=hidden),
    )
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 8)))
    return net


def change(trainer, params, changes):
    """What the user changes before a step."""
    for name, value in changes.items():
        if name == "learning_rate":
            trainer.set_learning_rate(value)
        elif name == "multipliers":
            for i, (lr_mult, wd_mult) in value.items():
                params[i].lr_mult, params[i].wd_mult = lr_mult, wd_mult
        else:
            setattr(trainer._optimizer, name, value)


def with_schedule(options):
    """Options for one trainer: a schedule must be its own."""
    if "lr_scheduler" not in options:
        return dict(options)
    name, arguments = options["lr_scheduler"]
    schedule = getattr(mx.lr_scheduler, name)(**arguments)
    base_lr = arguments["base_lr"]  # or the optimizer's default would replace it
    return {**options, "lr_scheduler": schedule, "learning_rate": base_lr}


def train(make_trainer, steps, hidden=16, changes=None):
    """(parameters, global weights) at the end."""
    net = build(hidden)
    params = net.collect_params()
    trainer = make_trainer(params)
    criterion = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(steps):
        change(trainer, list(params.values()), (changes or {}).get(step, {}))
        random = np.random.RandomState(step)
        data, label = random.normal(0, 1, (6, 8)), random.randint(0, 4, 6)
        with mx.autograd.record():
            loss = criterion(net(mx.nd.array(data)), mx.nd.array(label))
        loss.backward()
        trainer.step(6)
    local = [param.data().asnumpy() for param in params.values()]
    if isinstance(trainer, Trainer):
        trainer.synchronize()
    return local, [param.data().asnumpy() for param in params.values()]


def alone(name, options, steps, hidden=16, changes=None):
    """MXNet's optimizer in this process; the parameters at the end."""

    def make(params):
        return mx.gluon.Trainer(params, name, with_schedule(options), kvstore=None)

    return train(make, steps, hidden, changes)[0]


def ours(name, options, steps, hidden=16, changes=None, **settings):
    """With dist_odsgd: (local, global) weights at the end, or the error's text."""

    def make(params):
        return Trainer(params, name, with_schedule(options), **settings)

    try:
        return train(make, steps, hidden, changes)
    except ConfigError as error:
        return str(error)


def refusal(name, options):
    """The text of the error that makes a trainer impossible; '' if it can be made."""
    try:
        Trainer(build().collect_params(), name, options)
    except ConfigError as error:
        return str(error)
    return ""


def work():
    """On the worker: the long runs, and every built-in optimizer with both delays."""
    seen = {}
    for name, (kind, options, rule) in LONG_RUNS.items():
        warmup = 7 if "warm-up" in name else 0
        settings = {"local_optimizer": rule, "warmup_steps": warmup}
        changes = CHANGES.get(name)
        seen[name] = ours(kind, options, STEPS, changes=changes, **settings)
        seen["alone", name] = alone(kind, options, STEPS, changes=changes)
    for name in BUILT_IN:
        for delay in (0, 1):
            seen[name, delay] = ours(name, ANY, SHORT, delay=delay, warmup_steps=0)
        seen["alone", name] = alone(name, ANY, SHORT)
    for why, (name, options, _) in REFUSED.items():
        seen[why] = refusal(name, options)
    return seen


def work_on_two_servers():
    """On the worker of a job that cuts large arrays: what is refused there."""
    seen = {"nadam": refusal("nadam", {})}
    for name in NORM_BASED:
        seen[name, "cut"] = ours(name, ANY, SHORT, delay=0)
        seen[name, "whole"] = ours(name, ANY, SHORT, hidden=7, delay=0)
        seen[name, "alone"] = alone(name, ANY, SHORT, hidden=7)
    return seen


@pytest.fixture(scope="module")
def stand_alone(tmp_path_factory):
    """What a process without a launcher saw."""
    path = tmp_path_factory.mktemp("stand_alone") / "seen"
    env = {name: value for name, value in os.environ.items() if "DMLC_" not in name}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__, str(path)]
    subprocess.run(command, env=env, timeout=LIMIT_S, check=True)
    return pickle.loads(path.read_bytes())


@pytest.fixture(scope="module")
def one_server():
    """What the worker of a job with one server saw."""
    return run_local(work, 1, 1, LIMIT_S)[0]


@pytest.fixture(scope="module")
def two_servers():
    """What the worker of a job with two servers saw."""
    return run_local(work_on_two_servers, 1, 2, LIMIT_S, ENV)[0]


def assert_close(got, want):
    """Equal to TOLERANCE of the largest weight of all."""
    assert not isinstance(got, str), got
    limit = TOLERANCE * max(np.abs(weight).max() for weight in want)
    assert len(got) == len(want)
    for index, (weight, wanted) in enumerate(zip(got, want)):
        error = np.abs(weight.astype("float64") - wanted).max()
        assert error <= limit, f"parameter {index}: off by {error}, allowed {limit}"


@pytest.mark.parametrize("where", ["stand_alone", "one_server"])
@pytest.mark.parametrize("name", LONG_RUNS)
def test_one_worker_equals_the_optimizer_after_many_steps(request, where, name):
    seen = request.getfixturevalue(where)
    local, global_ = seen[name]
    assert_close(local, seen["alone", name])
    assert_close(global_, seen["alone", name])


@pytest.mark.parametrize("name", LONG_RUNS)
def test_stand_alone_equals_one_server_bit_for_bit(stand_alone, one_server, name):
    for mine, theirs in zip(stand_alone[name], one_server[name]):
        for weight, wanted in zip(mine, theirs):
            np.testing.assert_array_equal(weight, wanted)


# Nadam's momentum schedule advances with every parameter, in the order of arrival, so
# a server's weights are only near the local trainer's.
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    "where, name",
    [("stand_alone", name) for name in BUILT_IN]
    + [("one_server", name) for name in BUILT_IN if name != "nadam"],
)
def test_built_in_optimizer_equals_the_local_one(request, where, name, delay):
    seen = request.getfixturevalue(where)
    for got in seen[name, delay]:
        assert_close(got, seen["alone", name])


@pytest.mark.parametrize("where", ["stand_alone", "one_server"])
@pytest.mark.parametrize("why", REFUSED)
def test_optimizer_is_refused_by_name(request, where, why):
    said = request.getfixturevalue(where)[why]
    for word in REFUSED[why][2]:
        assert word in said


def test_nadam_is_refused_on_two_servers(two_servers):
    assert "Nadam" in two_servers["nadam"] and "order" in two_servers["nadam"]


@pytest.mark.parametrize("name", NORM_BASED)
def test_norm_based_optimizer_is_refused_where_arrays_are_cut(two_servers, name):
    said = two_servers[name, "cut"]
    assert isinstance(said, str), "it was trained"
    assert name.upper() in said.upper() and "128 numbers" in said, said


@pytest.mark.parametrize("name", NORM_BASED)
def test_norm_based_optimizer_trains_where_arrays_are_whole(two_servers, name):
    for got in two_servers[name, "whole"]:
        assert_close(got, two_servers[name, "alone"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(work()))
