"""Arguments of our Trainer, of gluon's and of Module: refused before any training."""

import subprocess
import sys
import warnings
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet import optimizer as opt

import odsgd_kvstore
from odsgd_kvstore import connection
from odsgd_kvstore.config import Config
from odsgd_kvstore.errors import ConfigError, NotSupportedYet

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]


@pytest.fixture(autouse=True)
def own_connection(monkeypatch):
    """A job of one worker for each test."""
    monkeypatch.setattr(connection, "_open", None)
    monkeypatch.setattr(connection, "_failure", None)


def dense(dtype="float32"):
    """One layer with ones as weights."""
    net = gluon.nn.Dense(2, in_units=3, use_bias=False)
    net.cast(dtype)
    net.initialize(mx.init.One())
    return net


def trainer(net=None, optimizer="sgd", params=None, **settings):
    """Our Trainer."""
    net = net or dense()
    return odsgd_kvstore.Trainer(net.collect_params(), optimizer, params, **settings)


def refused(parts, call, *args, kind=ConfigError, **kwargs):
    """The call raises `kind` with each of `parts` in its message; no job was joined."""
    before = connection._open
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert connection._open is before


def step(net, made):
    """One step on ones."""
    with autograd.record():
        loss = net(nd.ones((4, 3))).sum()
    loss.backward()
    made.step(4)


@pytest.mark.parametrize(
    "settings, parts",
    [
        ({"local_optimizer": "sdg"}, ["'sdg'", "'mirror'", "adam, "]),
        ({"local_optimizer": 3}, ["local_optimizer is 3", "'auto'"]),
        (
            {"local_optimizer": "none", "local_optimizer_params": {"wd": 1}},
            ["'none'", "{'wd': 1}", "takes none"],
        ),
        ({"local_optimizer_params": {"wd": 1}}, ["'auto'", "{'wd': 1}", "takes none"]),
        (
            {"local_optimizer": "sgd", "local_optimizer_params": {"beta1": 1}},
            ["'sgd'", "beta1", "mxnet.optimizer"],
        ),
        (
            {"local_optimizer": "sgd", "local_optimizer_params": 0.1},
            ["is 0.1", "a dict"],
        ),
        ({"warmup_steps": -1}, ["warmup_steps is -1", "whole number", "0 or more"]),
        ({"warmup_steps": 1.5}, ["warmup_steps is 1.5", "whole number"]),
        ({"warmup_steps": True}, ["warmup_steps is True", "whole number"]),
        ({"warmup_steps": "9"}, ["warmup_steps is '9'", "whole number"]),
        ({"delay": 2}, ["delay is 2", "0 (synchronous", "1 (One-step"]),
        ({"delay": True}, ["delay is True", "allowed are 0"]),
        ({"update_on_kvstore": False}, ["update_on_kvstore is False", "Leave it out"]),
        ({"kvstore": "dist_sync"}, ["'dist_sync'", "'dist_odsgd'", "gluon.Trainer"]),
        ({"kvstore": "local"}, ["'local'", "'dist_odsgd'", "gluon.Trainer"]),
        ({"kvstore": None}, ["kvstore is None", "'dist_odsgd'", "gluon.Trainer"]),
        ({"optimizer": "sgld"}, ["SGLD", "random", "dist_sync"]),
        ({"optimizer": opt.DCASGD(momentum=0.9)}, ["DCASGD", "momentum"]),
        (
            {"optimizer": "rmsprop", "local_optimizer": "mirror"},
            ["'mirror'", "RMSProp"],
        ),
        (
            {"local_optimizer": "dcsgd", "local_optimizer_params": {"lambda": 1}},
            ["'dcsgd'", "lambda", "allowed", "lamda", "adaptive"],
        ),
        ({"compression_params": {"type": "1bit"}}, ["'1bit'", "'fp16'", "'2bit'"]),
        (
            {"compression_params": {"type": "fp16"}, "local_optimizer": "mirror"},
            ["'mirror'", "'fp16'"],
        ),
    ],
)
def test_wrong_argument_is_refused_at_construction(settings, parts):
    refused(parts, trainer, **settings)


@pytest.mark.parametrize("given", [{"type": "fp16"}, {"type": "2bit", "threshold": 2}])
@pytest.mark.parametrize("make", [odsgd_kvstore.Trainer, gluon.Trainer])
def test_compression_params_reach_the_store(given, make):
    net, kwargs = dense(), {"kvstore": "dist_odsgd", "compression_params": given}
    made = make(net.collect_params(), "sgd", **kwargs)
    step(net, made)
    assert made._kvstore.config.compression_params == given
    wire = made._kvstore.pipeline.wire
    assert wire.is_compressed == wire.is_exact == (given["type"] == "2bit")
    # lr 0.01, the batch's mean gradient is 1; 1 - 0.01 as the wire carries it.
    wanted = np.float32(1 - 0.01).astype("float16" if given["type"] == "fp16" else "f")
    assert (net.weight.data().asnumpy() == np.float32(wanted)).all()


