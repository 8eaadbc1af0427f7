"""Module, several stores in one process, and keys at the store's own level."""

import os

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
WORKERS = 2
SHAPE = (4, 3)
BATCH, BATCHES, EPOCHS = 8, 5, 2


def rank():
    return int(os.environ["ODSGD_LOCAL_RANK"])


def same_everywhere(ranks):
    """The value that all ranks have; their arrays are compared bit by bit."""
    for other in ranks[1:]:
        np.testing.assert_equal(other, ranks[0])
    return ranks[0]


# Module


def symbol():
    data = mx.sym.Variable("data")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=5), "relu")
    out = mx.sym.FullyConnected(hidden, num_hidden=2)
    return mx.sym.SoftmaxOutput(out, name="softmax")


def arguments(mod):
    return {k: v.asnumpy() for k, v in mod.get_params()[0].items()}


def fit(folder):
    """Train, and what parameters hold after each epoch and in the end."""
    data = np.random.RandomState(rank())
    x = data.randn(BATCH * BATCHES, 3).astype("float32")
    batches = mx.io.NDArrayIter(x, (x[:, 0] > 0).astype("float32"), BATCH)
    mod = mx.mod.Module(symbol(), context=mx.cpu())
    mx.random.seed(rank())
    own = os.path.join(folder, f"rank-{rank()}")
    os.makedirs(own)
    epochs = []

    def note(*_):
        with odsgd_kvstore.global_weights(mod):
            epochs.append(arguments(mod))

    mod.fit(
        batches, num_epoch=EPOCHS, kvstore="dist_odsgd", optimizer="sgd",
        optimizer_params={"learning_rate": 0.5, "momentum": 0.5},
        initializer=mx.init.Xavier(),
        epoch_end_callback=[
            odsgd_kvstore.module_checkpoint(mod, os.path.join(own, "model")), note
        ],
    )  # fmt: skip
    seen = {"rescale": mod._optimizer.rescale_grad, "type": mod._kvstore.type}
    seen.update(epochs=epochs, local=arguments(mod))
    with odsgd_kvstore.global_weights(mod):
        seen["global"] = arguments(mod)
    seen["back"] = arguments(mod)
    odsgd_kvstore.synchronize(mod)
    seen["synchronized"] = arguments(mod)
    return seen


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("module")
    env = {"ODSGD_WARMUP_STEPS": "3"}
    ranks = run_local(lambda: fit(str(folder)), WORKERS, 1, timeout=LIMIT_S, env=env)
    return ranks, folder


def test_module_divides_by_the_batches_of_all_workers(module):
    for seen in module[0]:
        assert seen["rescale"] == 1 / (WORKERS * BATCH)
        assert seen["type"] == "dist_odsgd_sync"


def test_module_holds_global_weights_inside_the_context_and_after_synchronize(module):
    one, other = module[0]
    np.testing.assert_equal(one["global"], other["global"])
    for seen in (one, other):
        np.testing.assert_equal(seen["synchronized"], seen["global"])
        np.testing.assert_equal(seen["back"], seen["local"])
        np.testing.assert_equal(seen["epochs"][-1], seen["global"])
    for name in one["local"]:
        assert not np.array_equal(one["local"][name], other["local"][name])
        assert not np.array_equal(one["epochs"][0][name], one["epochs"][1][name])


def test_module_checkpoint_is_the_global_weights_written_whole_by_rank_zero(module):
    ranks, folder = module
    expected = ["model-0001.params", "model-0002.params", "model-symbol.json"]
    assert sorted(os.listdir(folder / "rank-0")) == expected
    assert os.listdir(folder / "rank-1") == []
    for epoch in range(EPOCHS):
        saved = mx.model.load_params(str(folder / "rank-0" / "model"), epoch + 1)[0]
        saved = {name: array.asnumpy() for name, array in saved.items()}
        for seen in ranks:
            np.testing.assert_equal(saved, seen["epochs"][epoch])
    loaded = mx.sym.load(str(folder / "rank-0" / "model-symbol.json"))
    assert loaded.list_arguments() == symbol().list_arguments()


# Several stores


def factor(step, worker, which):
    ramp = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return ((step * 5 + worker * 3 + which * 2) % 7 - 3 + ramp % 5) / 8


RULES = {  # of two trainers that step in turn
    "sgd": {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.125},
    "adam": {"learning_rate": 0.0625},
}


def backward(param, step, which):
    with autograd.record():
        out = param.data() * mx.nd.array(factor(step, rank(), which))
    out.backward()


