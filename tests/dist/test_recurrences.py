"""Real jobs against numpy: every weight of every rank after every one of 20 steps.

Each job trains all its cases once, a trainer per case, and every rank returns its
gradients and the weights it then had; the oracle is fed with these gradients.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
from oracle import QUADRATICS, Case
from recorded import (
    ADAM,
    CUT,
    FACTOR,
    MULTIPLIERS,
    OPTIONS,
    PLAIN,
    STEPS,
    TOLERANCE,
    WHOLE,
    assert_close,
    assert_is_oracle,
    train,
    with_option,
)

from odsgd_kvstore.testing import run_local

LIMIT_S = 240  # of a job
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
        name,
        {**ADAM, "wd": 0.01, "clip_gradient": 2.0},
        "replica",
        batch=4,
        warmup=2,
        multipliers=MULTIPLIERS,
    )
    for name in ("nag", "adam", "rmsprop", "adadelta")
}
REPLICAS["replica of nag, momentum"] = Case("nag", WHOLE, "replica", warmup=1)
OPTION_CASES = {
    f"{rule}, {name}": with_option(Case(params=WHOLE, rule=rule), name)
    for rule in ("mirror", "replica", "sgd")
    for name in OPTIONS
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
    **FEW_CASES,
    **REPLICAS,
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
    "ODSGD_LOCAL_OPTIMIZER": "sgd",
    "ODSGD_WARMUP_STEPS": "0",
    "ODSGD_LOCAL_LR": "0.03",
}
JOBS = {  # workers, servers, environment, cases
    "1 worker, 2 servers": (1, 2, CUT, FEW_CASES),
    "2 workers, 1 server": (2, 1, {}, FEW_CASES),
    "2 workers, 2 servers": (2, 2, CUT, CASES),
    "3 workers, 2 servers": (3, 2, CUT, SOME_CASES),
    "plain, mirror": (2, 1, MIRROR_ENV, PLAIN_MIRROR),
    "plain, sgd": (2, 1, SGD_ENV, PLAIN_SGD),
}


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


@pytest.mark.parametrize("job, name", ALL)
def test_weights_equal_the_oracle_after_every_step(jobs, job, name):
    ranks, case = [seen[name] for seen in jobs(job)], JOBS[job][3][name]
    is_exact = len(ranks) < 3 and case.optimizer == "sgd" and case.rule != "adam"
    assert_is_oracle(ranks, case, is_exact)


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
        (
            "mirror",
            [0.4, 0.92, 1.396, 1.7548],
            [0.2, 0.76, 1.228, 1.5884],
            [0.6, 1.08, 1.564, 1.9212],
        ),
        (
            "sgd",
            [0.4, 0.92, 1.436, 1.8588],
            [0.2, 0.56, 1.008, 1.4344],
            [0.6, 0.88, 1.344, 1.7672],
        ),
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
