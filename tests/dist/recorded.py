"""Training on a worker, recorded for the oracle, and the options it is tried with.

Every trainer's gradients are kept, and the weights it has after every step.
"""

from dataclasses import replace

import mxnet as mx
import numpy as np
from oracle import QUADRATICS, replay

import odsgd_kvstore

STEPS = 20
TOLERANCE = 2e-6  # of the largest weight
CUT = {"MXNET_KVSTORE_BIGARRAY_BOUND": "64"}  # below the largest parameters' sizes
PLAIN = {"learning_rate": 0.1, "wd": 0.02}
WHOLE = {"learning_rate": 0.0625, "momentum": 0.75, "wd": 0.01}
ADAM = {"learning_rate": 0.02}
MULTIPLIERS = {1: {0: (2.0, 0.0)}, 9: {0: (0.5, 3.0), 1: (1.5, 2.0)}}
FACTOR = ("FactorScheduler", {"step": 4, "factor": 0.5, "base_lr": 0.2})
MULTI = ("MultiFactorScheduler", {"step": [3, 9], "factor": 0.25, "base_lr": 0.2})
POLY = ("PolyScheduler", {"max_update": 15, "pwr": 2, "base_lr": 0.2})
COSINE = ("CosineScheduler", {"max_update": 18, "final_lr": 0.01, "base_lr": 0.2})
OPTIONS = {  # each with each of the main rules; steps count from 1
    "clip": {"params": {"clip_gradient": 0.5}},
    "batch 10": {"batch": 10},
    "smaller batches": {"batch": 5, "batches": {6: [3], 12: [2, 5, 1], 20: [1]}},
    "uneven batches": {"batch": 4, "batches": {1: [4, 8, 2], 7: [2, 1, 4]}},
    "warm-up 1": {"warmup": 1},
    "warm-up 5": {"warmup": 5},
    "set_learning_rate": {"changes": {8: {"learning_rate": 0.02}}, "warmup": 1},
    "lr, wd": {"changes": {5: {"lr": 0.03}, 11: {"wd": 0.1}, 12: {"lr": 0.1}}},
    "momentum, clip": {"changes": {7: {"momentum": 0.25}, 9: {"clip_gradient": 0.3}}},
    "multipliers": {"multipliers": MULTIPLIERS, "warmup": 1},
    "paused": {"paused": {0: range(8, 12)}, "multipliers": MULTIPLIERS},
    "paused in warm-up": {"paused": {1: range(2, 7)}, "schedule": FACTOR, "warmup": 3},
    "Factor": {"schedule": FACTOR},
    "MultiFactor": {"warmup": 2, "schedule": MULTI},
    "Poly": {"schedule": POLY},
    "Cosine": {"schedule": COSINE},
}


def with_option(case, name):
    """A case with one of OPTIONS; its own parameters are joined."""
    option = OPTIONS[name]
    params = {**case.params, **option.get("params", {})}
    return replace(case, **{**option, "params": params})


def build(model):
    """(parameters, loss of a step on a rank) of a model."""
    if model == "network":
        net = mx.gluon.nn.HybridSequential()
        net.add(
            mx.gluon.nn.Dense(16, in_units=8, activation="tanh"),
            mx.gluon.nn.Dense(4, in_units=16),
        )
        net.initialize(mx.init.Xavier())
        criterion = mx.gluon.loss.SoftmaxCrossEntropyLoss()

        def loss(rank, step):
            random = np.random.RandomState(1000 * step + rank)
            x = mx.nd.array(random.normal(0, 1, (6, 8)))
            return criterion(net(x), mx.nd.array(random.randint(0, 4, 6))).sum()

        return list(net.collect_params().values()), loss
    quadratic = QUADRATICS[model]
    params = [mx.gluon.Parameter(str(shape), shape=shape) for shape in quadratic.shapes]
    for param in params:
        param.initialize(mx.init.Zero() if quadratic.simple else mx.init.Normal(1))

    def quadratic_loss(rank, step):
        terms = []
        for key, param in enumerate(params):
            away = param.data() - mx.nd.array(quadratic.optimum(key, rank, step))
            curved = mx.nd.array(quadratic.curvature(key)) * away * away
            terms.append(curved.sum() / 2)
        return mx.nd.add_n(*terms)

    return params, quadratic_loss


