"""Hyper-parameters that change while a job runs, and ranks that fall behind.

Gradients, rates and decays are dyadic, so that every weight here is exact.
"""

import contextlib
import itertools
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import linear
import mxnet as mx
import numpy as np
import pytest
from linear import WORKERS, backward, gradient, make_params, total, values

import odsgd_kvstore
from odsgd_kvstore import native
from odsgd_kvstore.config import Config
from odsgd_kvstore.errors import ConfigError, JobError
from odsgd_kvstore.testing import run_local

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
LIMIT_S = 120
STEPS = 30
# Trainings without a look at an array before the end, and seconds by which each step
# takes longer on rank 1, so that rank 0 is ahead.
SLOWED = {"rate": 0.1, "lr_mult": 0.03, "decay": 0.03}
SLOWED.update({"paused": 0.1, "paused, rate": 0.03, "paused, schedule": 0.03})


def change(name, trainer, params, step):
    """What the user changes before a step."""
    if "rate" in name:
        trainer.set_learning_rate(2.0 ** -(step % 12))
    for which, param in enumerate(params if name == "lr_mult" else ()):
        param.lr_mult = 2.0 ** -(step % (3 + which))
    if name == "decay":
        trainer._optimizer.wd = float(step % 2)


def rule(name, step, which):
    """(rate, decay) that must hold for a parameter; None where it is not used."""
    if "paused" in name and which and step % 2:
        return None
    halvings = {"rate": step % 12, "lr_mult": 1 + step % (3 + which)}
    halvings["schedule"] = 1 + step // 3  # FactorScheduler(3, 0.5) from 0.5
    rate = 2.0 ** -halvings.get(name.split(", ")[-1], 1)
    return rate, float(name == "decay" and step % 2)


def closed_form(name, which):
    """W, and the ranks' L, of a parameter after the last step."""
    weight, local = np.ones(linear.SHAPE), []
    for step in range(STEPS):
        if rule(name, step, which) is None:
            local = [weight] * WORKERS
            continue
        rate, decay = rule(name, step, which)
        own = [WORKERS * gradient(step, rank, which) for rank in range(WORKERS)]
        local = [weight - rate * (g + decay * weight) for g in own]
        weight = weight - rate * (total(step, which) + decay * weight)
    return weight, local