@pytest.mark.parametrize(
    "variable, value, parts",
    [
        ("ODSGD_WARMUP_STEPS", "-1", ["ODSGD_WARMUP_STEPS", "-1", "0 or more"]),
        ("ODSGD_WARMUP_STEPS", "1.5", ["ODSGD_WARMUP_STEPS is '1.5'", "whole number"]),
        ("ODSGD_DELAY", "2", ["ODSGD_DELAY", "2", "allowed are 0"]),
        ("ODSGD_LOCAL_OPTIMIZER", "sdg", ["'sdg'", "'mirror'"]),
        ("ODSGD_LOCAL_LR", "fast", ["ODSGD_LOCAL_LR is 'fast'", "number"]),
        ("DMLC_ROLE", "foo", ["DMLC_ROLE", "DMLC_NUM_WORKER", "odsgd-launch"]),
        ("DMLC_NUM_WORKER", "2", ["DMLC_ROLE", "DMLC_PS_ROOT_URI", "odsgd-launch"]),
        ("MXNET_UPDATE_ON_KVSTORE", "0", ["MXNET_UPDATE_ON_KVSTORE", "0", "unset"]),
    ],
)
def test_wrong_variable_is_refused_at_construction(monkeypatch, variable, value, parts):
    monkeypatch.setenv(variable, value)
    refused(parts, trainer)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32"])
def test_parameter_of_another_type_is_refused_at_construction(dtype):
    kind = NotSupportedYet if dtype == "float16" else ConfigError
    param = gluon.Parameter("odd_weight", shape=(2,), dtype=dtype)
    param.initialize(mx.init.One())
    refused(
        ["odd_weight", dtype, "allowed is float32"],
        odsgd_kvstore.Trainer,
        [param],
        "sgd",
        kind=kind,
    )


def test_row_sparse_weight_is_refused_at_construction():
    param = gluon.Parameter("table", shape=(9, 2), stype="row_sparse")
    param.initialize()
    refused(
        ["table", "row_sparse", "dense", "dist_sync"],
        odsgd_kvstore.Trainer,
        [param],
        "sgd",
        kind=NotSupportedYet,
    )


def test_row_sparse_gradient_is_refused_at_construction():
    net = gluon.nn.Embedding(9, 2, sparse_grad=True)
    net.initialize()
    refused(
        [net.weight.name, "row_sparse gradients", "sparse_grad=False", "dist_sync"],
        odsgd_kvstore.Trainer,
        net.collect_params(),
        "sgd",
        kind=NotSupportedYet,
    )


def test_controls_beside_a_store_are_refused():
    store = odsgd_kvstore.ODSGDStore(Config(warmup_steps=3))
    refused(
        ["warmup_steps, delay", "its own settings", "'dist_odsgd'"],
        trainer,
        kvstore=store,
        delay=0,
        warmup_steps=4,
        local_optimizer=None,
    )
    assert trainer(kvstore=store)._config.warmup_steps == 3


def test_optimizer_of_the_script_itself_is_refused_with_a_remedy():
    kind = type("Mine", (opt.SGD,), {"__module__": "__main__"})
    refused(
        ["Mine", "__main__", "Move the class into a module"], trainer, optimizer=kind()
    )


