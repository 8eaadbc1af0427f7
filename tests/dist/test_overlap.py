"""`step` returns while the network is busy, and leaves the gradient's buffer alone.

The servers run an optimizer whose first update waits until every worker has opened
its gate, a file. So W(1) cannot exist before a worker, back from `step`, has made
its next forward and backward pass, read the weights and opened the gate. Nothing
here depends on seconds: a `step` that waits would hang, and the job's limit end it.
"""

import os
import pathlib
import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
GATED = '''
import os
import time

from mxnet import optimizer as opt


def note(folder, event):
    with open(os.path.join(folder, "events"), "ab", buffering=0) as file:
        file.write(event.encode() + b"\\n")


class Gated(opt.SGD):
    """SGD whose first update on a server waits until all gates are open."""

    def __init__(self, folder, gates, **kwargs):
        super().__init__(**kwargs)
        self.folder, self.gates, self.waited = folder, gates, False

    def update_multi_precision(self, *args):
        if os.environ.get("DMLC_ROLE") == "server" and not self.waited:
            note(self.folder, "server waits")
            deadline = time.monotonic() + 100
            paths = [os.path.join(self.folder, gate) for gate in self.gates]
            while not all(map(os.path.exists, paths)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not all of {paths} came")
                time.sleep(0.005)  # between two looks, not a synchronisation
            self.waited = True
            note(self.folder, "server updates")
        super().update_multi_precision(*args)
'''
SHAPES = [(3,), (5, 4)]


def make_params(shapes=SHAPES, value=1.0, **kwargs):
    params = [gluon.Parameter(f"p{i}", shape=s, **kwargs) for i, s in enumerate(shapes)]
    for param in params:
        param.initialize(mx.init.Constant(value))
    return params


def backward(params, gradient):
    with autograd.record():
        outputs = [param.data() * gradient for param in params]
    autograd.backward(outputs)


def first_of(params):
    """The one value that all elements have, as every test here makes it."""
    values = np.concatenate([p.data().asnumpy().ravel() for p in params])
    assert (values == values[0]).all()
    return float(values[0])


def gated_run(folder, patience_s, **controls):
    """Step while the server waits; read in a thread; open the gate; synchronize.

    Returns the value read, whether it was read before this rank opened its gate,
    and W(1) to W(3).
    """
    import gated  # only the roles of the job have it

    os.makedirs(folder, exist_ok=True)
    params, rank = make_params(), int(os.environ["ODSGD_LOCAL_RANK"])
    sgd = gated.Gated(folder, ["gate0", "gate1"], learning_rate=0.5)
    trainer = odsgd_kvstore.Trainer(params, sgd, local_optimizer="sgd", **controls)
    backward(params, 0.25 * (rank + 1))
    trainer.step(1)
    gated.note(folder, f"rank {rank} is back")
    backward(params, 0.25 * (rank + 1))  # the pass of the next step, on L(1)
    read = []
    reader = threading.Thread(target=lambda: read.append(first_of(params)))
    reader.start()
    reader.join(patience_s)
    early = bool(read)
    gated.note(folder, f"rank {rank} opens")
    pathlib.Path(folder, f"gate{rank}").touch()
    reader.join()
    weights = []
    for _ in range(3):
        with trainer.global_weights():
            weights.append(first_of(params))
        trainer.step(1)
        backward(params, 0.25 * (rank + 1))
    return {"read": read[0], "early": early, "global": weights}


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """Ranks' results and the events' order, by kind of run."""
    folder = tmp_path_factory.mktemp("gated")
    (folder / "gated.py").write_text(GATED)
    folders = {kind: str(folder / kind) for kind in ("delay 1", "delay 0", "warm-up")}

    def run():
        # A reader that cannot come is given up after 2 s, one that can has 100.
        return {
            "delay 1": gated_run(folders["delay 1"], 100, warmup_steps=0),
            "delay 0": gated_run(folders["delay 0"], 2, warmup_steps=0, delay=0),
            "warm-up": gated_run(folders["warm-up"], 2, warmup_steps=5),
        }

    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))  # the workers get this process's path
        ranks = run_local(run, 2, 1, timeout=LIMIT_S, env={"PYTHONPATH": path})
    events = {
        kind: pathlib.Path(place, "events").read_text().splitlines()
        for kind, place in folders.items()
    }
    return ranks, events


def test_step_returns_and_weights_can_be_read_while_the_server_is_busy(gated):
    ranks, events = gated
    for rank, result in enumerate(ranks):
        assert result["delay 1"]["early"]
        # L(1) = W(0) - lr N g = 1 - 0.5 * 2 * 0.25 (rank + 1)
        assert result["delay 1"]["read"] == 1 - 0.25 * (rank + 1)
    order = events["delay 1"]
    for rank in (0, 1):
        back, opens = f"rank {rank} is back", f"rank {rank} opens"
        assert order.index(back) < order.index(opens) < order.index("server updates")


