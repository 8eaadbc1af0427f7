"""Hyper-parameters that change while a job runs, and ranks that fall behind.

Gradients, rates and decays are dyadic, so that every weight here is exact.
"""

import contextlib
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import mxnet as mx
import numpy as np
import pytest
from linear import (
    WORKERS,
    backward,
    global_values,
    gradient,
    make_params,
    rank,
    total,
    values,
)

import odsgd_kvstore
from odsgd_kvstore import native
from odsgd_kvstore.config import Config
from odsgd_kvstore.errors import ConfigError, JobError
from odsgd_kvstore.testing import run_local

ROOT = Path(odsgd_kvstore.__file__).absolute().parents[1]
LIMIT_S = 120
STUCK_S = 30  # for what was seen to hang; a whole good job takes 5 s
STEPS = 30


# Training where rank 1 is slow and nobody reads an array before the end


@dataclass(frozen=True)
class Slowed:
    """A training in which rank 1 takes `slow_s` longer for each step.

    `change` is called before each step with trainer, parameters and step; `rule` says
    the rate and decay of a parameter at a step, or None where it is not used.
    """

    rule: Callable[[int, int], Any]
    change: Callable[[Any, Any, int], None] = lambda trainer, params, step: None
    schedule: tuple = ()
    slow_s: float = 0.1


def set_rate(trainer, params, step):
    trainer.set_learning_rate(2.0 ** -(step % 12))


def set_multipliers(trainer, params, step):
    for which, param in enumerate(params):
        param.lr_mult = 2.0 ** -(step % (3 + which))


def set_decay(trainer, params, step):
    trainer._optimizer.wd = float(step % 2)


def every_second(rate):
    """A rule where parameter 1 is used every second step."""
    return lambda step, which: None if which and step % 2 else (rate(step), 0.0)


