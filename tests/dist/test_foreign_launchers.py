"""Roles that somebody else starts, one by one, with nothing but DMLC_* set."""

import os
import re
import socket
import sys

import numpy as np
import pytest
from foreign import BOUND, CASES, LIMIT_S, OWN, starting, train

from odsgd_kvstore.testing import run_local

# How a user's script begins; only a worker comes past the imports.
ALL_ROLES = """
import os, sys
print("starting", os.environ["DMLC_ROLE"], flush=True)
import {first}
import {second}
import mxnet as mx
"""
TRAIN = """
import numpy as np
import foreign
rank = mx.kv.create("dist_odsgd").rank
np.savez(os.path.join(sys.argv[1], str(rank)), **foreign.train())
print("trained", flush=True)
"""
STEP = """
import own_optimizer
kv = mx.kv.create("dist_odsgd")
print("joined", flush=True)
kv.set_optimizer(own_optimizer.Failing() if "fail" in sys.argv else mx.optimizer.SGD())
kv.init(0, mx.nd.ones(2))
for _ in range(3):
    kv.pushpull(0, mx.nd.ones(2), out=mx.nd.ones(2))
    odsgd_kvstore.synchronize(kv)
if "forge" in sys.argv:
    text = "cos\\nmkdir\\n(V" + sys.argv[-1] + "\\ntR."
    kv._connection._native._send_command_to_servers(0, text)
"""
PLAIN = """
import os
print("starting", os.environ["DMLC_ROLE"], flush=True)
import numpy; numpy.bool = bool  # MXNet needs it on Python 3.12
import mxnet as mx
kv = mx.kv.create("dist_sync")
kv.init(0, mx.nd.ones(2))
kv._barrier()
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.125, momentum=0.5))
kv._barrier()
out = mx.nd.zeros(2)
for _ in range(2):
    kv.push(0, mx.nd.full(2, kv.rank + 1))
    kv.pull(0, out=out)
    seen = out.asnumpy().tolist()
print("weights", seen, flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "own_optimizer.py").write_text(OWN)
    alias = "numpy; numpy.bool = bool; "  # MXNet needs it on Python 3.12
    firsts = {"ours": "odsgd_kvstore", "mxnet": alias + "import mxnet"}
    for name, first in firsts.items():
        start = ALL_ROLES.format(first=first, second="odsgd_kvstore")
        (folder / f"train_{name}.py").write_text(start + TRAIN)
        (folder / f"step_{name}.py").write_text(start + STEP)
    (folder / "plain.py").write_text(PLAIN)
    return folder


@pytest.fixture
def starter(folder):
    with starting(folder) as job:
        yield job


# Whole jobs


def train_in_order(start, folder, out, argv, order):
    """Start the roles in an order: a group when those before it are waiting."""
    (folder / out).mkdir()
    roles = []
    for group in order:
        new = [start(kind, *argv, str(folder / out)) for kind in group]
        roles += new
        for role in new if group is not order[-1] else ():
            role.wait_for("starting") if "-m" not in argv else None
            role.wait_until_it_listens()
    codes = [role.end() for role in roles]
    text = "\n".join(f"{role.kind}: {role.text}" for role in roles)
    assert codes == [0] * 5, text
    return [dict(np.load(folder / out / f"{rank}.npz")) for rank in range(2)], text


@pytest.fixture(scope="module")
def launched(folder):
    """The same training by the launcher with its own servers."""
    env = {"MXNET_KVSTORE_BIGARRAY_BOUND": str(BOUND), "PYTHONPATH": str(folder)}
    path = str(folder)

    def run():
        sys.path.insert(0, path)
        return train()

    return run_local(run, 2, 2, timeout=LIMIT_S, env=env)


WORKERS, SERVERS, SCHEDULER = ["worker"] * 2, ["server"] * 2, ["scheduler"]
JOBS = {
    # script, order in which the roles start, further variables
    "ours first": (
        ("train_ours.py",),
        [WORKERS, SERVERS, SCHEDULER],
        {"DMLC_PS_ROOT_URI": "localhost"},
    ),
    "mxnet first": (("train_mxnet.py",), [SCHEDULER, WORKERS, SERVERS], {}),
    "module": (
        ("-m", "odsgd_kvstore", "train_mxnet.py"),
        [SERVERS, [*SCHEDULER, "worker"], ["worker"]],
        {"DMLC_PS_ROOT_URI": "localhost", "DMLC_USE_KUBERNETES": "1"},
    ),
}


@pytest.fixture(scope="module", params=JOBS)
def foreign(request, folder):
    argv, order, env = JOBS[request.param]
    out = request.param.replace(" ", "-")
    with starting(folder) as job:
        start = job(2, 2, **env)
        return request.param, *train_in_order(start, folder, out, argv, order)


def test_weights_are_those_of_the_launcher_s_servers(foreign, launched):
    _, ranks, _ = foreign
    for mine, theirs in zip(ranks, launched):
        assert mine.keys() == theirs.keys() and len(mine) == len(CASES) * 2 * 4
        for name, array in mine.items():
            np.testing.assert_array_equal(array, theirs[name], err_msg=name)
            assert np.isfinite(array).all() and not (array == 1).all()


def test_stock_servers_are_told_of_once(foreign):
    name, _, text = foreign
    said = text.count("anyone who reaches its port can run code")
    assert said == (1 if name == "mxnet first" else 0), text
    assert "do-not-show" not in text


def test_script_of_mxnet_alone_trains_as_ever(starter):
    start = starter(2, 1)
    roles = [start(kind, "plain.py") for kind in ("scheduler", "server", *WORKERS)]
    assert [role.end() for role in roles] == [0] * 4
    # m = -1/8 * 3; w = 1 + m; then m = m / 2 - 3/8, w += m
    assert [role.text for role in roles[2:]] == [
        "starting worker\nweights [0.0625, 0.0625]\n"
    ] * 2


# What goes wrong on a stock server


def one_of_each(start, script, *words, **env):
    """Start a job of one worker; its roles by kind."""
    return {
        kind: start(kind, script, *words, **env)
        for kind in ("scheduler", "server", "worker")
    }


def says(role, *parts):
    """The role fails, with each of `parts` in what it prints."""
    code = role.end()
    missing = [part for part in parts if part not in role.text]
    assert code == 1 and not missing, f"exit {code}, {missing} not in: {role.text}"
    assert "do-not-show" not in role.text


def test_exception_on_a_stock_server_reaches_the_worker(starter):
    roles = one_of_each(starter(), "step_mxnet.py", "fail")
    failed = ["ServerError", "server 0: ZeroDivisionError: on the server", "own_optim"]
    says(roles["worker"], *failed)


def test_stock_server_is_an_error_where_own_ones_are_required(starter):
    start = starter(ODSGD_REQUIRE_OWN_SERVER="1")
    worker = one_of_each(start, "step_mxnet.py")["worker"]
    parts = "Server 0: MXNet's own", "anyone who reaches", "'import odsgd_kvstore'"
    says(worker, "HandshakeError: ODSGD_REQUIRE_OWN_SERVER is set", *parts)


def test_wrong_key_ends_a_stock_server(starter):
    start = starter()
    start("scheduler", "step_mxnet.py")
    start("worker", "step_mxnet.py")
    server = start("server", "step_mxnet.py", ODSGD_KEY="do-not-show-either")
    says(server, "obeys only its sealed commands", "wrong seal", "another ODSGD_KEY")


def test_foreign_pickle_ends_a_stock_server_unopened(starter, tmp_path):
    mark = str(tmp_path / "opened")
    roles = one_of_each(starter(), "step_mxnet.py", "forge", mark)
    roles["worker"].wait_for("joined")
    says(roles["server"], "a command without this package's seal arrived")
    assert not os.path.exists(mark)


# Addresses and ports


def test_taken_port_ends_the_scheduler_and_names_the_holder(starter):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        env = {"DMLC_PS_ROOT_PORT": port, "DMLC_PS_ROOT_URI": "localhost"}
        scheduler = starter()("scheduler", "-m", "odsgd_kvstore", "plain.py", **env)
        holder_text = rf"is held by pid {os.getpid()} \("
        says(scheduler, f"127.0.0.1 port {port} (DMLC_PS_ROOT_PORT)", "Address already")
        assert re.search(holder_text, scheduler.text)


@pytest.mark.parametrize(
    "kind, variable, value, parts",
    [
        ("scheduler", "DMLC_PS_ROOT_URI", "192.0.2.77", "DMLC_USE_KUBERNETES=1"),
        ("server", "DMLC_NODE_HOST", "192.0.2.77", "no address of this machine"),
    ],
)
def test_wrong_address_ends_a_role_with_its_name(starter, kind, variable, value, parts):
    role = starter()(kind, "step_ours.py", **{variable: value})
    says(role, "ConfigError: " + variable, value, parts)
