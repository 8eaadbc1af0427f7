"""Commands to real servers: what is refused, and from which step on they hold."""

import dataclasses
import os

import numpy as np
import pytest

from odsgd_kvstore.errors import ConfigError, JobError
from odsgd_kvstore.launch import local
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
OWN = "import mxnet as mx\nclass Own(mx.optimizer.SGD):\n    pass\n"


def refused(parts, fn, **settings):
    """A server ends the job with each of `parts` in the message."""
    with pytest.raises(JobError) as caught:
        run_local(fn, timeout=LIMIT_S, **settings)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def begun(mx, name="dist_odsgd"):
    """A store after its first step, and its connection."""
    kv = mx.kv.create(name)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    kv.init(0, mx.nd.ones(2))
    kv.pushpull(0, mx.nd.ones(2), out=mx.nd.ones(2))
    mx.nd.waitall()
    return kv, kv._connection


def create_only():
    """Join the job."""
    import mxnet as mx

    mx.kv.create("dist_odsgd").init(0, mx.nd.zeros(2))


def wait_for_the_end(mx, kv):
    """Wait for an answer that does not come: the job is ended meanwhile."""
    kv.pushpull(0, mx.nd.ones(2), out=mx.nd.ones(2))
    mx.nd.waitall()
    kv._barrier()


def test_replayed_command_is_refused():
    def replay():
        import mxnet as mx

        kv, connection = begun(mx)
        seal, sent = connection._sealer.seal, []
        connection._sealer.seal = lambda *args: sent.append(seal(*args)) or sent[-1]
        kv._optimizer.lr = 0.25
        kv.pushpull(0, mx.nd.ones(2), out=mx.nd.ones(2))
        mx.nd.waitall()
        if kv.rank == 0:
            assert len(sent) == 1  # It was obeyed once; now once more.
            connection._native._send_command_to_servers(0, sent[0])
        wait_for_the_end(mx, kv)

    refused(["server 0", "of rank 0 arrived a second time", "sealed commands"], replay)


def test_foreign_pickle_is_refused_and_not_opened(tmp_path):
    mark = str(tmp_path / "opened")

    def forge():
        import mxnet as mx

        kv, connection = begun(mx)
        if kv.rank == 1:
            text = f"cos\nmkdir\n(V{mark}\ntR."
            connection._native._send_command_to_servers(0, text)
        wait_for_the_end(mx, kv)

    parts = ["without this package's seal", "'odsgd-launch --stock-servers'"]
    refused(parts, forge, num_servers=2)
    assert not os.path.exists(mark)


def test_command_sealed_with_a_guessed_key_is_refused():
    def forge():
        import mxnet as mx

        from odsgd_kvstore.commands import Sealer

        kv, connection = begun(mx)
        if kv.rank == 1:
            sealer = Sealer(b"guessed", os.environ["ODSGD_JOB"], 0)
            sealer._number = 1000
            body = {"op": "assign", "keys": [0]}
            text = sealer.seal(body, connection._nonces)
            connection._native._send_command_to_servers(0, text)
        wait_for_the_end(mx, kv)

    refused(["server 0", "wrong seal", "another ODSGD_KEY"], forge)


def test_wrong_key_on_one_server_ends_the_job(monkeypatch):
    plan = local.plan_local

    def with_another_key(*args):
        return [
            dataclasses.replace(role, env={**role.env, "ODSGD_KEY": "do-not-show"})
            if role.name == "server 1"
            else role
            for role in plan(*args)
        ]

    monkeypatch.setattr(local, "plan_local", with_another_key)
    parts = ["server 1", "wrong seal", "another ODSGD_KEY"]
    refused(parts, create_only, num_servers=2)


def test_key_file_that_others_may_read_ends_the_job(tmp_path):
    path = tmp_path / "key"
    path.write_text("do-not-show")
    path.chmod(0o644)
    with pytest.raises((ConfigError, JobError)) as caught:
        run_local(create_only, timeout=LIMIT_S, env={"ODSGD_KEY_FILE": str(path)})
    assert f"chmod 600 {path}" in str(caught.value)
    assert "do-not-show" not in str(caught.value)


