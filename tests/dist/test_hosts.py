"""Gluon's networks on the store: BatchNorm, late layers, hybridize, Estimator.

Devices, batch sizes: `test_devices.py`. Module, stores, keys: `test_stores.py`.
"""

import os

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib import estimator

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
WORKERS = 2


def rank():
    return int(os.environ["ODSGD_LOCAL_RANK"])


def same_everywhere(ranks):
    """The value that all ranks have; their arrays are compared bit by bit."""
    for other in ranks[1:]:
        np.testing.assert_equal(other, ranks[0])
    return ranks[0]


# Gluon's networks


def make_net(*layers, prefix="net_"):
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(*(layer() for layer in layers))
    return net


def normalised():
    layers = [lambda: nn.Dense(5), nn.BatchNorm, lambda: nn.Dense(2)]
    net = make_net(*layers)
    net.initialize(mx.init.Xavier())
    return net


def train(net, trainer, steps=8, batch=6, last=None, seed=0):
    """Train on this rank's own data; `last` is the size of the last batch."""
    data = np.random.RandomState(1000 * seed + rank())
    for step in range(steps):
        size = last if last and step == steps - 1 else batch
        x = mx.nd.array(data.randn(size, 3))
        with autograd.record():
            loss = (net(x) - 1) ** 2
        loss.backward()
        trainer.step(size)


def weights_of(net):
    return {k: v.data().asnumpy() for k, v in net.collect_params().items()}


def ours(net, warmup_steps=2, optimizer="sgd", rule=None):
    rule = rule or {"learning_rate": 0.05, "momentum": 0.5}
    params = net.collect_params()
    return odsgd_kvstore.Trainer(params, optimizer, rule, warmup_steps=warmup_steps)


def batch_norm():
    """Running statistics and all weights: L, W, and after `synchronize`."""
    mx.random.seed(rank())  # rank 0's initial weights count
    net = normalised()
    trainer = ours(net)
    train(net, trainer)
    seen = {"local": weights_of(net)}
    with trainer.global_weights():
        seen["global"] = weights_of(net)
    trainer.synchronize()
    seen["synchronized"] = weights_of(net)
    net[0].weight.set_data(net[0].weight.data() * 0 + 1)  # makes all be looked at
    train(net, trainer, steps=1, seed=1)
    seen["assigned"] = weights_of(net)
    return seen


def unused_layer():
    """A layer without a shape that is used from step 4 on, and one that never is."""
    mx.random.seed(rank())
    net, late, never = parts = [
        make_net(lambda: nn.Dense(2), prefix=f"{name}_") for name in "abc"
    ]
    for part in parts:
        part.initialize(mx.init.Xavier())
    params = [param for part in parts for param in part.collect_params().values()]
    sgd = {"learning_rate": 0.05}
    trainer = odsgd_kvstore.Trainer(params, "sgd", sgd, warmup_steps=2)
    data, seen = np.random.RandomState(rank()), []
    for step in range(10):
        x = mx.nd.array(data.randn(6, 3))
        with autograd.record():
            y = net(x)
            loss = ((late(y) if step >= 4 else y) - 1) ** 2
        loss.backward()
        trainer.step(6, ignore_stale_grad=True)  # biases have their shape
        with trainer.global_weights():
            used = [net, late] if step >= 4 else [net]
            seen.append([list(weights_of(part).values()) for part in used])
    return seen, [p.shape for p in never.collect_params().values()]


def fitted(how):
    """W after training with or without hybridize, or by an Estimator."""
    mx.random.seed(7)
    net = normalised()
    if how == "hybridized":
        net.hybridize()
    trainer = ours(net)
    if how != "estimator":
        train(net, trainer)
    else:
        data = np.random.RandomState(rank())
        x = np.stack([data.randn(6, 3) for _ in range(8)]).reshape(-1, 3)
        x = x.astype("float32")
        pairs = gluon.data.ArrayDataset(x, np.ones((48, 2), "float32"))
        fit = estimator.Estimator(
            net, gluon.loss.L2Loss(), trainer=trainer, train_metrics=mx.metric.MSE()
        )
        fit.fit(gluon.data.DataLoader(pairs, batch_size=6), epochs=1)
    with trainer.global_weights():
        return list(trained(weights_of(net)).values())


@pytest.fixture(scope="module")
def nets():
    def run():
        return {
            "batch norm": batch_norm(), "unused": unused_layer(),
            **{how: fitted(how) for how in ("eager", "hybridized", "estimator")},
        }  # fmt: skip

    return run_local(run, WORKERS, 1, timeout=LIMIT_S)


def running(seen):
    return {k: v for k, v in seen.items() if "running" in k}


def trained(seen):
    return {k: v for k, v in seen.items() if "running" not in k}


@pytest.mark.parametrize("when", ["global", "synchronized"])
def test_running_statistics_stay_local(nets, when):
    one, other = (rank["batch norm"] for rank in nets)
    for seen in (one, other):
        np.testing.assert_equal(running(seen[when]), running(seen["local"]))
    for name, value in running(one[when]).items():
        assert not np.array_equal(value, running(other[when])[name])
    np.testing.assert_equal(trained(one[when]), trained(other[when]))
    # No bias in front of a BatchNorm learns: its gradient is 0 but for rounding.
    changed = [k for k, v in trained(one["local"]).items() if "weight" in k]
    for name in changed:
        assert not np.array_equal(one["local"][name], other["local"][name])


def test_running_statistics_stay_local_when_weights_are_assigned(nets):
    one, other = (running(rank["batch norm"]["assigned"]) for rank in nets)
    assert len(one) == 2
    for name, value in one.items():
        assert not np.array_equal(value, other[name])


def test_layers_without_a_shape_join_when_they_are_used(nets):
    seen, shapes = same_everywhere([rank["unused"] for rank in nets])
    assert shapes == [(2, 0), (2,)]
    late = [step[1] for step in seen[4:]]
    for i in range(1, len(late)):
        assert not np.array_equal(late[i][0], late[i - 1][0])


@pytest.mark.parametrize("how", ["eager", "hybridized", "estimator"])
def test_hybridize_and_estimator_train_as_a_plain_loop(nets, how):
    got = same_everywhere([rank[how] for rank in nets])
    if how != "estimator":  # its loss is another one
        for one, other in zip(got, nets[0]["eager"]):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    mx.random.seed(7)
    net = normalised()
    net(mx.nd.zeros((1, 3)))
    start = list(trained(weights_of(net)).values())
    assert not np.allclose(got[0], start[0], atol=1e-3)
