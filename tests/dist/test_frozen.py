"""Parameters that pause, frozen or unused, and train on later."""

import numpy as np
import pytest
from linear import (
    SHAPE,
    WORKERS,
    backward,
    global_values,
    make_params,
    sgd_oracle,
    sgd_params,
    total,
    values,
)
from mxnet import gluon, lr_scheduler

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
FREEZE, THAW, END = 10, 16, 22  # steps
BASE_LR = 0.5


def schedule():
    return lr_scheduler.FactorScheduler(step=4, factor=0.5, base_lr=BASE_LR)


def rate_at(step):
    """The schedule at update `step`, counted from 1 by all keys together."""
    return schedule()(step)


def adam_params():
    return {"learning_rate": BASE_LR, "lr_scheduler": schedule(), "beta1": 0.75}


def frozen_run(make_trainer, by_grad_req):
    """L and W after each step; parameter 1 pauses from FREEZE to THAW."""
    params = make_params()
    trainer = make_trainer(params)
    seen = []
    for step in range(END):
        paused = FREEZE <= step < THAW
        if by_grad_req and step in (FREEZE, THAW):
            params[1].grad_req = "null" if step == FREEZE else "write"
        backward(params, step, only=0 if paused else None)
        kwargs = {} if by_grad_req else {"ignore_stale_grad": True}
        trainer.step(1, **kwargs)
        seen.append((values(params), global_values(trainer, params)))
    return seen


def ours(optimizer, optimizer_params, **controls):
    return lambda params: odsgd_kvstore.Trainer(
        params, optimizer, optimizer_params(), **{"warmup_steps": 3, **controls}
    )


def plain(optimizer, optimizer_params):
    return lambda params: gluon.Trainer(
        params, optimizer, optimizer_params(), kvstore="dist_odsgd"
    )


FROZEN = {  # name: (how to make the trainer, whether by grad_req)
    "null, sgd": (ours("sgd", sgd_params), True),
    "unused, sgd": (ours("sgd", sgd_params), False),
    "null, adam": (ours("adam", adam_params), True),
    "unused, adam": (ours("adam", adam_params), False),
    "plain null, sgd": (plain("sgd", sgd_params), True),
    "plain null, adam": (plain("adam", adam_params), True),
}
OURS = [name for name in FROZEN if not name.startswith("plain")]


@pytest.fixture(scope="module")
def frozen():
    def run():
        return {name: frozen_run(*how) for name, how in FROZEN.items()}

    env = {"ODSGD_WARMUP_STEPS": "3"}
    return run_local(run, WORKERS, 1, timeout=LIMIT_S, env=env)


def sgd_trajectory(which):
    """W(1) to W(END) of one parameter, momentum untouched while it pauses."""
    weight, momentum, out = np.ones(SHAPE), np.zeros(SHAPE), []
    for step in range(END):
        if which == 0 or not FREEZE <= step < THAW:
            weight, momentum = sgd_oracle(weight, momentum, total(step, which))
        out.append(weight)
    return out


def adam_trajectory(which):
    """Bias correction by the key's own count, the schedule by the common one."""
    weight, mean, square, count, out = np.ones(SHAPE), 0, 0, 0, []
    for step in range(END):
        if which == 0 or not FREEZE <= step < THAW:
            grad, count = total(step, which), count + 1
            mean = 0.75 * mean + 0.25 * grad
            square = 0.999 * square + 0.001 * grad**2
            lr = rate_at(step + 1)
            lr *= np.sqrt(1 - 0.999**count) / (1 - 0.75**count)
            weight = weight - lr * mean / (np.sqrt(square) + 1e-8)
        out.append(weight)
    return out


@pytest.mark.parametrize("name", FROZEN)
def test_global_weights_follow_the_oracle_through_a_pause(frozen, name):
    oracle = adam_trajectory if name.endswith("adam") else sgd_trajectory
    expected = [oracle(0), oracle(1)]
    for seen in frozen:
        for step, (_, weights) in enumerate(seen[name]):
            for which, weight in enumerate(weights):
                np.testing.assert_allclose(
                    weight, expected[which][step], rtol=0, atol=2e-5,
                    err_msg=f"W of parameter {which} after step {step}",
                )  # fmt: skip


@pytest.mark.parametrize("name", FROZEN)
def test_a_paused_parameter_is_global_on_all_ranks_from_the_next_step_on(frozen, name):
    # A plain Trainer says nothing of a parameter that it leaves out, so the store
    # knows when the step after begins: one step later.
    first = FREEZE if name in OURS else FREEZE + 1
    one, other = (seen[name] for seen in frozen)
    for step in range(first, THAW):
        local, global_ = one[step]
        np.testing.assert_array_equal(local[1], global_[1])
        np.testing.assert_array_equal(local[1], other[step][0][1])
    for step in (FREEZE - 1, THAW + 1):  # trained on, and each rank's own
        assert not np.array_equal(one[step][0][1], other[step][0][1])


@pytest.mark.parametrize("name", FROZEN)
def test_global_weights_are_the_same_bits_on_all_ranks_through_a_pause(frozen, name):
    one, other = (seen[name] for seen in frozen)
    for step in range(END):
        np.testing.assert_equal(one[step][1], other[step][1])