SLOWED = {
    "rate": Slowed(lambda step, which: (2.0 ** -(step % 12), 0.0), set_rate),
    "lr_mult": Slowed(
        lambda step, which: (0.5 * 2.0 ** -(step % (3 + which)), 0.0),
        set_multipliers,
        slow_s=0.05,
    ),
    "decay": Slowed(
        lambda step, which: (0.5, float(step % 2)), set_decay, slow_s=0.05
    ),
    "paused": Slowed(every_second(lambda step: 0.5)),
    # FactorScheduler(3, 0.5): num_update 1 to 3 have 0.5, 4 to 6 half of it.
    "paused, schedule": Slowed(
        every_second(lambda step: 0.5 * 2.0 ** -(step // 3)), schedule=(3, 0.5)
    ),
    "paused, rate": Slowed(
        every_second(lambda step: 2.0 ** -(step % 12)), set_rate, slow_s=0.05
    ),
}


def closed_form(rule, which):
    """W, and the ranks' L, of a parameter after the last step."""
    weight, local = np.ones((3, 2)), []
    for step in range(STEPS):
        if rule(step, which) is None:
            local = [weight] * WORKERS
            continue
        rate, decay = rule(step, which)
        local = [
            weight - rate * (WORKERS * gradient(step, worker, which) + decay * weight)
            for worker in range(WORKERS)
        ]
        weight = weight - rate * (total(step, which) + decay * weight)
    return weight, local


def train_slowed(case):
    """L and W after the last step; nothing is waited for before."""
    params = make_params()
    sgd = {"learning_rate": 0.5}
    if case.schedule:
        factor = mx.lr_scheduler.FactorScheduler(*case.schedule, base_lr=0.5)
        sgd["lr_scheduler"] = factor
    trainer = odsgd_kvstore.Trainer(
        params, "sgd", sgd, local_optimizer="mirror", warmup_steps=0
    )
    for step in range(STEPS):
        if rank() == 1:
            time.sleep(case.slow_s)  # its forward and backward pass
        case.change(trainer, params, step)
        both = case.rule(step, 1) is not None
        backward(params, step, only=None if both else 0)
        trainer.step(1, ignore_stale_grad=True)
    local = values(params)
    trainer.synchronize()
    return {"local": local, "global": values(params)}


@pytest.fixture(scope="module")
def slowed():
    def run():
        return {name: train_slowed(case) for name, case in SLOWED.items()}

    return run_local(run, WORKERS, 2, timeout=LIMIT_S)


@pytest.mark.parametrize("name", SLOWED)
def test_each_step_has_its_own_values_however_far_a_rank_is_behind(slowed, name):
    for which in range(2):
        want, local = closed_form(SLOWED[name].rule, which)
        for number, result in enumerate(rank[name] for rank in slowed):
            np.testing.assert_array_equal(result["global"][which], want)
            np.testing.assert_array_equal(result["local"][which], local[number])


# Short cases, all in one job


@contextlib.contextmanager
def logged():
    """What the package logs inside, as a list that grows."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("odsgd_kvstore")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def raised(kind, call):
    """The message of what a call must raise."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def raw_store(optimizer, keys):
    """A store, its weights (one number each, from 0) and a function that pushes."""
    store = odsgd_kvstore.ODSGDStore(Config(warmup_steps=0))
    store.set_optimizer(optimizer)
    weights = {key: mx.nd.ones(1) for key in keys}
    store.broadcast(keys, [mx.nd.ones(1) for _ in keys], list(weights.values()))

    def push(*pushed):
        """L of these keys, and W, after a push of 1 from rank 0 and 2 from rank 1."""
        for key in pushed:
            store.pushpull(key, mx.nd.ones(1) * (rank() + 1), out=weights[key])
        return [(weights[key].asscalar(), of_store(store, key)) for key in pushed]

    return push


def of_store(store, key):
    """W of a key of one number."""
    out = mx.nd.zeros(1)
    store.pull(key, out=out)
    return out.asscalar()


def change_multipliers(keys):
    """(L, W) of both keys, by step; the optimizer's multipliers change on the way."""
    sgd = mx.optimizer.SGD(
        learning_rate=0.5, wd=0.5, param_idx2name={0: "a_weight", 1: "b_weight"}
    )
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


def differ_from_the_start():
    """W after two steps where rank 1 has other rates, and what it was told."""
    params = make_params()
    sgd = {"learning_rate": 0.125 if rank() else 0.5}
    trainer = odsgd_kvstore.Trainer(params, "sgd", sgd, warmup_steps=0)
    with logged() as lines:
        for step in range(2):
            backward(params, step)
            trainer.step(1)
    return {"global": global_values(trainer, params), "lines": lines}


def step_inside_nested_contexts():
    """The messages, and W before and after them."""
    params = make_params()
    trainer = odsgd_kvstore.Trainer(
        params, "sgd", {"learning_rate": 0.5}, warmup_steps=0
    )
    backward(params, 0)
    trainer.step(1)
    said = []
    with trainer.global_weights():
        seen = [values(params)]
        with trainer.global_weights():
            said.append(raised(JobError, lambda: trainer.step(1)))
        said.append(raised(JobError, lambda: trainer.step(1)))
        said.append(raised(JobError, lambda: params[0].set_data(mx.nd.zeros((3, 2)))))
    backward(params, 1)
    trainer.step(1)
    return {"said": said, "global": [*seen, global_values(trainer, params)]}


def take_the_local_rate_from_the_environment():
    """L after one step of 'sgd', W, and what 'mirror' says."""
    params, name = make_params(), "ODSGD_LOCAL_LR"
    sgd = {"learning_rate": 0.5, "momentum": 0.5}
    make = odsgd_kvstore.Trainer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, "0.125")
        trainer = make(params, "sgd", sgd, local_optimizer="sgd", warmup_steps=0)
        said = raised(
            ConfigError, lambda: make(params, "sgd", sgd, local_optimizer="mirror")
        )
    backward(params, 0)
    trainer.step(1)
    local = values(params)
    return {"local": local, "global": global_values(trainer, params), "said": said}


def wait_for_rank_1(folder):
    """Rank 1 comes to make a store when rank 0 has said twice that it waits."""
    arrived = Path(folder, "said")
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        patch.setattr(native, "_WAIT_NOTE_S", 0.2)
        if rank() == 0:
            handler = logging.getLogger("odsgd_kvstore").handlers[-1]
            note = handler.emit
            handler.emit = lambda record: (
                note(record),
                len(lines) >= 2 and arrived.touch(),
            )
        deadline = time.monotonic() + STUCK_S
        while rank() == 1 and not arrived.exists():
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
            "differ": differ_from_the_start(),
            "nested": step_inside_nested_contexts(),
            "environment": take_the_local_rate_from_the_environment(),
            "wait": wait_for_rank_1(folder),
        }

    return run_local(run, WORKERS, 1, timeout=LIMIT_S)