@pytest.mark.parametrize("kind", ["delay 0", "warm-up"])
def test_without_the_delay_reading_waits_for_the_server(gated, kind):
    ranks, events = gated
    for rank, result in enumerate(ranks):
        assert not result[kind]["early"]
        assert result[kind]["read"] == 1 - 0.375  # W(1)
        opens = events[kind].index(f"rank {rank} opens")
        assert opens < events[kind].index("server updates")


@pytest.mark.parametrize("kind", ["delay 1", "delay 0", "warm-up"])
def test_what_was_pushed_meanwhile_counts_once(gated, kind):
    # W(k) = 1 - k 0.5 (0.25 + 0.5)
    for result in gated[0]:
        assert result[kind]["global"] == [1 - 0.375 * k for k in (1, 2, 3)]


def gradients_after_step(make_trainer):
    """The gradient before `step`, and once all of its work is done."""
    params = make_params()
    trainer = make_trainer(params)
    before_after = []
    for step in range(4):
        backward(params, 2.0 + step)
        before = [p.grad().asnumpy() for p in params]
        trainer.step(4)
        mx.nd.waitall()
        before_after.append((before, [p.grad().asnumpy() for p in params]))
    return before_after


def ours(params, warmup_steps):
    sgd = {"learning_rate": 0.25, "momentum": 0.5}
    return odsgd_kvstore.Trainer(params, "sgd", sgd, warmup_steps=warmup_steps)


def plain(kvstore):
    sgd = {"learning_rate": 0.25, "momentum": 0.5}
    return lambda params: gluon.Trainer(params, "sgd", sgd, kvstore=kvstore)


def trained(zero, warmup_steps, steps=12):
    """W and L after every step, with or without zeroing gradients at once."""
    params = make_params()
    trainer = ours(params, warmup_steps)
    seen = []
    for step in range(steps):
        rank = int(os.environ["ODSGD_LOCAL_RANK"])
        noise = np.random.RandomState(1000 * rank + step)
        with autograd.record():
            losses = [
                ((p.data() - mx.nd.array(noise.randn(*p.shape))) ** 2).sum()
                for p in params
            ]
        autograd.backward(losses)
        trainer.step(2)
        for param in params if zero else ():
            param.zero_grad()
        seen.append([p.data().asnumpy() for p in params])
        with trainer.global_weights():
            seen.append([p.data().asnumpy() for p in params])
    return seen


def accumulated(zero, warmup_steps, steps=6):
    """W of grad_req 'add', two passes to a step, with or without zeroing."""
    params = make_params(grad_req="add")
    sgd = {"learning_rate": 0.125}
    trainer = odsgd_kvstore.Trainer(params, "sgd", sgd, warmup_steps=warmup_steps)
    weights = []
    for _ in range(steps):
        backward(params, 0.25)
        backward(params, 0.5)
        trainer.step(1)
        for param in params if zero else ():
            param.zero_grad()
        with trainer.global_weights():
            weights.append(first_of(params))
    return weights


@pytest.fixture(scope="module")
def buffers():
    def run():
        return {
            "kept": [
                gradients_after_step(lambda params: ours(params, 2)),
                gradients_after_step(plain("dist_odsgd")),
            ],
            "trained": [[trained(z, w) for z in (False, True)] for w in (0, 4)],
            "added": [[accumulated(z, w) for w in (0, 3)] for z in (False, True)],
        }

    env = {"ODSGD_WARMUP_STEPS": "2"}
    return run_local(run, 2, 1, timeout=LIMIT_S, env=env)


def test_the_gradients_buffer_is_intact_after_step(buffers):
    for rank in buffers:
        for run in rank["kept"]:
            for step, (before, after) in enumerate(run):
                for b, a in zip(before, after):
                    assert (b == 2.0 + step).all()
                    np.testing.assert_array_equal(b, a)


def test_stock_dist_sync_overwrites_the_gradients_buffer():
    def run():
        return gradients_after_step(plain("dist_sync"))

    for rank in run_local(run, 2, 1, timeout=LIMIT_S, stock_servers=True):
        before, after = rank[0]
        # In its place is W(1) = 1 - 0.25 / 4 * (2 + 2).
        assert all((a == 0.75).all() for a in after) and (before[0] == 2).all()


def test_zeroing_gradients_right_after_step_changes_no_weight(buffers):
    for rank in buffers:
        for kept, zeroed in rank["trained"]:
            np.testing.assert_equal(zeroed, kept)
            assert not np.array_equal(kept[0][0], kept[-1][0])


def test_accumulated_gradients_count_as_the_sum_of_their_passes(buffers):
    for rank in buffers:
        kept, zeroed = rank["added"]
        # N lr (0.25 + 0.5) = 0.1875 a step; not zeroed, step k pushes k times that.
        assert zeroed == [[1 - 0.1875 * k for k in range(1, 7)]] * 2
        assert kept == [[1 - 0.1875 * k * (k + 1) / 2 for k in range(1, 7)]] * 2