def two_trainers(steps=10):
    """W of two trainers with the same key 0, after each step."""
    params, trainers, seen = [], [], []
    for name, rule in RULES.items():
        param = gluon.Parameter("w", shape=SHAPE)
        param.initialize(mx.init.One())
        params.append(param)
        trainers.append(odsgd_kvstore.Trainer([param], name, rule, warmup_steps=3))
    for step in range(steps):
        for which, (param, trainer) in enumerate(zip(params, trainers)):
            for _ in range(which + 1):  # the second makes two steps to one
                backward(param, step, which)
                trainer.step(2)
        with odsgd_kvstore.global_weights(trainers[0]), trainers[1].global_weights():
            seen.append([param.data().asnumpy() for param in params])
    return seen


def alone(name, which, steps=10):
    """The same run of one trainer by MXNet's own optimizer in one process."""
    weight, updater = (
        mx.nd.ones(SHAPE),
        mx.optimizer.get_updater(
            mx.optimizer.create(name, rescale_grad=0.5, **RULES[name])
        ),
    )
    seen = []
    for step in range(steps):
        for _ in range(which + 1):
            gradient = sum(factor(step, worker, which) for worker in range(WORKERS))
            updater(0, mx.nd.array(gradient), weight)
        seen.append(weight.asnumpy())
    return seen


def fold():
    """One fold of a cross-validation: W in the end."""
    net = nn.Dense(2, in_units=3)
    mx.random.seed(5)
    net.initialize(mx.init.Xavier())
    trainer = odsgd_kvstore.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.25, "momentum": 0.5},
        warmup_steps=2,
    )  # fmt: skip
    data = np.random.RandomState(rank())
    for _ in range(6):
        with autograd.record():
            loss = (net(mx.nd.array(data.randn(4, 3))) - 1) ** 2
        loss.backward()
        trainer.step(4)
    with trainer.global_weights():
        return [p.data().asnumpy() for p in net.collect_params().values()]


def keys():
    """W of int and str keys, one at a time and in lists, and a second store's."""
    stores = [mx.kv.create("dist_odsgd") for _ in range(2)]
    named, seen = [3, "three", "3", 300000], []
    for number, store in enumerate(stores):
        store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25 * (number + 1)))
    for number, store in enumerate(stores):
        starts = [mx.nd.full((k + 1,), 10.0 * k + number) for k in range(len(named))]
        store.init(named[0], starts[0])
        store.init(named[1:], starts[1:])
        weights = [start.copy() for start in starts]
        for _ in range(3):
            gradients = [mx.nd.full(w.shape, k + 1.0) for k, w in enumerate(weights)]
            store.pushpull(named[0], gradients[0], out=weights[0])
            store.pushpull(named[1:], gradients[1:], out=weights[1:])
        pulled = [mx.nd.zeros(w.shape) for w in weights]
        store.pull(named[:2], out=pulled[:2])
        for key, out in zip(named[2:], pulled[2:]):
            store.pull(key, out=out)
        seen.append([out.asnumpy() for out in pulled])
        with pytest.raises(ValueError, match="'new' is not known"):
            store.pushpull("new", mx.nd.ones(1), out=mx.nd.ones(1))
        with pytest.raises(ValueError, match="initialised before"):
            store.init("three", mx.nd.ones(2))
    return seen


@pytest.fixture(scope="module")
def stores():
    def run():
        folds = [fold() for _ in range(3)]
        return {"two": two_trainers(), "folds": folds, "keys": keys()}

    env = {"ODSGD_WARMUP_STEPS": "1"}
    return run_local(run, WORKERS, 2, timeout=LIMIT_S, env=env)


@pytest.mark.parametrize("which, name", list(enumerate(RULES)))
def test_two_trainers_train_as_each_alone(stores, which, name):
    seen = same_everywhere([rank["two"] for rank in stores])
    for step, expected in enumerate(alone(name, which)):
        np.testing.assert_allclose(seen[step][which], expected, rtol=0, atol=4e-6)


def test_three_folds_with_new_trainers_train_alike(stores):
    folds = same_everywhere([rank["folds"] for rank in stores])
    same_everywhere(folds)
    net = nn.Dense(2, in_units=3)
    mx.random.seed(5)
    net.initialize(mx.init.Xavier())
    assert not np.allclose(folds[0][0], net.weight.data().asnumpy(), atol=0.01)


def test_int_and_str_keys_of_each_store_are_its_own(stores):
    for number, arrays in enumerate(same_everywhere([r["keys"] for r in stores])):
        for k, array in enumerate(arrays):
            # Three steps of N lr g from the start.
            moved = 3 * WORKERS * 0.25 * (number + 1) * (k + 1)
            assert (array == 10 * k + number - moved).all() and array.size == k + 1
