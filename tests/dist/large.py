"""Parameters that are sliced, packed, or neither, under a loss that is linear in them.

For functions that run on the workers, and for the numpy oracle beside them, which knows
what compression makes of what is sent. Gradients do not depend on the weights.
"""

import os

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from oracle import RULES, Local, Trajectory

import odsgd_kvstore

f32 = np.float32
BOUND = 9000  # MXNET_KVSTORE_BIGARRAY_BOUND: slices are below it
CUT = {"MXNET_KVSTORE_BIGARRAY_BOUND": str(BOUND)}
SHAPES = ((120, 200), (30,), (70, 80), (4, 5), (1,), (85, 100), (40, 40), (9, 2, 2))
SLICED = (0,)
PACKED = (1, 3, 4, 6, 7)
ALONE = (2, 5)
STEPS = 8


def rank():
    """This worker's rank."""
    return int(os.environ["ODSGD_LOCAL_RANK"])


def gradient(step, worker, key):
    """Another one for each; step counts from 1."""
    random = np.random.RandomState(10000 * step + 100 * worker + key)
    return random.normal(0, 0.4, SHAPES[key]).astype(f32)


def start():
    """First weights."""
    random = np.random.RandomState(7)
    return {k: random.normal(0, 1, s).astype(f32) for k, s in enumerate(SHAPES)}


def make_params():
    """Parameters with the first weights; other ranks' must not count."""
    params = [gluon.Parameter(f"p{i}", shape=shape) for i, shape in enumerate(SHAPES)]
    for param, weight in zip(params, start().values()):
        param.initialize(mx.init.Zero())
        param.set_data(mx.nd.array(weight + rank()))
    return params


def backward(params, step, absent=()):
    """The gradients of a step in all parameters but the absent."""
    with autograd.record():
        outputs = [
            param.data() * mx.nd.array(gradient(step, rank(), key))
            for key, param in enumerate(params)
            if key not in absent and param.grad_req != "null"
        ]
    autograd.backward(outputs)


def copies(params):
    """The parameters' values; returns before they are there."""
    return {key: param.data().copy() for key, param in enumerate(params)}


def train(make_trainer, case, assigned=(), steps=STEPS):
    """(L, W) after each step, by parameter; then W in three more ways, and the bytes.

    `assigned` has (step, key, value) of weights that are given before a step.
    """
    params = make_params()
    trainer = make_trainer(params, case)
    seen, sent = [], [0]
    for step in range(1, steps + 1):
        _prepare(case, step, params)
        for _, key, value in (given for given in assigned if given[0] == step):
            params[key].set_data(mx.nd.full(SHAPES[key], value + rank()))
        backward(params, step)
        trainer.step(case.batch)
        local = copies(params)
        with odsgd_kvstore.global_weights(trainer):
            seen.append((local, copies(params)))
        sent.append(trainer._kvstore.pipeline.stats()["pushed_bytes"])
    pulled = {key: mx.nd.zeros(shape) for key, shape in enumerate(SHAPES)}
    for key, out in pulled.items():
        trainer._kvstore.pull(key, out)
    odsgd_kvstore.synchronize(trainer)
    seen.append((pulled, copies(params)))
    return {
        "seen": [[to_numpy(arrays) for arrays in pair] for pair in seen],
        "pushed": np.diff(sent).tolist(),
        "pulled": trainer._kvstore.pipeline.stats()["pulled_bytes"],
    }


def to_numpy(arrays):
    return {key: array.asnumpy() for key, array in arrays.items()}


def _prepare(case, step, params):
    """Multipliers of a step, and what is frozen."""
    for key, (lr_mult, wd_mult) in case.multipliers.get(step, {}).items():
        params[key].lr_mult, params[key].wd_mult = lr_mult, wd_mult
    for key in case.paused:
        params[key].grad_req = "null" if case.is_paused(step, key) else "write"


def ours(**controls):
    """How to make our Trainer for a case."""
    return lambda params, case: odsgd_kvstore.Trainer(
        params, case.optimizer, dict(case.params), local_optimizer=case.rule,
        local_optimizer_params=case.rule_params, warmup_steps=case.warmup, **controls,
    )  # fmt: skip