def test_script_with_its_own_optimizer_ends_with_the_remedy(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import odsgd_kvstore, mxnet as mx\n"
        "class Mine(mx.optimizer.SGD): pass\n"
        "net = mx.gluon.nn.Dense(2, in_units=2)\nnet.initialize()\n"
        "odsgd_kvstore.Trainer(net.collect_params(), Mine())\n"
    )
    command = [sys.executable, "-m", "odsgd_kvstore", str(script)]
    done = subprocess.run(
        command,
        cwd=str(ROOT),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "ConfigError: Mine is defined in the script itself" in done.stderr


@pytest.mark.parametrize(
    "name, args",
    [
        ("save_states", ["f"]),
        ("load_states", ["f"]),
        ("allreduce", [1.0]),
        ("sync_aux", []),
        ("join", []),
    ],
)
def test_planned_method_is_refused_by_name(name, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = trainer()
    refused(
        [f"Trainer.{name}", "not supported yet"],
        getattr(made, name),
        *args,
        kind=NotSupportedYet,
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, args, remedy",
    [("allreduce_grads", [], "clip_gradient"), ("update", [4], "Call step")],
)
def test_step_in_two_halves_is_refused_with_a_remedy(name, args, remedy):
    refused([f"{name} is not possible", remedy], getattr(trainer(), name), *args)


@pytest.mark.parametrize("batch_size", [0, -4, float("nan")])
def test_batch_size_must_be_above_0(batch_size):
    refused([f"batch_size is {batch_size!r}", "above 0"], trainer().step, batch_size)


@pytest.mark.parametrize("batch_size", ["4", None, float("inf")])
def test_batch_size_must_be_a_number(batch_size):
    refused([f"batch_size is {batch_size!r}", "above 0"], trainer().step, batch_size)


def test_stale_gradient_names_parameter_and_rank():
    net = dense()
    made = trainer(net, params={"learning_rate": 0.1})
    step(net, made)
    before = net.weight.data().asnumpy()
    with pytest.raises(UserWarning) as caught:
        made.step(4)
    assert "Rank 0" in str(caught.value) and net.weight.name in str(caught.value)
    assert "ignore_stale_grad=True" in str(caught.value)
    assert np.array_equal(net.weight.data().asnumpy(), before)


def test_learning_rate_reaches_the_servers():
    # Gradient 4/4 = 1 each step: 1 - 0.5 - 0.25 - 0.25.
    net = dense()
    made = trainer(net, params={"learning_rate": 0.5})
    step(net, made)
    made.set_learning_rate(0.25)
    step(net, made), step(net, made)
    made.synchronize()
    assert net.weight.data().asnumpy().tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_plain_trainer_refuses_another_type_before_training(dtype):
    net = dense(dtype)
    plain = gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_odsgd")
    kind = NotSupportedYet if dtype == "float16" else ConfigError
    with pytest.raises(kind, match=f"{dtype}.*allowed is float32"):
        plain.step(4)
    assert np.all(net.weight.data().asnumpy() == 1)


def test_plain_trainer_refuses_sparse_gradients_before_training():
    net = gluon.nn.Embedding(9, 2, sparse_grad=True)
    net.initialize(mx.init.One())
    plain = gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_odsgd")
    with autograd.record():
        net(nd.array([1, 3])).sum().backward()
    with pytest.raises(NotSupportedYet, match="row_sparse.*sparse_grad.*dist_sync"):
        plain.step(1)
    assert np.all(net.weight.data().asnumpy() == 1)


@pytest.mark.parametrize("way", ["argument", "variable"])
def test_plain_trainer_refuses_updates_on_workers(monkeypatch, way):
    if way == "variable":
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    settings = {"update_on_kvstore": False} if way == "argument" else {}
    net = dense()
    plain = gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_odsgd", **settings)
    with pytest.raises(ConfigError, match="on the servers.*MXNET_UPDATE_ON_KVSTORE"):
        step(net, plain)
    assert np.all(net.weight.data().asnumpy() == 1)


def test_module_refuses_updates_on_workers(monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    data = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(data, name="softmax"))
    batches = mx.io.NDArrayIter(np.ones((4, 3), np.float32), np.zeros(4), batch_size=4)
    with warnings.catch_warnings(), pytest.raises(ConfigError) as caught:
        warnings.simplefilter("ignore")  # Module's own.
        module.fit(
            batches, num_epoch=1, kvstore="dist_odsgd", initializer=mx.init.One()
        )
    assert "on the servers" in str(caught.value)
    assert "unset MXNET_UPDATE_ON_KVSTORE" in str(caught.value)
    assert np.all(module.get_params()[0]["fc_weight"].asnumpy() == 1)


def test_row_sparse_gradient_on_a_raw_store_is_used_exactly():
    store, out = mx.kv.create("dist_odsgd"), nd.zeros((3, 2))
    store.set_optimizer(opt.SGD(learning_rate=0.5))
    store.init("table", nd.ones((3, 2)))
    gradient = nd.sparse.row_sparse_array((nd.ones((1, 2)), [1]), shape=(3, 2))
    store.pushpull("table", gradient, out=out)
    assert out.asnumpy().tolist() == [[1, 1], [0.5, 0.5], [1, 1]]
    with pytest.raises(NotSupportedYet, match="t2 is row_sparse.*dense weights"):
        store.init("t2", nd.ones((3, 2)).tostype("row_sparse"))
    with pytest.raises(NotSupportedYet, match="key 'table'.*dense weights"):
        store.row_sparse_pull("table", out=out, row_ids=nd.array([1]))
