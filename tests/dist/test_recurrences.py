"""Real jobs against numpy: every weight of every rank after every one of 20 steps.

Each job trains all its cases once, a trainer per case, and every rank returns what it
computed its gradients to be and which weights it then had; the oracle is fed with
these gradients (`algorithm.md`, invariant 5).
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from odsgd_kvstore.testing import run_local
from oracle import Case, replay

STEPS = 20
TOLERANCE = 2e-6  # of the largest weight
BOUND = 64  # numbers; the larger parameter of each model is cut over the servers
CUT = {"MXNET_KVSTORE_BIGARRAY_BOUND": str(BOUND)}
SHAPES = ((7,), (10, 13))
SGD = {"learning_rate": 0.1}
MOMENTUM = {"learning_rate": 0.0625, "momentum": 0.75}
WHOLE = {**MOMENTUM, "wd": 0.01}
MULTIPLIERS = {1: {0: (2.0, 0.0)}, 9: {0: (0.5, 3.0), 1: (1.5, 2.0)}}
SMALLER = {6: [3], 12: [2, 5, 1], 20: [1]}
UNEVEN_FIRST = {1: [4, 8, 2], 7: [2, 1, 4]}

RULE_CASES = {
    "none": Case(params=WHOLE, rule="none"),
    "mirror": Case(params=WHOLE, rule="mirror"),
    "mirror without momentum": Case(params={**SGD, "wd": 0.01}, rule="mirror"),
    "replica": Case(params=WHOLE, rule="replica"),
    "sgd": Case(params=WHOLE, rule="sgd"),
    "sgd with its own lr": Case(
        params=WHOLE, rule="sgd", rule_params={"learning_rate": 0.03}
    ),
    "sgd with its own momentum, wd and clip": Case(
        params=WHOLE, rule="sgd",
        rule_params={"momentum": 0.3, "wd": 0.1, "clip_gradient": 0.7},
    ),
    "adam": Case(params=WHOLE, rule="adam", rule_params={"learning_rate": 0.02}),
    "nag": Case(params=WHOLE, rule="nag", rule_params={"momentum": 0.6}),
    "auto": Case(params=WHOLE),
    "auto for NAG": Case("nag", WHOLE),
    "auto for Adam": Case("adam", {"learning_rate": 0.02}),
}
CLIPS = {
    f"{rule}, clip": Case(params={**WHOLE, "clip_gradient": 0.5}, rule=rule)
    for rule in ("mirror", "replica", "sgd", "nag")
}
REPLICAS = {
    f"replica of {name}": Case(
        name, {"learning_rate": 0.02, "wd": 0.01, "clip_gradient": 2.0}, "replica",
        batch=4, warmup=2, multipliers=MULTIPLIERS,
    )
    for name in ("nag", "adam", "rmsprop", "adadelta")
}
REPLICAS["replica of nag, momentum"] = Case("nag", WHOLE, "replica", warmup=1)
ONCE_RESCALED = {
    f"{rule}, batch {batch}": Case(params=WHOLE, rule=rule, batch=batch)
    for rule, batch in (("mirror", 10), ("replica", 32), ("sgd", 10))
}
WARMUPS = {
    f"{rule}, warm-up {steps}": Case(params=WHOLE, rule=rule, warmup=steps)
    for rule in ("mirror", "replica", "sgd", "none") for steps in (1, 5)
}
CHANGES = {
    f"{rule}, {name}": Case(params=WHOLE, rule=rule, warmup=1, **change)
    for rule in ("mirror", "replica", "sgd")
    for name, change in {
        "set_learning_rate": {"changes": {8: {"learning_rate": 0.02}}},
        "lr, wd": {"changes": {5: {"lr": 0.03}, 11: {"wd": 0.1}, 12: {"lr": 0.1}}},
        "momentum": {"changes": {7: {"momentum": 0.25}}},
        "clip": {"changes": {7: {"clip_gradient": 0.3}}},
        "multipliers": {"multipliers": MULTIPLIERS},
        "smaller batches": {"batch": 5, "batches": SMALLER},
        "uneven first batch": {"batch": 4, "batches": UNEVEN_FIRST},
        "paused": {"paused": {0: range(8, 12)}, "multipliers": MULTIPLIERS},
    }.items()
}
NO_LR = {"momentum": 0.5, "wd": 0.01}
FACTOR = ("FactorScheduler", {"step": 4, "factor": 0.5, "base_lr": 0.2})
SCHEDULES = {
    f"{rule}, {schedule[0]}": Case(params=NO_LR, rule=rule, schedule=schedule, **more)
    for rule, more in (("mirror", {}), ("replica", {"warmup": 2}), ("sgd", {}))
    for schedule in (
        FACTOR,
        ("MultiFactorScheduler", {"step": [3, 9], "factor": 0.25, "base_lr": 0.2}),
        ("PolyScheduler", {"max_update": 15, "pwr": 2, "base_lr": 0.2}),
        ("CosineScheduler", {"max_update": 18, "final_lr": 0.01, "base_lr": 0.2}),
    )
}
SCHEDULES["paused, FactorScheduler"] = Case(
    params=NO_LR, schedule=FACTOR, paused={1: [2, 3, 4, 5, 6]}, warmup=3
)
NETWORKS = {
    f"network, {name}": replace(case, model="network", batch=6)
    for name, case in {
        "mirror": Case(params=WHOLE, multipliers=MULTIPLIERS, warmup=5),
        "replica": Case(params={**WHOLE, "clip_gradient": 0.1}, rule="replica"),
        "sgd": Case(params=WHOLE, rule="sgd", rule_params={"learning_rate": 0.05}),
        "Adam": Case("adam", {"learning_rate": 0.01}, batches={20: [4]}),
    }.items()
}
EXACT = []
CASES = {
    **RULE_CASES, **CLIPS, **REPLICAS, **ONCE_RESCALED, **WARMUPS, **CHANGES,
    **SCHEDULES, **NETWORKS,
}
PLAIN_CASES = {
    "plain": Case(params=WHOLE),
    "plain, multipliers": Case(params=WHOLE, multipliers=MULTIPLIERS, batch=8),
    "plain, lr and wd": Case(params=WHOLE, changes={6: {"lr": 0.02}, 9: {"wd": 0.1}}),
    "plain, FactorScheduler": Case(params=NO_LR, schedule=FACTOR),
    "plain, network": Case(params=WHOLE, model="network", batch=6),
}


def plain(rule, warmup, **rule_params):
    """The cases of a plain gluon.Trainer, whose settings are the environment's."""
    return {
        name: replace(case, rule=rule, warmup=warmup, rule_params=rule_params)
        for name, case in PLAIN_CASES.items()
    }