def make_trainer(case, params, is_plain):
    """The trainer of a case: ours, or MXNet's with nothing but the flag."""
    options = dict(case.params)
    if case.schedule is not None:
        name, arguments = case.schedule
        options["learning_rate"] = arguments["base_lr"]  # Adam's default overwrites it
        options["lr_scheduler"] = getattr(mx.lr_scheduler, name)(**arguments)
    if is_plain:
        return mx.gluon.Trainer(params, case.optimizer, options, kvstore="dist_odsgd")
    return odsgd_kvstore.Trainer(
        params,
        case.optimizer,
        options,
        local_optimizer=case.rule,
        local_optimizer_params=case.rule_params,
        warmup_steps=case.warmup,
    )


def prepare(case, step, trainer, params):
    """What the user changes before a step."""
    for name, value in case.changes.get(step, {}).items():
        if name == "learning_rate":
            trainer.set_learning_rate(value)
        else:
            setattr(trainer._optimizer, name, value)
    for key, (lr_mult, wd_mult) in case.multipliers.get(step, {}).items():
        params[key].lr_mult, params[key].wd_mult = lr_mult, wd_mult
    for key in case.paused:
        params[key].grad_req = "null" if case.is_paused(step, key) else "write"


def train(case, is_plain, rank, watched=True, steps=STEPS):
    """Train a case; what was seen, by step and parameter.

    Not watched, nothing is waited for before the end, and W is not looked at.
    """
    mx.random.seed(100 + rank)  # so that only rank 0's initial weights count
    params, loss_of = build(case.model)
    trainer = make_trainer(case, params, is_plain)
    seen = {"start": [copies(params)], "gradient": [], "local": [], "global": []}
    for step in range(1, steps + 1):
        prepare(case, step, trainer, params)
        with mx.autograd.record():
            loss = loss_of(rank, step)
        loss.backward()
        seen["gradient"].append(
            {k: p.grad().copy() for k, p in enumerate(params) if p.grad_req != "null"}
        )
        trainer.step(case.batch_size(step, rank))
        seen["local"].append(copies(params))
        if watched:
            with odsgd_kvstore.global_weights(trainer):
                seen["global"].append(copies(params))
    odsgd_kvstore.synchronize(trainer)
    seen["end"] = [copies(params)]
    return {
        what: [{key: a.asnumpy() for key, a in arrays.items()} for arrays in by_step]
        for what, by_step in seen.items()
    }


def copies(params):
    """The parameters' values; returns before they are there."""
    return {key: param.data().copy() for key, param in enumerate(params)}


def assert_close(got, want, exact, where):
    """Equal for every parameter: bit for bit, or to TOLERANCE of the largest weight."""
    for key in want:
        if exact:
            np.testing.assert_array_equal(got[key], want[key], err_msg=f"{where} {key}")
            continue
        error = np.abs(got[key].astype("float64") - want[key]).max()
        limit = TOLERANCE * np.abs(want[key]).max()
        assert error <= limit, f"{where}, parameter {key}: off by {error}"


def assert_is_oracle(ranks, case, exact=False):
    """What each rank's `train` saw is what the oracle makes of all their gradients."""
    want = replay(case, ranks[0]["start"][0], [seen["gradient"] for seen in ranks])
    for rank, got in enumerate(ranks):
        wanted = {"global": want.global_weights, "local": want.local_weights[rank]}
        for what, by_step in wanted.items():
            assert len(got[what]) == len(by_step)
            for step, weights in enumerate(by_step):
                where = f"{what}, rank {rank}, step {step + 1}"
                assert_close(got[what][step], weights, exact, where)
