"""Parameters that pause, and weights that come from outside.

Gradients do not depend on the weights here (the loss is linear), so a numpy oracle
knows W exactly. Rates, gradients and momenta are dyadic where bits are compared.
"""

import os

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, lr_scheduler

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
WORKERS = 2
SHAPE = (3, 2)
FREEZE, THAW, END = 10, 16, 22  # steps
BASE_LR = 0.5


def rank():
    return int(os.environ["ODSGD_LOCAL_RANK"])


def gradient(step, worker, which=0):
    """A dyadic gradient, another one for each step, worker, parameter and element."""
    rows = np.arange(6, dtype=np.float32).reshape(SHAPE)
    return ((step * 5 + worker * 3 + which * 7) % 11 - 5 + rows % 4) / 8


def total(step, which=0):
    return sum(gradient(step, worker, which) for worker in range(WORKERS))


def make_params(count=2, value=1.0):
    params = [gluon.Parameter(f"p{i}", shape=SHAPE) for i in range(count)]
    for param in params:
        param.initialize(mx.init.Constant(value))
    return params


def backward(params, step, only=None):
    with autograd.record():
        outputs = [
            param.data() * mx.nd.array(gradient(step, rank(), which))
            for which, param in enumerate(params)
            if param.grad_req != "null" and only in (None, which)
        ]
    autograd.backward(outputs)


def values(params):
    return [param.data().asnumpy() for param in params]


def global_values(trainer, params):
    with odsgd_kvstore.global_weights(trainer):
        return values(params)


def schedule():
    return lr_scheduler.FactorScheduler(step=4, factor=0.5, base_lr=BASE_LR)


def rate_at(step):
    """The schedule at update `step`, counted from 1 by all keys together."""
    return schedule()(step)


# Parameters that are not stepped for a while


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


def sgd_params():
    return {"learning_rate": 0.5, "momentum": 0.5}


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


def sgd_oracle(weight, momentum, grad):
    momentum = 0.5 * momentum - 0.5 * grad
    return weight + momentum, momentum


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


# Weights that are assigned


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
    """W(t), momentum kept, and the momentum before the assignment."""
    weight, momentum, out = np.ones(SHAPE), np.zeros(SHAPE), []
    for step in range(STEPS):
        if step == AT and given is not None:
            weight = np.full(SHAPE, given)
        out.append((weight, momentum))
        weight, momentum = sgd_oracle(weight, momentum, total(step, which))
    return [*out, (weight, momentum)]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", ASSIGN)
def test_assigned_weights_are_everywhere_and_momentum_goes_on(assigned, name, when):
    for worker, runs in enumerate(assigned):
        for which, given in enumerate(ASSIGN[name][1]):
            oracle = assigned_oracle(which, given)
            for step, (local, global_) in enumerate(runs[name, when]):
                weight, momentum = oracle[step]
                own = 0.5 * WORKERS * gradient(step, worker, which)
                mirror = weight + 0.5 * momentum - own
                after = oracle[step + 1][0]
                warm = step < WHEN[when]
                where = f"parameter {which}, step {step}"
                np.testing.assert_allclose(global_[which], after, 0, 1e-5, err_msg=where)
                expected = after if warm else mirror
                np.testing.assert_allclose(local[which], expected, 0, 1e-5, err_msg=where)


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
    ranks = run_local(lambda: own_file(folder), WORKERS, 1, timeout=LIMIT_S)
    saved = ranks[0][0]
    for _, weights in ranks:
        for which in range(2):
            expected = saved[which] - 0.5 * total(3, which)
            np.testing.assert_array_equal(weights[which], expected)
