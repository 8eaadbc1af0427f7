"""Without a delay, weights are stock `dist_sync`'s bit for bit (invariant 1).

The baseline is MXNet's own: plain gluon.Trainer or Module, kvstore='dist_sync', on
a stock server. A process can hold one such store, so each baseline is a job; ours
train all in one, on two servers, where the largest arrays are cut.
"""

import functools
import itertools
import os

import mxnet as mx
import numpy as np
import pytest

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

STEPS = 12
ENV = {"MXNET_KVSTORE_BIGARRAY_BOUND": "64"}
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.003, "wd": 0.01},
}
BATCHES = [32, 10]
RUNS = list(itertools.product(OPTIMIZERS, BATCHES))
WAYS = {  # how synchronous training is asked for; None is a plain gluon.Trainer
    "delay=0": {"delay": 0},
    "warm-up beyond the run": {"warmup_steps": STEPS, "local_optimizer": "auto"},
    "warm-up, replica": {"warmup_steps": STEPS + 5, "local_optimizer": "replica"},
    "warm-up, sgd": {"warmup_steps": STEPS, "local_optimizer": "sgd"},
    "plain gluon.Trainer": None,  # the default warm-up is longer than the run
}
EPOCHS, BATCHES_PER_EPOCH, MODULE_BATCH = 3, 4, 10


def rank():
    """This worker's rank."""
    return int(os.environ["ODSGD_LOCAL_RANK"])


def batch(step, size):
    """A rank's data of a step."""
    random = np.random.RandomState(1000 * step + rank())
    return random.normal(0, 1, (size, 1, 8, 8)), random.randint(0, 4, size)


def build():
    """A small convolutional network; its running statistics are not trained."""
    mx.random.seed(3 + rank())  # so that only rank 0's initial weights count
    net = mx.gluon.nn.HybridSequential()
    net.add(
        mx.gluon.nn.Conv2D(8, 3, in_channels=1),
        mx.gluon.nn.BatchNorm(in_channels=8),
        mx.gluon.nn.Activation("relu"),
        mx.gluon.nn.MaxPool2D(),
        mx.gluon.nn.Dense(4, in_units=72),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def train(make_trainer, size):
    """Every parameter after each step."""
    net = build()
    trainer = make_trainer(net.collect_params())
    criterion = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    seen = []
    for step in range(STEPS):
        data, label = (mx.nd.array(part) for part in batch(step, size))
        with mx.autograd.record():
            loss = criterion(net(data), label)
        loss.backward()
        trainer.step(size)
        seen.append([p.data().asnumpy() for p in net.collect_params().values()])
    return seen


def plain(kvstore, name, params):
    """MXNet's own trainer."""
    return mx.gluon.Trainer(params, name, dict(OPTIMIZERS[name]), kvstore=kvstore)


def ours(options, name, params):
    """Our trainer."""
    return odsgd_kvstore.Trainer(params, name, OPTIMIZERS[name], **options)


def fit(kvstore):
    """Every parameter after each batch of Module.fit; names as in the symbol."""
    mx.random.seed(3)
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="one")
    net = mx.sym.FullyConnected(mx.sym.tanh(net), num_hidden=4, name="two")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"))
    data, label = batch(0, BATCHES_PER_EPOCH * MODULE_BATCH)
    data = data.reshape(len(data), -1)
    seen = []

    def record(_):
        seen.append({k: v.asnumpy() for k, v in module.get_params()[0].items()})

    module.fit(
        mx.io.NDArrayIter(data, label, MODULE_BATCH),
        num_epoch=EPOCHS,
        kvstore=kvstore,
        optimizer="sgd",
        optimizer_params=OPTIMIZERS["sgd"].items(),
        initializer=mx.init.Xavier(),
        batch_end_callback=record,
    )
    return seen


def train_ours():
    """On a worker: every way of every run, and Module.fit."""
    seen = {"module": fit("dist_odsgd")}
    for way, options in {**WAYS, "delayed": {"warmup_steps": 0}}.items():
        for name, size in RUNS:
            make = functools.partial(plain, "dist_odsgd", name)
            if options is not None:
                make = functools.partial(ours, options, name)
            seen[way, name, size] = train(make, size)
    return seen


@pytest.fixture(scope="module")
def our_job():
    """What each rank saw with our store."""
    return run_local(lambda: train_ours(), 2, 2, 120, ENV)


@pytest.fixture(scope="module")
def stock_jobs():
    """What each rank saw with MXNet's store, by run."""

    def make(name, size):
        make_trainer = functools.partial(plain, "dist_sync", name)
        return run_local(
            lambda: train(make_trainer, size), 2, 1, 120, stock_servers=True
        )

    return {run: make(*run) for run in RUNS}


@pytest.mark.parametrize("name, size", RUNS)
@pytest.mark.parametrize("way", WAYS)
def test_gluon_equals_dist_sync_bit_for_bit(our_job, stock_jobs, way, name, size):
    for mine, stock in zip(our_job, stock_jobs[name, size]):
        assert len(mine[way, name, size]) == len(stock) == STEPS
        for step, (got, want) in enumerate(zip(mine[way, name, size], stock)):
            for index, (weight, wanted) in enumerate(zip(got, want)):
                np.testing.assert_array_equal(
                    weight, wanted, err_msg=f"parameter {index}, step {step + 1}"
                )


@pytest.mark.parametrize("name, size", RUNS)
def test_gluon_differs_from_dist_sync_when_delayed(our_job, stock_jobs, name, size):
    for mine, stock in zip(our_job, stock_jobs[name, size]):
        got, want = mine["delayed", name, size][-1], stock[-1]
        assert not np.array_equal(got[-2], want[-2])  # the last layer's weight


def test_module_fit_equals_dist_sync_bit_for_bit(our_job):
    stock_job = run_local(lambda: fit("dist_sync"), 2, 1, 120, stock_servers=True)
    for mine, stock in zip(our_job, stock_job):
        assert len(mine["module"]) == len(stock) == EPOCHS * BATCHES_PER_EPOCH
        for step, (got, want) in enumerate(zip(mine["module"], stock)):
            assert sorted(got) == ["one_bias", "one_weight", "two_bias", "two_weight"]
            for name, wanted in want.items():
                np.testing.assert_array_equal(
                    got[name], wanted, err_msg=f"{name}, step {step + 1}"
                )
