"""The store in one process: the same code for both updates, checked by value."""

import logging
import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet import optimizer as opt

import odsgd_kvstore
from odsgd_kvstore import connection
from odsgd_kvstore.errors import ConfigError, JobError, NotSupportedYet, ServerError

DATA = np.random.RandomState(3).randn(8, 6).astype(np.float32)


class Own(opt.SGD):
    """An optimizer that is not MXNet's."""


@pytest.fixture(autouse=True)
def own_connection(monkeypatch):
    """A job of one worker for each test; a failed one must not reach the next."""
    monkeypatch.setattr(connection, "_open", None)
    monkeypatch.setattr(connection, "_failure", None)


def network():
    """A small network with the same weights each time."""
    net = gluon.nn.Sequential()
    net.add(
        gluon.nn.Dense(5, in_units=6, activation="relu"), gluon.nn.Dense(3, in_units=5)
    )
    net.initialize()
    for i, param in enumerate(net.collect_params().values()):
        values = np.random.RandomState(i).randn(*param.shape)
        param.set_data(nd.array(values * 0.5))
    return net


def train(net, trainer, steps):
    """Train on one batch again and again."""
    for _ in range(steps):
        with autograd.record():
            loss = (net(nd.array(DATA)) ** 2).sum()
        loss.backward()
        trainer.step(8)


def weights(net):
    """The values of the parameters, in order."""
    return [p.data().asnumpy() for p in net.collect_params().values()]


def reference(optimizer, params, steps):
    """The weights after training on one machine with MXNet's own trainer."""
    net = network()
    plain = gluon.Trainer(net.collect_params(), optimizer, dict(params), kvstore=None)
    train(net, plain, steps)
    return weights(net)


def same(one, other, tolerance=0.0):
    """Equal to `tolerance` of the largest weight."""
    for a, b in zip(one, other):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()
    assert len(one) == len(other)


def store(**settings):
    """A store with an optimizer and one key, 0."""
    made = mx.kv.create("dist_odsgd")
    made.set_optimizer(opt.SGD(**{"learning_rate": 0.5, **settings}))
    made.init(0, nd.ones(2))
    return made


@pytest.mark.parametrize(
    "name, kind",
    [
        ("dist_odsgd", "dist_odsgd_sync"),
        ("Dist_ODSGD", "dist_odsgd_sync"),
        ("dist_device_odsgd", "dist_device_odsgd_sync"),
    ],
)
def test_created_store_is_a_kvstore_of_a_synchronous_distributed_type(name, kind):
    made = mx.kv.create(name)
    assert made.type == kind
    assert isinstance(made, mx.kvstore.KVStore)
    assert isinstance(made, odsgd_kvstore.ODSGDStore)
    assert odsgd_kvstore.is_active(made)
    assert made.is_capable("optimizer") and made.is_capable("OPTIMIZER")
    assert (made.rank, made.num_workers) == (0, 1)


def test_unknown_capability_is_refused():
    with pytest.raises(ConfigError, match="capability 'fly'; known: 'optimizer'"):
        mx.kv.create("dist_odsgd").is_capable("fly")


def test_plain_store_is_not_active():
    assert not odsgd_kvstore.is_active(mx.kv.create("local"))
    assert not odsgd_kvstore.is_active(None)


def test_other_types_are_mxnet_s_own():
    assert mx.kv.create().type == "local"
    assert mx.kv.create("device").type == "device"


def test_it_says_once_that_it_is_alone(caplog):
    with caplog.at_level(logging.WARNING):
        mx.kv.create("dist_odsgd"), mx.kv.create("dist_odsgd")
    said = [r.getMessage() for r in caplog.records if "stand-alone" in r.getMessage()]
    assert len(said) == 1
    assert "no DMLC_* variables" in said[0] and "odsgd-launch -n" in said[0]


def test_warmup_is_the_optimizer_itself_bit_for_bit():
    net = network()
    params = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}
    train(net, odsgd_kvstore.Trainer(net.collect_params(), "sgd", params), 5)
    same(weights(net), reference("sgd", params, 5))


