"""Weights that the user assigns between two steps, with our Trainer.

The next step starts from rank 0's, on the servers and on every rank, and goes on with
the momentum that the servers had.
"""

import os

import mxnet as mx
import numpy as np
import pytest
from linear import (
    SHAPE,
    WORKERS,
    backward,
    global_values,
    gradient,
    make_params,
    rank,
    sgd_oracle,
    sgd_params,
    total,
    values,
)
from mxnet import gluon

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

LIMIT_S = 120


class Net(gluon.HybridBlock):
    """Two parameters under a linear loss."""

    def __init__(self):
        super().__init__(prefix="")
        self.a = self.params.get("a", shape=SHAPE)
        self.b = self.params.get("b", shape=SHAPE)

    def list(self):
        return [self.a, self.b]


def make_net():
    net = Net()
    net.initialize(mx.init.One())
    return net


def set_one(net, folder):
    net.list()[0].set_data(mx.nd.full(SHAPE, 7.0 + rank()))  # rank 0's counts


def load_all(net, folder):
    other = make_net()
    other.list()[0].set_data(mx.nd.full(SHAPE, 3.0))
    other.list()[1].set_data(mx.nd.full(SHAPE, -2.0))
    path = os.path.join(folder, f"assigned-{rank()}.params")
    other.save_parameters(path)
    net.load_parameters(path)


def initialise_again(net, folder):
    net.initialize(mx.init.Constant(5.0 + rank()), force_reinit=True)


ASSIGN = {  # name: (what is done, X of the two parameters; None is not assigned)
    "set_data": (set_one, [7.0, None]),
    "load_parameters": (load_all, [3.0, -2.0]),
    "force_reinit": (initialise_again, [5.0, 5.0]),
}
WHEN = {"during warm-up": 20, "after warm-up": 2}  # warmup_steps; assigned at step 6
AT, STEPS = 6, 12


def assigned_run(assign, warmup_steps, folder, momentum=0.5):
    """L and W after each step; weights are assigned before step AT."""
    net = make_net()
    sgd = {"learning_rate": 0.5, "momentum": momentum}
    trainer = odsgd_kvstore.Trainer(
        net.collect_params(), "sgd", sgd, warmup_steps=warmup_steps
    )
    seen = []
    for step in range(STEPS):
        if step == AT:
            assign(net, folder)
        backward(net.list(), step)
        trainer.step(1)
        seen.append((values(net.list()), global_values(trainer, net.list())))
    return seen


def loaded_first(folder):
    """W after a step on weights that were loaded before the first."""
    net = make_net()
    trainer = odsgd_kvstore.Trainer(net.collect_params(), "sgd", sgd_params())
    load_all(net, folder)
    backward(net.list(), 0)
    trainer.step(1)
    return global_values(trainer, net.list())


def own_file(folder):
    """Every rank loads the local weights that rank 0 has just saved."""
    net = make_net()
    trainer = odsgd_kvstore.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.5}, warmup_steps=0
    )
    path = os.path.join(folder, "own.params")
    for step in range(3):
        backward(net.list(), step)
        trainer.step(1)
    saved = values(net.list())
    if rank() == 0:
        net.save_parameters(path)
    trainer._kvstore._barrier()
    net.load_parameters(path)
    backward(net.list(), 3)
    trainer.step(1)
    return saved, global_values(trainer, net.list())


def evaluated_before_a_step():
    """What evaluation and `synchronize` make of weights assigned just before."""
    seen = []
    for look in (lambda t, p: global_values(t, p), lambda t, p: t.synchronize()):
        params = make_params()
        trainer = odsgd_kvstore.Trainer(
            params, "sgd", {"learning_rate": 0.5}, warmup_steps=0
        )
        for step in range(3):
            backward(params, step)
            trainer.step(1)
        params[0].set_data(mx.nd.full(SHAPE, 7.0))
        during = look(trainer, params) or values(params)
        backward(params, 3)
        trainer.step(1)
        seen.append((during[0], global_values(trainer, params)))
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("assigned"))


@pytest.fixture(scope="module")
def assigned(folder):
    def run():
        runs = {
            (name, when): assigned_run(assign, warmup, folder)
            for name, (assign, _) in ASSIGN.items() for when, warmup in WHEN.items()
        }  # fmt: skip
        first, looks = loaded_first(folder), evaluated_before_a_step()
        return {**runs, "first": first, "looks": looks}

    return run_local(run, WORKERS, 1, timeout=LIMIT_S)


def assigned_oracle(which, given):
    """(W(t), momentum, W(t+1)) of each step; an assignment keeps the momentum."""
    weight, momentum, out = np.ones(SHAPE), np.zeros(SHAPE), []
    for step in range(STEPS):
        if step == AT and given is not None:
            weight = np.full(SHAPE, given)
        before = weight, momentum
        weight, momentum = sgd_oracle(weight, momentum, total(step, which))
        out.append((*before, weight))
    return out


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", ASSIGN)
def test_assigned_weights_are_everywhere_and_momentum_goes_on(assigned, name, when):
    for worker, runs in enumerate(assigned):
        for which, given in enumerate(ASSIGN[name][1]):
            oracle = assigned_oracle(which, given)
            for step, (local, global_) in enumerate(runs[name, when]):
                weight, momentum, after = oracle[step]
                own = 0.5 * WORKERS * gradient(step, worker, which)
                mirror = weight + 0.5 * momentum - own
                warm = step < WHEN[when]
                expected = [after, after if warm else mirror]
                np.testing.assert_allclose(
                    [global_[which], local[which]], expected, rtol=0, atol=1e-5,
                    err_msg=f"W and L of parameter {which} after step {step}",
                )  # fmt: skip


def test_weights_loaded_before_the_first_step_are_the_start(assigned):
    expected = [x - 0.5 * total(0, which) for which, x in enumerate([3.0, -2.0])]
    for runs in assigned:
        np.testing.assert_array_equal(runs["first"], expected)


@pytest.mark.parametrize("look", ["global_weights", "synchronize"])
def test_evaluation_right_after_an_assignment_is_on_the_new_weights(assigned, look):
    for runs in assigned:
        during, after = runs["looks"][look == "synchronize"]
        np.testing.assert_array_equal(during, np.full(SHAPE, 7.0))
        np.testing.assert_array_equal(after[0], 7.0 - 0.5 * total(3))


def test_all_ranks_can_load_rank_zeros_own_local_weights(folder):
    # On rank 0 nothing changes by it, on all others everything.
    ranks = run_local(lambda: own_file(folder), WORKERS, 1, timeout=40)
    saved = ranks[0][0]
    for _, weights in ranks:
        for which in range(2):
            expected = saved[which] - 0.5 * total(3, which)
            np.testing.assert_array_equal(weights[which], expected)
