"""Real jobs against numpy: every weight of every rank after every one of 20 steps.

Each job trains all its cases once, a trainer per case, and every rank returns its
gradients and the weights it then had; the oracle is fed with these gradients.
"""

import itertools
import os
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from oracle import QUADRATICS, Case, replay

import odsgd_kvstore
from odsgd_kvstore.testing import run_local

STEPS = 20
LIMIT_S = 240  # of a job
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

RULE_CASES = {
    "none": Case(params=WHOLE, rule="none"),
    "mirror": Case(params=WHOLE, rule="mirror"),
    "mirror without momentum": Case(params=PLAIN, rule="mirror"),
    "replica": Case(params=WHOLE, rule="replica"),
    "sgd": Case(params=WHOLE, rule="sgd"),
    "sgd with its own lr and wd": Case(params=WHOLE, rule="sgd", rule_params=PLAIN),
    "sgd with its own momentum and clip": Case(
        params=WHOLE, rule="sgd", rule_params={"momentum": 0.3, "clip_gradient": 0.7}
    ),
    "adam": Case(params=WHOLE, rule="adam", rule_params=ADAM),
    "nag": Case(params=WHOLE, rule="nag", rule_params={"momentum": 0.6}),
    "adadelta": Case(params=WHOLE, rule="adadelta", batch=4),
    "auto": Case(params=WHOLE),
    "auto for NAG": Case("nag", WHOLE),
    "auto for Adam": Case("adam", ADAM),
}
REPLICAS = {
    f"replica of {name}": Case(
        name, {**ADAM, "wd": 0.01, "clip_gradient": 2.0}, "replica", batch=4, warmup=2,
        multipliers=MULTIPLIERS,
    )
    for name in ("nag", "adam", "rmsprop", "adadelta")
}
REPLICAS["replica of nag, momentum"] = Case("nag", WHOLE, "replica", warmup=1)
OPTIONS = {  # each with each of the main rules; steps count from 1
    "clip": {"params": {**WHOLE, "clip_gradient": 0.5}},
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
OPTION_CASES = {
    f"{rule}, {name}": Case(**{"params": WHOLE, "rule": rule, **option})
    for rule in ("mirror", "replica", "sgd") for name, option in OPTIONS.items()
}
NETWORKS = {
    f"network, {name}": replace(case, model="network", batch=6)
    for name, case in {
        "mirror": Case(params=WHOLE, multipliers=MULTIPLIERS, warmup=5),
        "replica": Case(params={**WHOLE, "clip_gradient": 0.1}, rule="replica"),
        "sgd": Case(params=WHOLE, rule="sgd", rule_params={"learning_rate": 0.05}),
        "Adam": Case("adam", {"learning_rate": 0.01}, batches={20: [4]}),
    }.items()
}
BY_HAND = {
    f"{rule}, by hand": Case(
        params={"learning_rate": 0.1, "momentum": 0.5}, rule=rule, model="by hand"
    )
    for rule in ("mirror", "sgd")
}
CASES = {**RULE_CASES, **REPLICAS, **OPTION_CASES, **NETWORKS, **BY_HAND}
FEW_CASES = {**RULE_CASES, **NETWORKS, **BY_HAND}
SOME_CASES = {
    **FEW_CASES, **REPLICAS,
    "mirror, batch 10": OPTION_CASES["mirror, batch 10"],
    "mirror, uneven batches": OPTION_CASES["mirror, uneven batches"],
}
PLAIN_MIRROR = {  # a plain gluon.Trainer, whose settings are the environment's
    "plain": Case(params=WHOLE, warmup=3),
    "multipliers": Case(params=WHOLE, warmup=3, multipliers=MULTIPLIERS, batch=8),
    "lr, wd": Case(params=WHOLE, warmup=3, changes={6: {"lr": 0.02}, 9: {"wd": 0.1}}),
    "Factor": Case(params=WHOLE, warmup=3, schedule=FACTOR),
    "network": Case(params=WHOLE, warmup=3, model="network", batch=6),
}
PLAIN_SGD = {
    name: replace(case, warmup=0, rule="sgd", rule_params={"learning_rate": 0.03})
    for name, case in PLAIN_MIRROR.items()
}
MIRROR_ENV = {"ODSGD_LOCAL_OPTIMIZER": "mirror", "ODSGD_WARMUP_STEPS": "3"}
SGD_ENV = {
    "ODSGD_LOCAL_OPTIMIZER": "sgd", "ODSGD_WARMUP_STEPS": "0", "ODSGD_LOCAL_LR": "0.03",
}
JOBS = {  # workers, servers, environment, cases
    "1 worker, 2 servers": (1, 2, CUT, FEW_CASES),
    "2 workers, 1 server": (2, 1, {}, FEW_CASES),
    "2 workers, 2 servers": (2, 2, CUT, CASES),
    "3 workers, 2 servers": (3, 2, CUT, SOME_CASES),
    "plain, mirror": (2, 1, MIRROR_ENV, PLAIN_MIRROR),
    "plain, sgd": (2, 1, SGD_ENV, PLAIN_SGD),
}


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
        options.pop("learning_rate", None)
        options["lr_scheduler"] = getattr(mx.lr_scheduler, name)(**arguments)
    if is_plain:
        return mx.gluon.Trainer(params, case.optimizer, options, kvstore="dist_odsgd")
    return odsgd_kvstore.Trainer(
        params, case.optimizer, options, local_optimizer=case.rule,
        local_optimizer_params=case.rule_params, warmup_steps=case.warmup,
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


def train(case, is_plain, rank, watched=True):
    """Train a case; what was seen, by step and parameter.

    Not watched, nothing is waited for before the end, and W is not looked at.
    """
    mx.random.seed(100 + rank)  # so that only rank 0's initial weights count
    params, loss_of = build(case.model)
    trainer = make_trainer(case, params, is_plain)
    seen = {"start": [copies(params)], "gradient": [], "local": [], "global": []}
    for step in range(1, STEPS + 1):
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


def train_all(cases, is_plain):
    """On a worker: every case; given all, the rules once more without looking at W."""
    rank = int(os.environ["ODSGD_LOCAL_RANK"])
    seen = {name: train(case, is_plain, rank) for name, case in cases.items()}
    if len(cases) == len(CASES):
        for name, case in RULE_CASES.items():
            seen["unwatched", name] = train(case, is_plain, rank, watched=False)
    return seen


@pytest.fixture(scope="module")
def jobs():
    """What each rank of a job saw; a job runs when it is first asked for."""
    done = {}

    def run(name):
        if name not in done:
            workers, servers, env, cases = JOBS[name]
            is_plain = name.startswith("plain")
            done[name] = run_local(
                lambda: train_all(cases, is_plain), workers, servers, LIMIT_S, env
            )
        return done[name]

    return run


ALL = [(job, name) for job, (_, _, _, cases) in JOBS.items() for name in cases]
QUADRATIC = [pair for pair in ALL if "network" not in pair[1]]


def assert_close(got, want, exact, where):
    """Equal for every parameter: bit for bit, or to TOLERANCE of the largest weight."""
    for key in want:
        if exact:
            np.testing.assert_array_equal(got[key], want[key], err_msg=f"{where} {key}")
            continue
        error = np.abs(got[key].astype("float64") - want[key]).max()
        limit = TOLERANCE * np.abs(want[key]).max()
        assert error <= limit, f"{where}, parameter {key}: off by {error}"


@pytest.mark.parametrize("job, name", ALL)
def test_weights_equal_the_oracle_after_every_step(jobs, job, name):
    seen, case = [rank[name] for rank in jobs(job)], JOBS[job][3][name]
    want = replay(case, seen[0]["start"][0], [rank["gradient"] for rank in seen])
    exact = len(seen) < 3 and case.optimizer == "sgd" and case.rule != "adam"
    for step, (rank, got) in itertools.product(range(STEPS), enumerate(seen)):
        for what, wanted in (("global", want.global_weights),
                             ("local", want.local_weights[rank])):
            where = f"{what}, rank {rank}, step {step + 1}"
            assert_close(got[what][step], wanted[step], exact, where)


@pytest.mark.parametrize("job, name", ALL)
def test_ranks_agree_on_the_global_weights_bit_for_bit(jobs, job, name):
    seen = [rank[name] for rank in jobs(job)]
    want = seen[0]["global"] + seen[0]["global"][-1:]
    for got in seen:
        assert len(got["global"]) == STEPS
        for mine, rank_0s in zip(got["global"] + got["end"], want):
            assert_close(mine, rank_0s, True, "W")


@pytest.mark.parametrize("job, name", QUADRATIC)
def test_gradients_are_those_at_the_local_weights(jobs, job, name):
    quadratic = QUADRATICS[JOBS[job][3][name].model]
    for rank, seen in enumerate(rank[name] for rank in jobs(job)):
        beneath = seen["start"] + seen["local"]
        for step, gradients in enumerate(seen["gradient"], start=1):
            for key, gradient in gradients.items():
                away = beneath[step - 1][key] - quadratic.optimum(key, rank, step)
                np.testing.assert_array_equal(gradient, quadratic.curvature(key) * away)


@pytest.mark.parametrize("name", RULE_CASES)
def test_training_is_the_same_when_nobody_looks_at_the_global_weights(jobs, name):
    for rank in jobs("2 workers, 2 servers"):
        watched, unwatched = rank[name], rank["unwatched", name]
        assert unwatched["global"] == []
        for what in ("start", "gradient", "local", "end"):
            for mine, theirs in zip(unwatched[what], watched[what]):
                assert_close(mine, theirs, True, what)


@pytest.mark.parametrize("job", ["2 workers, 2 servers", "3 workers, 2 servers"])
@pytest.mark.parametrize("name", ["mirror", "mirror without momentum", "auto"])
def test_mean_of_the_local_weights_is_the_next_global_weight(jobs, job, name):
    seen = [rank[name] for rank in jobs(job)]
    for step, want in enumerate(seen[0]["global"]):
        local = [rank["local"][step] for rank in seen]
        mean = {key: np.mean([w[key] for w in local], 0, "float64") for key in want}
        assert_close(mean, want, False, f"step {step + 1}")


# N = 2, lr = 0.1, mu = 0.5, W(0) = 0, loss (w - 1)^2 / 2 on rank 0, (w - 3)^2 / 2 on
# rank 1, so g(0,t) = L(0,t) - 1 and g(1,t) = L(1,t) - 3. mirror:
#
#   t  g(0,t)  g(1,t)  m = mu m - lr sum g     W(t+1)  L(0,t+1), L(1,t+1) =
#                                                      W(t) + mu (W(t)-W(t-1)) - 2 lr g
#   0  -1      -3      0.4                     0.4     0.2                  0.6
#   1  -0.8    -2.4    0.2 + 0.32 = 0.52       0.92    0.4+0.2+0.16 = 0.76  1.08
#   2  -0.24   -1.92   0.26 + 0.216 = 0.476    1.396   0.92+0.26+0.048      1.564
#   3   0.228  -1.436  0.238 + 0.1208 = 0.3588 1.7548  1.396+0.238-0.0456   1.9212
#
# sgd, L(i,t+1) = W(t) - 2 lr g: the same first step, then
#
#   1  -0.8    -2.4    0.2 + 0.32 = 0.52       0.92    0.4+0.16 = 0.56      0.88
#   2  -0.44   -2.12   0.26 + 0.256 = 0.516    1.436   0.92+0.088 = 1.008   1.344
#   3   0.008  -1.656  0.258 + 0.1648 = 0.4228 1.8588  1.436-0.0016         1.7672
@pytest.mark.parametrize("job", ["2 workers, 1 server", "2 workers, 2 servers"])
@pytest.mark.parametrize(
    "rule, global_, local_0, local_1",
    [
        ("mirror", [0.4, 0.92, 1.396, 1.7548], [0.2, 0.76, 1.228, 1.5884],
         [0.6, 1.08, 1.564, 1.9212]),
        ("sgd", [0.4, 0.92, 1.436, 1.8588], [0.2, 0.56, 1.008, 1.4344],
         [0.6, 0.88, 1.344, 1.7672]),
    ],
)
def test_quadratic_equals_the_hand_computed_numbers(
    jobs, job, rule, global_, local_0, local_1
):
    seen = [rank[f"{rule}, by hand"] for rank in jobs(job)]
    for rank, local in enumerate([local_0, local_1]):
        for what, want in (("global", global_), ("local", local)):
            got = [weights[0].item() for weights in seen[rank][what][: len(want)]]
            np.testing.assert_allclose(got, want, 0, TOLERANCE * max(want))