def plain(kvstore="dist_odsgd", **controls):
    """How to make MXNet's own Trainer for a case."""
    return lambda params, case: gluon.Trainer(
        params, case.optimizer, dict(case.params), kvstore=kvstore, **controls
    )


class Exact:
    """What travels without compression."""

    def send(self, worker, step, key, value):
        """What the servers get of a gradient; `step` counts this key's, from 0."""
        return value

    def pull(self, weight):
        """What workers get of a weight."""
        return weight


class Float16(Exact):
    """Rounded in both directions; the servers' own weights are not."""

    def send(self, worker, step, key, value):
        return value.astype("float16").astype(f32)

    def pull(self, weight):
        return weight.astype("float16").astype(f32)


class TwoBit(Exact):
    """-t, 0 or t of what is left over and new, if the array is large.

    r := r + g;  q = t [r >= t] - t [r <= -t];  r := r - q
    """

    def __init__(self, threshold, warmup=0, full_every=0):
        self._threshold, self._residuals = f32(threshold), {}
        self._warmup, self._full_every = warmup, full_every

    def send(self, worker, step, key, value):
        every = self._full_every and step % self._full_every == 0
        if key in PACKED or step == 0 or step < self._warmup or every:
            return value
        residual = self._residuals.get((worker, key), f32(0)) + value
        t = self._threshold
        q = t * (residual >= t).astype(f32) - t * (residual <= -t).astype(f32)
        self._residuals[worker, key] = residual - q
        return q


def replay(case, wire=None, delay=1, workers=2, assigned=(), steps=STEPS):
    """The recurrences (see `oracle.py`) with what travels as `wire` makes it."""
    wire, rescale = wire or Exact(), 1.0 / case.batch
    master = {key: wire.pull(weight) for key, weight in start().items()}
    rules = {key: RULES[case.optimizer](weight) for key, weight in master.items()}
    local = [{k: Local(case, w) for k, w in master.items()} for _ in range(workers)]
    result = Trajectory([], [[] for _ in range(workers)])
    for step in range(1, steps + 1):
        for _, key, value in (given for given in assigned if given[0] == step):
            _assign(master, local, key, wire.pull(np.full(SHAPES[key], value, f32)))
        weights = {key: wire.pull(weight) for key, weight in master.items()}
        made = [dict(weights) for _ in range(workers)]
        for key, rule in rules.items():
            if case.is_paused(step, key):
                continue
            own = [gradient(step, worker, key) for worker in range(workers)]
            sent = [wire.send(i, rule.updates, key, g) for i, g in enumerate(own)]
            hyper = case.multiplied(case.values(step), step, key)
            master[key] = rule(hyper, master[key], sum(sent[1:], sent[0]), rescale)
            for worker, gradients in enumerate(made):
                arrays = weights[key], own[worker]
                made_locally = local[worker][key](key, step, *arrays, rescale * workers)
                warm = delay == 0 or rule.updates <= case.warmup
                gradients[key] = wire.pull(master[key]) if warm else made_locally
        result.global_weights.append({k: wire.pull(w) for k, w in master.items()})
        for worker in range(workers):
            result.local_weights[worker].append(made[worker])
    return result


def _assign(master, local, key, value):
    """W := X, and W(t-1) such that the momentum stays."""
    for rank_rules in local:
        rule = rank_rules[key]
        rule._before = value - (master[key] - rule._before)
    master[key] = value


def assert_is(ranks, want, tolerance=0.0):
    """What `train` gave on each rank is the oracle's; W has the same bits everywhere.

    `tolerance` is of the largest weight of a parameter, or of 1.
    """
    end = want.global_weights[-1]
    for worker, got in enumerate(ranks):
        wanted = list(zip(want.local_weights[worker], want.global_weights))
        for step, pair in enumerate([*wanted, (end, end)]):
            for what, mine, theirs in zip(("L", "W"), got["seen"][step], pair):
                for key, value in theirs.items():
                    where = f"{what} of parameter {key}, rank {worker}, step {step + 1}"
                    limit = tolerance * max(1.0, np.abs(value).max())
                    error = np.abs(mine[key] - value).max()
                    assert error <= limit, f"{where}: off by {error}"
        for step, pair in enumerate(got["seen"]):
            np.testing.assert_equal(pair[1], ranks[0]["seen"][step][1])
