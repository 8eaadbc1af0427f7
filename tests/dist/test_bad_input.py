"""Bad input in real jobs: refused before any training, and the whole job ends."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import odsgd_kvstore
from odsgd_kvstore.config import Config
from odsgd_kvstore.errors import ConfigError, HandshakeError, MismatchError, ServerError
from odsgd_kvstore.launch import local
from odsgd_kvstore.launch.commands import STOCK_SERVER
from odsgd_kvstore.testing import run_local

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
LIMIT_S = 120
STUCK_S = 30  # For what was seen to hang; a whole good job takes 5 s.
MANY = {f"k{i}": i for i in range(60)}
FAILING = """
import mxnet as mx
class Failing(mx.optimizer.SGD):
    def update_multi_precision(self, index, weight, grad, state):
        if self.num_update == 3:
            raise ValueError("it fails at update 3")
        super().update_multi_precision(index, weight, grad, state)
"""
# Without our import MXNet makes a dist_sync store of any name with 'dist'.
FORGETFUL = """
import numpy; numpy.bool = bool  # MXNet needs it on Python 3.12
import mxnet as mx
kv = mx.kv.create("dist_odsgd")
kv.init(0, mx.nd.zeros(2))
kv.set_optimizer(mx.optimizer.SGD())
kv.push(0, mx.nd.ones(2))
kv.pull(0, out=mx.nd.zeros(2))
"""


def said(call):
    """'Kind: message' of what a call raises; 'nothing' if it raises nothing."""
    try:
        call()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_uses(mx, kv, rank):
    """Name to call: uses that must raise on both ranks and change nothing."""
    from odsgd_kvstore.kvstore import ODSGDStore

    zeros = mx.nd.zeros
    settings = {"learning_rate": 0.1, **MANY}
    return {
        "pull of unknown": lambda: kv.pull("zz", out=zeros(2)),
        "pushpull of unknown": lambda: kv.pushpull("zz", zeros(2), out=zeros(2)),
        "push of unknown": lambda: kv.push("zz", zeros(2)),
        "init twice": lambda: kv.init("w", zeros(2)),
        "float64": lambda: kv.init("d", zeros(2, dtype="float64")),
        "float16": lambda: kv.init("h", zeros(2, dtype="float16")),
        "row_sparse": lambda: kv.init("s", zeros((2, 2)).tostype("row_sparse")),
        "dist_sync": lambda: mx.kv.create("dist_sync"),
        "dist_async": lambda: mx.kv.create("dist_async"),
        "shapes": lambda: kv.init("m", zeros((3, 4 + rank))),
        "names": lambda: kv.init(f"m{rank}", zeros(2)),
        "counts": lambda: kv.init(["a", "b", "c"][: 2 + rank], [zeros(2)] * (2 + rank)),
        "warm-up": lambda: ODSGDStore(Config(warmup_steps=5 + rank)),
        "rule": lambda: ODSGDStore(Config("none" if rank else "auto")),
        "long settings": lambda: ODSGDStore(Config("sgd", settings, 5 + rank)),
        "optimizers": lambda: first_step(mx, mx.optimizer.Adam() if rank else None),
        "second optimizer": lambda: kv.set_optimizer(mx.optimizer.SGD()),
        "name of other letters": lambda: kv.init("вес" * 60, zeros(2)),
        # Last, as it gives the ranks different numbers of stores.
        "different calls": lambda: ODSGDStore() if rank else kv.init("m", zeros(2)),
    }


def first_step(mx, optimizer):
    """The first step of a new store."""
    kv = mx.kv.create("dist_odsgd")
    kv.init(0, mx.nd.zeros(2))
    kv.set_optimizer(optimizer or mx.optimizer.SGD())
    kv.pushpull(0, mx.nd.ones(2), out=mx.nd.zeros(2))


def use_wrongly():
    """Every wrong use, then two steps; what was said, and the weights."""
    import mxnet as mx

    kv = mx.kv.create("dist_odsgd")
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.25))
    kv.init("w", mx.nd.ones(2))
    heard = {name: said(call) for name, call in wrong_uses(mx, kv, kv.rank).items()}
    out = mx.nd.zeros(2)
    kv.pull("w", out=out)
    heard["weights before"] = out.asnumpy().tolist()
    for _ in range(2):
        kv.pushpull("w", mx.nd.ones(2), out=out)
    heard["weights after"] = out.asnumpy().tolist()
    return heard


@pytest.fixture(scope="module")
def heard():
    """What each rank heard in one job with every wrong use."""
    return run_local(use_wrongly, num_servers=2, timeout=LIMIT_S)


# What each message must say.
REFUSALS = {
    "pull of unknown": "ConfigError|Key 'zz'|known are: 'w'|broadcast",
    "pushpull of unknown": "ConfigError|Key 'zz'|known are: 'w'|broadcast",
    "push of unknown": "NotSupportedYet|'zz'|dense gradients|dist_sync",
    "init twice": "ConfigError|Key 'w' was initialised before|Use another key",
    "float64": "ConfigError|d is float64|allowed is float32|Cast it",
    "float16": "NotSupportedYet|h is float16|allowed is float32",
    "row_sparse": "NotSupportedYet|s is row_sparse|dense weights|dist_sync",
    "dist_sync": "ConfigError|'dist_sync'|one distributed connection|Use dist_",
    "dist_async": "ConfigError|'dist_async'|would hang|run two jobs",
    "shapes": "MismatchError|rank 0: m (3, 4)|rank 1: m (3, 5)|same shapes",
    "names": "MismatchError|rank 0: m0|rank 1: m1|same network",
    "counts": "MismatchError|b (2,); rank 1|c (2,)|same network",
    "different calls": "MismatchError|0: broadcast|1: create store|same order",
    "warm-up": "MismatchError|warmup_steps=5|warmup_steps=6|same arguments",
    "rule": "MismatchError|'auto'|'none'|same arguments|ODSGD_*",
    "long settings": "MismatchError|settings|warmup_steps=5|warmup_steps=6",
    "optimizers": "MismatchError|rank 0: SGD|rank 1: Adam|same one",
    "second optimizer": "ConfigError|an optimizer already|make a new store",
    "name of other letters": "nothing",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_use_is_refused_on_every_rank(heard, name):
    for rank, outcome in enumerate(heard):
        missing = [
            part for part in REFUSALS[name].split("|") if part not in outcome[name]
        ]
        assert not missing, f"rank {rank}: {missing} not in: {outcome[name]}"


def test_refused_uses_changed_nothing(heard):
    # 1 - 0.25 (1 + 1) at each step.
    for outcome in heard:
        assert outcome["weights before"] == [1.0, 1.0]
        assert outcome["weights after"] == [0.0, 0.0]


def refused(kind, parts, fn, timeout=LIMIT_S, **settings):
    """The job ends with `kind` and each of `parts` in its message."""
    with pytest.raises(kind) as caught:
        run_local(fn, timeout=timeout, **settings)
    assert type(caught.value) is kind, caught.value
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def altered(monkeypatch, name, argv):
    """Give one role of the next job another command."""
    plan = local.plan_local

    def planned(*args):
        roles = plan(*args)
        for i, role in enumerate(roles):
            if role.name == name:
                roles[i] = dataclasses.replace(role, argv=argv)
        return roles

    monkeypatch.setattr(local, "plan_local", planned)


def test_wrong_argument_on_one_rank_ends_the_job():
    def train():
        import mxnet as mx

        import odsgd_kvstore

        net = mx.gluon.nn.Dense(2, in_units=3)
        net.initialize()
        rank = int(os.environ["ODSGD_LOCAL_RANK"])
        odsgd_kvstore.Trainer(net.collect_params(), "sgd", delay=1 + rank)
        mx.kv.create("dist_odsgd")  # Rank 0 waits here for rank 1.

    refused(ConfigError, ["delay is 2", "allowed are 0", "1 (One-step"], train)


def test_unequal_networks_end_the_job_before_training():
    def train():
        import mxnet as mx

        rank = int(os.environ["ODSGD_LOCAL_RANK"])
        net = mx.gluon.nn.Dense(3 + rank, in_units=3, use_bias=False)
        net.initialize()
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_odsgd")
        with mx.autograd.record():
            loss = net(mx.nd.ones((4, 3))).sum()
        loss.backward()
        trainer.step(4)

    parts = [
        "rank 0: 0 (dense0_weight) (3, 3)",
        "rank 1: 0 (dense0_weight) (4, 3)",
        "with the same shapes",
    ]
    refused(MismatchError, parts, train)


def test_unequal_number_of_parameters_is_refused_at_any_number():
    def train():
        import mxnet as mx

        kv = mx.kv.create("dist_odsgd")
        number = 4 + kv.rank
        kv.init(list(range(number)), [mx.nd.zeros(2)] * number)

    refused(MismatchError, ["parameters", "rank 0", "rank 1"], train, timeout=STUCK_S)


def test_unequal_shapes_are_found_behind_long_names():
    def train():
        import mxnet as mx

        kv = mx.kv.create("dist_odsgd")
        names = [f"layer{i}_" + "x" * 130 for i in range(4)]
        arrays = [mx.nd.zeros((3, 4 + (kv.rank if i == 3 else 0))) for i in range(4)]
        kv.broadcast(names, arrays, out=arrays)
        mx.nd.waitall()

    parts = ["layer3", "(3, 4)", "(3, 5)"]
    refused(MismatchError, parts, train, timeout=STUCK_S)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "deleted"])
def test_native_store_before_ours_is_refused(kept):
    def create():
        import mxnet as mx

        store = mx.kv.create("dist_sync")
        if not kept:
            del store
        mx.kv.create("dist_odsgd")

    parts = ["'dist_odsgd'", "'dist_sync'", "would hang", "Use dist_odsgd for both"]
    refused(ConfigError, parts, create, timeout=STUCK_S)


def create_only():
    """Join the job."""
    import mxnet as mx

    mx.kv.create("dist_odsgd").init(0, mx.nd.zeros(2))


def test_stock_server_without_the_package_is_refused(monkeypatch):
    code = "import sys; sys.modules['odsgd_kvstore'] = None; " + STOCK_SERVER
    altered(monkeypatch, "server 1", (sys.executable, "-c", code))
    parts = [
        "Server 1 does not run",
        "package cannot be imported there",
        "stock MXNet server",
        "gradient sums",
        "'python -m odsgd_kvstore.server'",
        "without --stock-servers",
    ]
    refused(HandshakeError, parts, create_only, num_servers=2)


def test_script_of_dist_sync_on_our_servers_ends_naming_the_option(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FORGETFUL)
    launcher = ("-m", "odsgd_kvstore.launch", "-n1", "-s1", "--timeout", "60")
    done = subprocess.run(
        [sys.executable, *launcher, sys.executable, str(script)],
        cwd=str(ROOT),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1, done
    assert re.search(r"server 0 \(pid \d+\) failed with exit code 1", done.stderr)
    for part in (
        "without this package's seal",
        "'odsgd-launch --stock-servers'",
        "'import odsgd_kvstore'",
        "'python -m odsgd_kvstore SCRIPT'",
    ):
        assert part in done.stderr


def fail_on_the_server(folder):
    """Train with an optimizer that raises on the server; note what each rank gets."""
    import mxnet as mx
    from failing_optimizer import Failing

    import odsgd_kvstore

    kv = mx.kv.create("dist_odsgd")
    kv.set_optimizer(Failing(learning_rate=0.25))
    kv.init(0, mx.nd.ones(2))
    out = mx.nd.zeros(2)
    for _ in range(4):
        kv.pushpull(0, mx.nd.ones(2), out=out)
    try:
        odsgd_kvstore.synchronize(kv)
    except ServerError as error:
        Path(folder, str(kv.rank)).write_text(f"{out.asnumpy().tolist()} {error}")
        kv._barrier()  # Both have noted it.
        raise


def test_failing_optimizer_reaches_every_rank_and_ends_the_job(tmp_path, monkeypatch):
    (tmp_path / "failing_optimizer.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = [
        "server 0: ValueError: it fails at update 3",
        "Traceback",
        "failing_optimizer.py",
        "in update_multi_precision",
    ]
    refused(
        ServerError,
        parts,
        lambda: fail_on_the_server(str(tmp_path)),
        env={"PYTHONPATH": str(tmp_path), "ODSGD_LOCAL_OPTIMIZER": "none"},
    )
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        # 1 - 0.25 * 2 twice; nothing was updated after that.
        assert text.startswith("[0.0, 0.0] server 0: ValueError: it fails at update 3")
        assert "Traceback" in text