@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "rmsprop", "adagrad", "signum"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_worker_is_the_global_optimizer_itself(name, momentum):
    # `mirror` and `replica` make L = W with one worker (`algorithm.md`, invariant 4).
    params = {"learning_rate": 0.01, "wd": 0.01}
    if name in ("sgd", "nag", "signum"):
        params["momentum"] = momentum
    net = network()
    trainer = odsgd_kvstore.Trainer(net.collect_params(), name, params, warmup_steps=2)
    train(net, trainer, 6)
    same(weights(net), reference(name, params, 6), 2e-5)
    trainer.synchronize()
    same(weights(net), reference(name, params, 6), 2e-5)
    assert trainer.stats()["max_staleness"] == 1


def test_plain_trainer_and_ours_give_the_same(monkeypatch):
    monkeypatch.setenv("ODSGD_WARMUP_STEPS", "2")
    first, second = network(), network()
    params = {"learning_rate": 0.05, "momentum": 0.9}
    ours = odsgd_kvstore.Trainer(first.collect_params(), "sgd", params)
    plain = gluon.Trainer(second.collect_params(), "sgd", params, kvstore="dist_odsgd")
    train(first, ours, 6)
    train(second, plain, 6)
    same(weights(first), weights(second))


def test_module_trains(monkeypatch):
    monkeypatch.setenv("ODSGD_WARMUP_STEPS", "1")
    data = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(data, name="softmax"))
    batches = mx.io.NDArrayIter(DATA, np.arange(8) % 3, batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Module's own.
        module.fit(
            batches,
            num_epoch=20,
            kvstore="dist_odsgd",
            optimizer="sgd",
            optimizer_params={"learning_rate": 0.5, "momentum": 0.9},
        )
    batches.reset()
    assert dict(module.score(batches, "acc"))["accuracy"] == 1.0


def test_constant_gradient_gives_the_closed_form():
    # k pushes of c at learning rate lr move W by -k lr c; with one worker L too.
    made = store()
    out = nd.zeros(2)
    for _ in range(4):
        made.pushpull(0, nd.full(2, 0.25), out=out)
    made.pull(0, out=out)
    assert out.asnumpy().tolist() == [1 - 4 * 0.5 * 0.25] * 2


def test_delay_by_hand_with_rule_none(monkeypatch):
    # W = 1 - 0.5 t with gradient 1. Warm-up gives L = W(t+1); after it L = W(t).
    monkeypatch.setenv("ODSGD_WARMUP_STEPS", "2")
    monkeypatch.setenv("ODSGD_LOCAL_OPTIMIZER", "none")
    made, out, seen = store(), nd.zeros(2), []
    for _ in range(5):
        made.pushpull(0, nd.ones(2), out=out)
        seen.append(out.asnumpy()[0])
    assert seen == [0.5, 0.0, 0.0, -0.5, -1.0]
    made.pull(0, out=out)
    assert out.asnumpy().tolist() == [-1.5, -1.5]
    odsgd_kvstore.synchronize(made)


def test_pushpull_leaves_the_gradient_alone():
    made, gradient, out = store(), nd.ones(2), nd.zeros(2)
    for _ in range(3):
        made.pushpull(0, gradient, out=out)
    gradient[:] = 7  # Free as soon as it returned.
    made.pull(0, out=out)
    assert out.asnumpy().tolist() == [-0.5, -0.5]


def test_stores_have_keys_and_optimizers_of_their_own():
    first, second = store(), store(learning_rate=0.125)
    out = nd.zeros(2)
    for made, wanted in ((first, 0.5), (second, 0.875)):
        made.pushpull(0, nd.ones(2), out=out)
        assert out.asnumpy().tolist() == [wanted] * 2


def test_global_weights_are_there_inside_and_local_ones_after():
    net = network()
    trainer = odsgd_kvstore.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.05},
        warmup_steps=0,
        local_optimizer="none",
    )
    train(net, trainer, 3)
    local = weights(net)
    with trainer.global_weights():
        inside = weights(net)
        with pytest.raises(JobError, match="inside global_weights.*Leave the context"):
            train(net, trainer, 1)
    same(weights(net), local)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(inside, local))