def test_without_a_key_only_mxnet_s_own_optimizers_are_obeyed(tmp_path, monkeypatch):
    (tmp_path / "own_optimizer.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = local.plan_local

    def without_key(*args):
        return [
            dataclasses.replace(
                role, env={k: v for k, v in role.env.items() if k != "ODSGD_KEY"}
            )
            for role in plan(*args)
        ]

    def train():
        import mxnet as mx
        from own_optimizer import Own

        import odsgd_kvstore

        kv, _ = begun(mx)  # MXNet's own trains.
        out = mx.nd.zeros(2)
        kv.pull(0, out=out)
        weights = out.asnumpy().tolist()
        second = mx.kv.create("dist_odsgd")
        second.set_optimizer(Own())
        second.init(0, mx.nd.ones(2))
        try:
            second.pushpull(0, mx.nd.ones(2), out=out)
            odsgd_kvstore.synchronize(second)
        except odsgd_kvstore.errors.ServerError as error:
            return weights, str(error)
        return weights, ""

    monkeypatch.setattr(local, "plan_local", without_key)
    env = {"PYTHONPATH": str(tmp_path)}
    weights, text = run_local(train, 1, timeout=LIMIT_S, env=env)[0]
    assert weights == [0.5, 0.5]
    assert "not MXNet's own" in text and "ODSGD_KEY" in text and "odsgd-launch" in text


def test_own_optimizer_is_obeyed_under_a_key_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "own_optimizer.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    key = tmp_path / "key"
    key.write_text("a secret of the user's\n")
    key.chmod(0o600)

    def train():
        import mxnet as mx
        from own_optimizer import Own

        assert "ODSGD_KEY" not in os.environ
        kv = mx.kv.create("dist_odsgd")
        kv.set_optimizer(Own(learning_rate=0.25))
        kv.init(0, mx.nd.ones(2))
        out = mx.nd.zeros(2)
        kv.pushpull(0, mx.nd.ones(2), out=out)
        return out.asnumpy().tolist()

    env = {"PYTHONPATH": str(tmp_path), "ODSGD_KEY_FILE": str(key)}
    # 1 - 0.25 * 2
    assert run_local(train, timeout=LIMIT_S, env=env) == [[0.5, 0.5]] * 2


def change_hyper_parameters():
    """W of three keys at each of 8 synchronous steps, with changes on the way."""
    import mxnet as mx

    kv = mx.kv.create("dist_odsgd")
    optimizer = mx.optimizer.SGD(learning_rate=0.5, momentum=0.5, wd=0.0)
    kv.set_optimizer(optimizer)
    keys = [0, 1, 2]
    kv.init(keys, [mx.nd.ones(2)] * 3)
    seen = []
    for step in range(1, 9):
        if step == 3:
            optimizer.lr = 0.25
        if step == 4:
            optimizer.set_lr_mult({1: 0.5})
        if step == 5:
            optimizer.momentum = 0.25
        if step == 6:
            optimizer.wd = 0.125
        if step == 7 and kv.rank == 1:
            optimizer.lr = 8.0  # The servers keep to rank 0's.
        if step == 8:
            optimizer.lr_scheduler = mx.lr_scheduler.FactorScheduler(99, base_lr=0.125)
        outs = [mx.nd.zeros(2) for _ in keys]
        if kv.rank == 1:  # Behind rank 0 on purpose: it has pushed all by now.
            mx.nd.waitall()
        for key in keys if kv.rank == 0 else reversed(keys):
            kv.pushpull(key, mx.nd.full(2, 0.25), out=outs[key])
        seen.append([float(out.asnumpy()[0]) for out in outs])
    return seen


def expected():
    """The same by hand: m = mu m - lr (sum of g + wd W); W += m."""
    weights, momenta, rows = np.ones(3), np.zeros(3), []
    for step in range(1, 9):
        lr = 0.5 if step < 3 else 0.25 if step < 8 else 0.125
        mult = np.array([1, 0.5 if step >= 4 else 1, 1])
        mu, wd = (0.5 if step < 5 else 0.25), (0.0 if step < 6 else 0.125)
        momenta = mu * momenta - lr * mult * (0.5 + wd * weights)
        weights = weights + momenta
        rows.append(weights)
    return np.array(rows)


def test_changes_hold_from_their_step_on_every_server():
    first, second = run_local(change_hyper_parameters, num_servers=2, timeout=LIMIT_S)
    assert first == second
    assert np.abs(np.array(first) - expected()).max() < 2e-6


def test_two_stores_have_optimizers_and_changes_of_their_own():
    def train():
        import mxnet as mx

        stores = []
        for lr in (0.5, 0.125):
            kv = mx.kv.create("dist_odsgd")
            kv.set_optimizer(mx.optimizer.SGD(learning_rate=lr))
            kv.init("w", mx.nd.ones(2))
            stores.append(kv)
        out, seen = mx.nd.zeros(2), []
        for step in range(3):
            if step == 2:
                stores[1]._optimizer.lr = 0.25
            for kv in stores:
                kv.pushpull("w", mx.nd.full(2, 0.5), out=out)
                seen.append(float(out.asnumpy()[0]))
        return seen

    # The sum of the gradients is 1.
    wanted = [0.5, 0.875, 0.0, 0.75, -0.5, 0.5]
    assert run_local(train, num_servers=2, timeout=LIMIT_S) == [wanted] * 2
