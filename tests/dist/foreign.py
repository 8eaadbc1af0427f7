"""Roles that are started one by one, and what they train; for foreign launchers."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import odsgd_kvstore

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
LIMIT_S = 100
BOUND = 2**14  # The largest array is cut over two servers.
OWN = """
import os
import mxnet as mx

class Own(mx.optimizer.Optimizer):
    def create_state(self, index, weight):
        return mx.nd.zeros(weight.shape, ctx=weight.context)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state[:] = 0.5 * state + mx.nd.sign(grad)
        weight[:] = weight - self._get_lr(index) * state

class Failing(Own):
    def update(self, index, weight, grad, state):
        if os.environ["DMLC_ROLE"] == "server":  # The worker has a replica.
            raise ZeroDivisionError("on the server")
"""
RULES = {
    "sgd": {"learning_rate": 0.125, "momentum": 0.5, "wd": 0.01},
    "nag": {"learning_rate": 0.125, "momentum": 0.5},
    "adam": {"learning_rate": 0.01},
    "own": {"learning_rate": 0.01},
}
CASES = {
    **{rule: (rule, {}) for rule in ("sgd", "nag", "adam")},
    "own": ("own", {"local_optimizer": "none"}),
    "fp16": ("sgd", {"compression_params": {"type": "fp16"}}),
    "2bit": ("sgd", {"compression_params": {"type": "2bit", "threshold": 0.5}}),
}
SHAPES = [(3, 4), (5,), (70, 100), (150, 200)]  # a pack of two, whole, two slices


def train():
    """W and L in the end, by case; warm-up, delay, and a change of the rate."""
    import mxnet as mx

    return {
        f"{case} {kind} {i}": array
        for case in CASES
        for kind, arrays in train_case(mx, case).items()
        for i, array in enumerate(arrays)
    }


def train_case(mx, case):
    name, settings = CASES[case]
    params = [mx.gluon.Parameter(f"p{i}", shape=s) for i, s in enumerate(SHAPES)]
    for param in params:
        param.initialize(mx.init.One())
    if name == "own":
        import own_optimizer

        optimizer, rule = own_optimizer.Own(**RULES[name]), None
    else:
        optimizer, rule = name, RULES[name]
    trainer = odsgd_kvstore.Trainer(params, optimizer, rule, warmup_steps=2, **settings)
    data = np.random.RandomState(mx.kv.create("dist_odsgd").rank)
    for step in range(6):
        if step == 4:
            trainer.set_learning_rate(RULES[name]["learning_rate"] / 2)
        with mx.autograd.record():
            parts = [p.data() * mx.nd.array(data.randn(*p.shape)) for p in params]
            loss = sum(part.sum() for part in parts)
        loss.backward()
        trainer.step(2)
    local = [param.data().asnumpy() for param in params]
    with trainer.global_weights():
        return {"W": [param.data().asnumpy() for param in params], "L": local}


class Role:
    """A process, and the lines that it has printed so far."""

    def __init__(self, kind, argv, env):
        self.kind, self.lines = kind, []
        self.changed = threading.Condition()
        base = {k: v for k, v in os.environ.items() if not k.startswith("DMLC_")}
        self.popen = subprocess.Popen(
            [sys.executable, *argv], env={**base, "DMLC_ROLE": kind, **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        with self.popen.stdout as pipe:
            for line in pipe:
                with self.changed:
                    self.lines.append(line)
                    self.changed.notify()
        with self.changed:
            self.lines.append("")
            self.changed.notify()

    @property
    def text(self):
        return "".join(self.lines)

    def wait_for(self, text):
        """Wait until it has printed `text`."""
        with self.changed:
            ended = self.changed.wait_for(
                lambda: text in self.text or "" in self.lines, LIMIT_S
            )
        assert ended and text in self.text, f"{self.kind}: {self.text}"

    def wait_until_it_listens(self):
        """Wait until ps-lite has bound a port: then it waits for the others."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self.popen.poll() is None:
            if listening(self.popen.pid):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.1)  # Not a busy loop beside its import.
        pytest.fail(f"the {self.kind} does not listen: {self.text}")

    def end(self):
        """Wait for the end; the exit code."""
        try:
            return self.popen.wait(LIMIT_S)
        finally:
            self.popen.kill()
            self.reader.join()


def listening(pid):
    """Inodes of the TCP sockets on which a process listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    found = set()
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            found.add(os.readlink(path))
        except OSError:  # closed meanwhile
            continue
    return inodes & found


@contextlib.contextmanager
def starting(folder):
    """A function that makes jobs' starters; in the end every role has ended."""
    started = []

    def job(num_workers=1, num_servers=1, **settings):
        path = [str(ROOT), str(folder), str(Path(__file__).parent)]
        common = {
            "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": free_port(),
            "DMLC_NUM_WORKER": str(num_workers), "DMLC_NUM_SERVER": str(num_servers),
            "MXNET_KVSTORE_BIGARRAY_BOUND": str(BOUND), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path), "ODSGD_KEY": "do-not-show",
        }  # fmt: skip

        def start(kind, *argv, **env):
            argv = [str(folder / word) if word in known else word for word in argv]
            started.append(Role(kind, argv, {**common, **settings, **env}))
            return started[-1]

        return start

    known = {path.name for path in folder.iterdir()}
    try:
        yield job
    finally:
        for role in started:
            role.popen.kill()
            role.end()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