SETTINGS_MIRROR = {"ODSGD_LOCAL_OPTIMIZER": "mirror", "ODSGD_WARMUP_STEPS": "3"}
SETTINGS_SGD = {
    "ODSGD_LOCAL_OPTIMIZER": "sgd", "ODSGD_WARMUP_STEPS": "0", "ODSGD_LOCAL_LR": "0.03",
}
JOBS = {  # workers, servers, environment, cases
    "1 worker, 1 server": (1, 1, {}, CASES),
    "1 worker, 2 servers": (1, 2, CUT, {**RULE_CASES, **NETWORKS}),
    "2 workers, 1 server": (2, 1, {}, CASES),
    "2 workers, 2 servers": (2, 2, CUT, CASES),
    "3 workers, 2 servers": (3, 2, CUT, CASES),
    "plain, mirror": (2, 2, {**CUT, **SETTINGS_MIRROR}, plain("mirror", 3)),
    "plain, sgd": (2, 1, SETTINGS_SGD, plain("sgd", 0, learning_rate=0.03)),
}


def curvature(key):
    """The second derivative of the quadratic, element by element."""
    size = int(np.prod(SHAPES[key]))
    return np.linspace(0.25, 1.5, size, dtype=np.float32).reshape(SHAPES[key])


def optimum(key, rank, step):
    """The optimum of a rank's quadratic, another one at each step."""
    random = np.random.RandomState(1000 * step + 10 * rank + key)
    return random.normal(rank, 1, SHAPES[key]).astype(np.float32)


def build(model):
    """(parameters, loss of a step on a rank) of a model."""
    import mxnet as mx

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
    params = [mx.gluon.Parameter(f"p{k}", shape=s) for k, s in enumerate(SHAPES)]
    for param in params:
        param.initialize(mx.init.Normal(1))

    def quadratic(rank, step):
        terms = []
        for key, param in enumerate(params):
            away = param.data() - mx.nd.array(optimum(key, rank, step))
            terms.append((mx.nd.array(curvature(key)) * away * away).sum() / 2)
        return terms[0] + terms[1]

    return params, quadratic