def train_slowed(name):
    """L and W after the last step; nothing is waited for before."""
    params, sgd = make_params(), {"learning_rate": 0.5}
    if name == "paused, schedule":
        sgd["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.5)
    trainer = odsgd_kvstore.Trainer(params, "sgd", sgd, warmup_steps=0)
    for step in range(STEPS):
        if linear.rank() == 1:
            time.sleep(SLOWED[name])  # its forward and backward pass
        change(name, trainer, params, step)
        backward(params, step, only=None if rule(name, step, 1) else 0)
        trainer.step(1, ignore_stale_grad=True)
    local = values(params)
    trainer.synchronize()
    return {"local": local, "global": values(params)}


@pytest.fixture(scope="module")
def slowed():
    def run():
        return {name: train_slowed(name) for name in SLOWED}

    return run_local(run, WORKERS, 2, timeout=LIMIT_S)


def of(ranks, name):
    """What each rank saw in a case."""
    return [seen[name] for seen in ranks]


@pytest.mark.parametrize("name", SLOWED)
def test_each_step_has_its_own_values_however_far_a_rank_is_behind(slowed, name):
    for which in range(2):
        want, local = closed_form(name, which)
        for rank, result in enumerate(of(slowed, name)):
            np.testing.assert_array_equal(result["global"][which], want)
            np.testing.assert_array_equal(result["local"][which], local[rank])


@contextlib.contextmanager
def logged(then=lambda lines: None):
    """What the package logs inside, as a list that grows; `then` is told of it."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: (lines.append(record.getMessage()), then(lines))
    logger = logging.getLogger("odsgd_kvstore")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def raw_store(optimizer, keys):
    """A function that pushes 1 from rank 0, 2 from rank 1; all weights start at 1."""
    store = odsgd_kvstore.ODSGDStore(Config(warmup_steps=0))
    store.set_optimizer(optimizer)
    weights = {key: mx.nd.ones(1) for key in keys}
    store.broadcast(keys, [mx.nd.ones(1) for _ in keys], list(weights.values()))

    def push(*pushed):
        """(L, W) of the keys that are pushed, one after the other."""
        whole = {key: mx.nd.zeros(1) for key in pushed}
        for key in pushed:
            store.pushpull(key, mx.nd.ones(1) * (linear.rank() + 1), out=weights[key])
        store.pull(list(whole), out=list(whole.values()))
        return [(weights[key].asscalar(), whole[key].asscalar()) for key in pushed]

    return push


def change_multipliers(keys):
    """(L, W) of both keys, by step; the optimizer's multipliers change on the way."""
    names = {0: "a_weight", 1: "b_weight"}
    sgd = mx.optimizer.SGD(learning_rate=0.5, wd=0.5, param_idx2name=names)
    push = raw_store(sgd, keys)
    seen = [push(*keys)]
    sgd.set_lr_mult({"b_weight": 0.25})
    seen.append(push(*keys))
    sgd.set_wd_mult({"a_weight": 0.0, "b_weight": 4.0})
    seen.append(push(*keys))
    sgd.set_lr_mult({"a_weight": 2.0})  # in place of all others
    return [*seen, push(*keys)]


def push_in_parts():
    """(L, W) by push, the last two at a rate of 16."""
    sgd = mx.optimizer.SGD(learning_rate=1.0)
    push = raw_store(sgd, [0, 1])
    seen = [push(0, 1), push(0)]
    sgd.lr = 16.0
    return [*seen, push(1), push(0)]


def differ_and_nest():
    """Two steps; rank 1 has other rates, and contexts are nested between the steps."""
    params, sgd = make_params(), {"learning_rate": 0.125 if linear.rank() else 0.5}
    trainer = odsgd_kvstore.Trainer(params, "sgd", sgd, warmup_steps=0)
    backward(params, 0)
    with logged() as lines:
        trainer.step(1)
    with trainer.global_weights():
        first = values(params)
        with trainer.global_weights(), pytest.raises(JobError) as inner:
            trainer.step(1)
        with pytest.raises(JobError) as outer:
            trainer.step(1)
    backward(params, 1)
    trainer.step(1)
    seen = {"lines": lines, "said": [str(inner.value), str(outer.value)]}
    return {**seen, "global": [first, linear.global_values(trainer, params)]}


def take_the_local_rate_from_the_environment():
    """L and W after a step of either rule; what a rule of the environment's says."""
    seen, make, sgd = {}, odsgd_kvstore.Trainer, {"learning_rate": 0.5, "momentum": 0.5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ODSGD_LOCAL_LR", "0.125")
        for rule in ("sgd", "mirror"):
            params = make_params()
            trainer = make(params, "sgd", sgd, local_optimizer=rule, warmup_steps=0)
            backward(params, 0)
            trainer.step(1)
            seen[rule] = values(params), linear.global_values(trainer, params)
        patch.setenv("ODSGD_LOCAL_OPTIMIZER", "mirror")
        with pytest.raises(ConfigError) as caught:
            make(make_params(), "sgd", sgd)
    return {**seen, "said": str(caught.value)}


def wait_for_rank_1(folder):
    """Rank 1 comes to make a store when rank 0 has said twice that it waits."""
    said = Path(folder, "said")

    def then(lines):
        if linear.rank() == 0 and len(lines) == 2:
            said.touch()

    with pytest.MonkeyPatch.context() as patch, logged(then) as lines:
        patch.setattr(native, "_WAIT_NOTE_S", 0.2)
        deadline = time.monotonic() + LIMIT_S / 2
        while linear.rank() == 1 and not said.exists():
            assert time.monotonic() < deadline, "rank 0 said nothing"
            time.sleep(0.01)  # between two looks
        mx.kv.create("dist_odsgd")
    return lines


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("seen"))

    def run():
        return {
            "indices": change_multipliers([0, 1]),
            "names": change_multipliers(["a_weight", "b_weight"]),
            "parts": push_in_parts(),
            "trainer": differ_and_nest(),
            "environment": take_the_local_rate_from_the_environment(),
            "wait": wait_for_rank_1(folder),
        }

    return run_local(run, WORKERS, 1, timeout=LIMIT_S)


@pytest.mark.parametrize("keys", ["indices", "names"])
def test_multipliers_changed_later_hold_locally_and_on_the_servers(seen, keys):
    # Rates and decays of a and of b, step by step; the sum of the gradients is 3.
    rates = [(0.5, 0.5), (0.5, 0.125), (0.5, 0.125), (1.0, 0.5)]
    decays = [(0.5, 0.5), (0.5, 0.5), (0.0, 2.0), (0.0, 2.0)]
    for rank, result in enumerate(of(seen, keys)):
        w = [1.0, 1.0]
        for step, which in itertools.product(range(4), range(2)):
            rate, decay = rates[step][which], decays[step][which] * w[which]
            local = w[which] - rate * (WORKERS * (rank + 1) + decay)
            w[which] -= rate * (3 + decay)
            assert result[step][which] == (local, w[which]), (step, which)


def test_a_rate_changed_between_pushes_of_disjoint_keys_holds_for_the_next(seen):
    for rank, result in enumerate(of(seen, "parts")):
        mine = WORKERS * (rank + 1)
        assert result == [
            [(1 - mine, 1 - 3), (1 - mine, 1 - 3)],
            [(1 - 3 - mine, 1 - 6)],
            [(1 - 3 - 16 * mine, 1 - 3 - 48)],
            [(1 - 6 - 16 * mine, 1 - 6 - 48)],
        ]


def test_other_rates_on_rank_1_are_told_and_those_of_rank_0_hold(seen):
    results = of(seen, "trainer")
    for result, which in itertools.product(results, range(2)):
        first = 1 - 0.5 * total(0, which)
        want = [first, first - 0.5 * total(1, which)]
        got = [weights[which] for weights in result["global"]]
        np.testing.assert_array_equal(got, want)
    told = [[s for s in r["lines"] if "optimizer has" in s] for r in results]
    assert told[0] == [] and len(told[1]) == 1
    assert re.search(r"Rank 1's .*'lr': 0.125.* rank 0's, .*'lr': 0.5\D", told[1][0])


def test_no_step_inside_an_outer_context_whose_inner_one_has_ended(seen):
    for result in of(seen, "trainer"):
        assert ["inside global_weights()" in s for s in result["said"]] == [True] * 2


@pytest.mark.parametrize("name, rate", [("sgd", 0.125), ("mirror", 0.5)])
def test_local_rate_of_the_environment_holds_for_a_named_optimizer(seen, name, rate):
    for rank, result in enumerate(of(seen, "environment")):
        own = [gradient(0, rank, which) for which in range(2)]
        local = [1 - rate * WORKERS * g for g in own]
        whole = [1 - 0.5 * total(0, which) for which in range(2)]
        np.testing.assert_array_equal(result[name], (local, whole))
        assert "'mirror'" in result["said"] and "ODSGD_LOCAL_LR" in result["said"]


def test_a_rank_that_waits_alone_says_what_for(seen):
    waits = [line for line in seen[0]["wait"] if "waits for the other ranks" in line]
    assert len(waits) >= 2
    said = r"Rank 0 waits for .* in: create store \d+\. Every .* in the same order\."
    assert all(re.match(said, line) for line in waits)


def test_trainer_and_store_are_refused_beside_a_store_of_mxnets_own():
    def run():
        mx.kv.create("dist_sync")
        params, said = make_params(), []
        trainer = odsgd_kvstore.Trainer(params, "sgd", {"learning_rate": 0.5})
        backward(params, 0)
        for use in (lambda: trainer.step(1), odsgd_kvstore.ODSGDStore):
            with pytest.raises(ConfigError) as caught:
                use()
            said.append(str(caught.value))
        return said

    for said in run_local(run, WORKERS, 1, timeout=LIMIT_S, stock_servers=True):
        assert len(said) == 2
        assert all("'dist_sync'" in text and "would hang" in text for text in said)


FAILING = """
import time
from mxnet import optimizer as opt

class Failing(opt.SGD):
    def update_multi_precision(self, index, weight, grad, state):
        if self.num_update == 3:
            raise ValueError("it fails at update 3")
        super().update_multi_precision(index, weight, grad, state)

def train(seconds):
    import odsgd_kvstore, mxnet as mx
    kv = mx.kv.create("dist_odsgd")
    kv.set_optimizer(Failing(learning_rate=0.25))
    kv.init(0, mx.nd.ones(2))
    out = mx.nd.zeros(2)
    for _ in range(3):
        kv.pushpull(0, mx.nd.ones(2), out=out)
    time.sleep(seconds)  # the user's own work
    print("has", *out.asnumpy(), flush=True)
"""


@pytest.mark.parametrize("pause, warmup", [(0, 0), (2, 200)])
def test_a_server_that_fails_at_the_last_update_fails_the_job(tmp_path, pause, warmup):
    (tmp_path / "failing.py").write_text(FAILING)
    env = {"ODSGD_WARMUP_STEPS": str(warmup), "ODSGD_LOCAL_OPTIMIZER": "none"}
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/launch.py"), "-n2", "-s1", sys.executable,
         "-c", f"import odsgd_kvstore, failing; failing.train({pause})"],
        capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path,
        env={**os.environ, **env}, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "failed with exit code 1" in done.stderr
    # W(2) = 1 - 2 * 0.25 * 2: nothing was updated after it.
    assert "] has 0.0 0.0\n" in done.stdout
    assert "Traceback" in done.stdout and "failing.py" in done.stdout
    assert "ValueError: it fails at update 3" in done.stdout
