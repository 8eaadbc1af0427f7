"""oneDNN reorders the weights of a network that predicts; training must not mind."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import odsgd_kvstore

STEPS = 6


def make_net():
    """Convolutions in a pack (576 numbers), whole and in slices (73,728)."""
    net = gluon.nn.HybridSequential(prefix="predicts_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(64, 3, padding=1, in_channels=1))
        net.add(gluon.nn.Conv2D(16, 3, padding=1, in_channels=64))
        net.add(gluon.nn.Conv2D(512, 3, padding=1, in_channels=16))
        net.add(gluon.nn.Dense(10, in_units=512 * 64))
    net.initialize(mx.init.Constant(0.01))
    net.hybridize()
    return net


def train(plain, compression, predicts):
    """The global weights after some steps, with or without predictions between."""
    net = make_net()
    data = mx.nd.array(np.random.RandomState(0).uniform(-1, 1, (2, 1, 8, 8)))
    settings = ("sgd", {"learning_rate": 1e-3, "momentum": 0.9})
    if plain:
        trainer = gluon.Trainer(
            net.collect_params(),
            *settings,
            kvstore="dist_odsgd",
            compression_params=compression,
        )
    else:
        trainer = odsgd_kvstore.Trainer(
            net.collect_params(),
            *settings,
            compression_params=compression,
            warmup_steps=2,
        )
    for _ in range(STEPS):
        if predicts:
            net(data)  # still running when the step below is made
        with autograd.record():
            loss = net(data).mean()
        loss.backward()
        trainer.step(2)
        if predicts:
            net(data).wait_to_read()
            with odsgd_kvstore.global_weights(trainer):
                net(data)
    with odsgd_kvstore.global_weights(trainer):
        return [p.data().asnumpy() for p in net.collect_params().values()]


@pytest.mark.parametrize(
    "compression", [None, {"type": "fp16"}, {"type": "2bit", "threshold": 0.1}]
)
@pytest.mark.parametrize("plain", [False, True], ids=["ours", "plain"])
def test_predictions_between_steps_change_nothing(plain, compression, monkeypatch):
    monkeypatch.setenv("ODSGD_WARMUP_STEPS", "2")
    seen = train(plain, compression, predicts=True)
    wanted = train(plain, compression, predicts=False)
    assert all(np.isfinite(weight).all() for weight in wanted)
    for mine, other in zip(seen, wanted):
        # The layout decides the order in which a convolution adds.
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