def make_trainer(case, params, is_plain):
    """The trainer of a case: ours, or MXNet's with nothing but the flag."""
    import mxnet as mx
    import odsgd_kvstore

    options = dict(case.params)
    if case.schedule is not None:
        name, arguments = case.schedule
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


def train(case, steps, is_plain, rank, watched=True):
    """Train a case; what was seen, by step and parameter.

    Not watched, nothing is waited for before the end, and W is not looked at.
    """
    import mxnet as mx
    import odsgd_kvstore

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
        name: [{k: array.asnumpy() for k, array in weights.items()} for weights in by_step]
        for name, by_step in seen.items()
    }


def copies(params):
    """The parameters' values; returns before they are there."""
    return {key: param.data().copy() for key, param in enumerate(params)}


def train_all(cases, is_plain):
    """On a worker: every case, and those of RULE_CASES once more without looking."""
    import os

    rank = int(os.environ["DMLC_WORKER_ID"])  # the launcher's; the store checks it
    seen = {name: train(case, STEPS, is_plain, rank) for name, case in cases.items()}
    if not is_plain:
        for name, case in RULE_CASES.items():
            seen["unwatched", name] = train(case, STEPS, False, rank, watched=False)
    return seen


@pytest.fixture(scope="module")
def jobs():
    """What each rank of a job saw; a job runs when it is first asked for."""
    done = {}

    def run(name):
        if name not in done:
            workers, servers, env, cases = JOBS[name]
            is_plain = cases is not CASES and name.startswith("plain")
            done[name] = run_local(
                lambda: train_all(cases, is_plain), workers, servers, 120, env
            )
        return done[name]

    return run


ALL = [(job, name) for job, (_, _, _, cases) in JOBS.items() for name in cases]
OURS = [pair for pair in ALL if not pair[0].startswith("plain")]


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
    exact = len(seen) < 3 and case in EXACT
    for step, (rank, got) in itertools.product(range(STEPS), enumerate(seen)):
        where = f"rank {rank}, step {step + 1}"
        assert_close(got["global"][step], want.global_weights[step], exact, f"W, {where}")
        assert_close(
            got["local"][step], want.local_weights[rank][step], exact, f"L, {where}"
        )


@pytest.mark.parametrize("job, name", ALL)
def test_ranks_agree_on_the_global_weights_bit_for_bit(jobs, job, name):
    first, *others = [rank[name] for rank in jobs(job)]
    for got in [first, *others]:
        assert len(got["global"]) == STEPS
        for mine, rank_0s in zip(got["global"] + got["end"],
                                 first["global"] + first["global"][-1:]):
            assert_close(mine, rank_0s, True, "W")


@pytest.mark.parametrize("job, name", [p for p in OURS if CASES[p[1]].model[0] == "q"])
def test_gradients_are_those_at_the_local_weights(jobs, job, name):
    for rank, seen in enumerate(rank[name] for rank in jobs(job)):
        beneath = seen["start"] + seen["local"]
        for step, gradients in enumerate(seen["gradient"], start=1):
            for key, gradient in gradients.items():
                away = beneath[step - 1][key] - optimum(key, rank, step)
                np.testing.assert_array_equal(gradient, curvature(key) * away)


@pytest.mark.parametrize("job", [job for job in JOBS if job[0] in "12"])
@pytest.mark.parametrize("name", RULE_CASES)
def test_training_is_the_same_when_nobody_looks_at_the_global_weights(jobs, job, name):
    for rank in jobs(job):
        watched, unwatched = rank[name], rank["unwatched", name]
        assert unwatched["global"] == []
        for what in ("start", "gradient", "local", "end"):
            for mine, theirs in zip(unwatched[what], watched[what]):
                assert_close(mine, theirs, True, what)


@pytest.mark.parametrize("job", ["2 workers, 2 servers", "3 workers, 2 servers"])
@pytest.mark.parametrize("name", ["mirror", "mirror without momentum", "auto"])
def test_mean_of_the_local_weights_is_the_next_global_weight(jobs, job, name):
    seen = [rank[name] for rank in jobs(job)]
    for step in range(STEPS):
        mean = {
            key: np.mean([rank["local"][step][key] for rank in seen], axis=0, dtype="f8")
            for key in range(len(SHAPES))
        }
        assert_close(mean, seen[0]["global"][step], False, f"step {step + 1}")