@pytest.mark.parametrize("keys", ["indices", "names"])
def test_multipliers_changed_later_hold_locally_and_on_the_servers(seen, keys):
    # Rates and decays of a and of b, step by step; the sum of the gradients is 3.
    rates = [(0.5, 0.5), (0.5, 0.125), (0.5, 0.125), (1.0, 0.5)]
    decays = [(0.5, 0.5), (0.5, 0.5), (0.0, 2.0), (0.0, 2.0)]
    for number, result in enumerate(rank[keys] for rank in seen):
        before = [1.0, 1.0]
        for step, got in enumerate(result):
            for which, (rate, decay) in enumerate(zip(rates[step], decays[step])):
                w = before[which]
                local = w - rate * (WORKERS * (number + 1) + decay * w)
                before[which] = w - rate * (3 + decay * w)
                assert got[which] == (local, before[which]), (step, which)


def test_a_rate_changed_between_pushes_of_disjoint_keys_holds_for_the_next(seen):
    for number, result in enumerate(rank["parts"] for rank in seen):
        mine = WORKERS * (number + 1)
        assert result == [
            [(1 - mine, 1 - 3), (1 - mine, 1 - 3)],
            [(1 - 3 - mine, 1 - 6)],
            [(1 - 3 - 16 * mine, 1 - 3 - 48)],
            [(1 - 6 - 16 * mine, 1 - 6 - 48)],
        ]


def test_other_rates_on_rank_1_are_told_and_those_of_rank_0_hold(seen):
    for result in (rank["differ"] for rank in seen):
        for which, got in enumerate(result["global"]):
            want = 1 - 0.5 * (total(0, which) + total(1, which))
            np.testing.assert_array_equal(got, want)
    told = [[s for s in r["differ"]["lines"] if "optimizer has" in s] for r in seen]
    assert told[0] == [] and len(told[1]) == 1
    assert "0.125" in told[1][0] and "rank 0's" in told[1][0] and "0.5" in told[1][0]


def test_no_step_inside_an_outer_context_whose_inner_one_has_ended(seen):
    for result in (rank["nested"] for rank in seen):
        assert len(result["said"]) == 3
        assert all("inside global_weights()" in said for said in result["said"])
        for which in range(2):
            first = 1 - 0.5 * total(0, which)
            want = [first, first - 0.5 * total(1, which)]
            got = [weights[which] for weights in result["global"]]
            np.testing.assert_array_equal(got, want)


def test_local_rate_of_the_environment_holds_for_a_rule_given_as_argument(seen):
    for number, result in enumerate(rank["environment"] for rank in seen):
        for which in range(2):
            want = 1 - 0.125 * WORKERS * gradient(0, number, which)
            np.testing.assert_array_equal(result["local"][which], want)
            want = 1 - 0.5 * total(0, which)
            np.testing.assert_array_equal(result["global"][which], want)
        assert "'mirror'" in result["said"] and "ODSGD_LOCAL_LR" in result["said"]


def test_a_rank_that_waits_alone_says_what_for(seen):
    waits = [line for line in seen[0]["wait"] if "waits for the other ranks" in line]
    assert len(waits) >= 2
    for line in waits:
        assert line.startswith("Rank 0 waits") and "create store" in line
        assert "in the same order" in line