def test_own_optimizer_trains_alone():
    # Nothing leaves the process, so no key is needed.
    net = network()
    params = {"learning_rate": 0.05, "momentum": 0.9}
    trainer = odsgd_kvstore.Trainer(net.collect_params(), Own(**params))
    train(net, trainer, 3)
    same(weights(net), reference("sgd", params, 3))


def test_failure_of_the_servers_part_is_raised_with_its_traceback(capsys):
    optimizer = opt.SGD(learning_rate=0.05)
    net = network()
    trainer = odsgd_kvstore.Trainer(net.collect_params(), optimizer)
    train(net, trainer, 2)
    server = connection._open._server
    with pytest.raises(ServerError) as caught:
        server.update(12345, nd.ones(2), nd.ones(2))  # A key that nobody knows.
        train(net, trainer, 1)
    assert "KeyError: 12345" in str(caught.value) and "Traceback" in str(caught.value)
    with pytest.raises(ServerError):  # And again: training does not go on silently.
        train(net, trainer, 1)
    capsys.readouterr()


@pytest.mark.parametrize("first", [0.0, 0.9])
def test_momentum_switched_on_in_training_is_refused(first):
    net, settings = network(), {"learning_rate": 0.05, "momentum": first}
    trainer = odsgd_kvstore.Trainer(net.collect_params(), "sgd", settings)
    train(net, trainer, 1)
    trainer._optimizer.momentum = 0.0
    train(net, trainer, 1)
    trainer._optimizer.momentum = 0.9
    before = weights(net)
    with pytest.raises(
        ConfigError, match="momentum was changed from 0 to 0.9.*Start with"
    ):
        train(net, trainer, 1)
    same(weights(net), before)


def test_second_optimizer_is_refused():
    with pytest.raises(ConfigError, match="has an optimizer already.*make a new store"):
        store().set_optimizer(opt.SGD())


@pytest.mark.parametrize(
    "call, kind, parts",
    [
        (
            lambda s: s.pull("zz", out=nd.zeros(2)),
            ConfigError,
            ["'zz'", "0", "broadcast"],
        ),
        (lambda s: s.pushpull(9, nd.ones(2), out=nd.ones(2)), ConfigError, ["Key 9"]),
        (
            lambda s: s.init(0, nd.ones(2)),
            ConfigError,
            ["Key 0 was initialised before"],
        ),
        (
            lambda s: s.push(0, nd.ones(2)),
            NotSupportedYet,
            ["push without pull", "key 0"],
        ),
        (
            lambda s: s.pushpull(0, nd.ones(2)),
            ConfigError,
            ["without out", "UPDATE_ON"],
        ),
        (
            lambda s: s.init(1, nd.ones(2, dtype="int32")),
            ConfigError,
            ["int32", "Cast it"],
        ),
        (lambda s: s.init([1, 2], [nd.ones(2)]), ConfigError, ["2 keys", "1 values"]),
        (lambda s: s.init(True, nd.ones(2)), ConfigError, ["True is a bool"]),
        (lambda s: s._set_updater(None), NotSupportedYet, ["set_optimizer"]),
        (
            lambda s: s._send_command_to_servers(0, ""),
            NotSupportedYet,
            ["own commands"],
        ),
        (
            lambda s: s.save_optimizer_states("f"),
            NotSupportedYet,
            ["not supported yet"],
        ),
        (
            lambda s: s.load_optimizer_states("f"),
            NotSupportedYet,
            ["not supported yet"],
        ),
        (
            lambda s: s.set_gradient_compression({"type": "2bit"}),
            ConfigError,
            ["after the first key", "before init", "pass compression_params"],
        ),
        (
            lambda s: s.pushpull(0, nd.ones((3, 5)), out=nd.ones(2)),
            ConfigError,
            ["0", "(3, 5)", "(2,)"],
        ),
        (
            lambda s: s.pushpull(0, nd.ones(2), out=nd.ones(3)),
            ConfigError,
            ["0", "(3,)", "(2,)"],
        ),
    ],
)
def test_wrong_use_of_a_store_is_refused_and_it_works_on(call, kind, parts):
    made, out = store(), nd.zeros(2)
    with pytest.raises(kind) as caught:
        call(made)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    made.pushpull(0, nd.ones(2), out=out)
    assert out.asnumpy().tolist() == [0.5, 0.5]
