"""`mirror` of NAG and Adam, and `dcsgd`, in real jobs against numpy.

As in `test_recurrences.py`: every weight of every rank after every step. Here each rule
is tried with every option that the others are tried with, in slices and in packs.
"""

import os
from dataclasses import replace

import large
import numpy as np
import pytest
from oracle import Case, replay
from oracle_rules import NAG
from recorded import (
    ADAM,
    CUT,
    FACTOR,
    MULTIPLIERS,
    OPTIONS,
    TOLERANCE,
    WHOLE,
    assert_close,
    assert_is_oracle,
    train,
    with_option,
)

from odsgd_kvstore.testing import run_local

LIMIT_S = 240  # of a job
LONG = 100  # steps
SLOW = {**WHOLE, "learning_rate": 0.02}  # for 4 workers and 100 steps
BETAS = {"changes": {7: {"beta1": 0.7}, 9: {"clip_gradient": 0.3}, 14: {"beta2": 0.9}}}
DCSGD = Case(params=WHOLE, rule="dcsgd", rule_params={"lamda": 1.0}, batch=8)
ADAPTIVE = replace(DCSGD, rule_params={"lamda": 0.5, "adaptive": True})
BASES = {
    "nag": Case("nag", WHOLE, "mirror"),
    "adam": Case("adam", {**ADAM, "wd": 0.02}, "mirror"),
    "dcsgd": DCSGD,
    "adaptive": ADAPTIVE,
}
OPTION_CASES = {
    f"{name}, {option}": with_option(base, option)
    for name, base in BASES.items()
    for option in OPTIONS
    if (name, option) != ("adam", "momentum, clip")
}
OWN_CASES = {  # what only these rules have
    "adam, betas": replace(BASES["adam"], **BETAS),
    "adam, epsilon": Case("adam", {**ADAM, "epsilon": 0.3}, "mirror"),
    "adam, no learning for a while": Case(
        "adam", ADAM, "mirror", changes={6: {"lr": 0.0}, 10: {"lr": 0.02}}
    ),
    "nag, no learning for a while": Case(
        "nag", WHOLE, "mirror", multipliers={5: {0: (0.0, 1.0)}, 9: {0: (2.0, 1.0)}}
    ),
    "nag, no momentum": Case("nag", {**WHOLE, "momentum": 0.0}, "mirror", warmup=1),
    "nag, momentum nearly off": Case(
        "nag", WHOLE, "mirror", changes={6: {"momentum": 0.01}, 9: {"momentum": 0.9}}
    ),
    "dcsgd, defaults": Case(params=WHOLE, rule="dcsgd"),
    "adaptive, default": replace(DCSGD, rule_params={"adaptive": True}),
    "dcsgd, lamda 0": Case(params=WHOLE, rule="dcsgd", rule_params={"lamda": 0}),
    "dcsgd, all its own": replace(
        DCSGD,
        params={**WHOLE, "clip_gradient": 0.1},
        rule_params={
            "lamda": 0.3,
            "learning_rate": 0.02,
            "wd": 0.05,
            "clip_gradient": 0.9,
            "rescale_grad": 0.7,
            "adaptive": False,
        },
        schedule=FACTOR,
        multipliers=MULTIPLIERS,
        batch=4,
    ),
    "dcsgd of adam": Case("adam", ADAM, "dcsgd", {"learning_rate": 0.05}, warmup=2),
    "adaptive of nag": replace(ADAPTIVE, optimizer="nag", warmup=2),
}
NETWORKS = {
    f"network, {name}": replace(case, model="network", batch=6, warmup=3)
    for name, case in BASES.items()
}
MEANS = {  # the mean of L is the next W
    f"mean, warm-up {warmup}{name}": Case(
        "nag", SLOW, "mirror", warmup=warmup, batch=2, **options
    )
    for warmup in (0, 3)
    for name, options in {
        "": {},
        ", changes": {
            "changes": {5: {"lr": 0.01}, 9: {"wd": 0.2}, 13: {"momentum": 0.5}},
            "multipliers": MULTIPLIERS,
        },
        ", network": {"model": "network"},
    }.items()
}
CASES = {**OPTION_CASES, **OWN_CASES, **NETWORKS, **MEANS}
FOUR = {
    **MEANS,
    **{f"four, {k}": with_option(BASES[k], "multipliers") for k in BASES},
}
JOBS = {"2 workers": (2, 2, CASES), "4 workers": (4, 1, FOUR)}
PLAIN = {  # a plain gluon.Trainer: the environment, and a case that says the same
    "auto of nag": ({}, Case("nag", WHOLE, "mirror", warmup=2)),
    "auto of adam": (
        {"ODSGD_LOCAL_OPTIMIZER": "auto"},
        Case("adam", ADAM, "mirror", warmup=2, multipliers=MULTIPLIERS),
    ),
    "mirror of nag": (
        {"ODSGD_LOCAL_OPTIMIZER": "mirror"},
        Case("nag", WHOLE, "mirror", warmup=2, changes={9: {"learning_rate": 0.01}}),
    ),
    "dcsgd": (
        {"ODSGD_LOCAL_OPTIMIZER": "dcsgd"},
        Case(params=WHOLE, rule="dcsgd", warmup=2),
    ),
    "DCSGD with its lr": (
        {"ODSGD_LOCAL_OPTIMIZER": "DCSGD", "ODSGD_LOCAL_LR": "0.03"},
        Case("nag", WHOLE, "dcsgd", {"learning_rate": 0.03}, warmup=2),
    ),
}
LONG_CASES = {
    f"long, warm-up {warmup}": Case(
        "nag", {**SLOW, "wd": 0.05}, "mirror", warmup=warmup
    )
    for warmup in (0, 20)
}


def train_all(name):
    """On a worker: every case of a job."""
    rank = int(os.environ["ODSGD_LOCAL_RANK"])
    seen = {k: train(case, False, rank) for k, case in JOBS[name][2].items()}
    if name == "4 workers":
        return seen
    for k, base in BASES.items():
        case = with_option(base, "multipliers")
        seen["unwatched", k] = train(case, False, rank, watched=False)
    for k, case in LONG_CASES.items():
        seen[k] = train(case, False, rank, steps=LONG)
    for k, (variables, case) in PLAIN.items():
        variables = {**variables, "ODSGD_WARMUP_STEPS": str(case.warmup)}
        os.environ.update(variables)
        seen[k] = train(case, True, rank)
        for variable in variables:
            del os.environ[variable]
    return seen


@pytest.fixture(scope="module")
def jobs():
    """What each rank of a job saw; a job runs when it is first asked for."""
    done = {}

    def run(name):
        if name not in done:
            workers, servers, _ = JOBS[name]
            done[name] = run_local(
                lambda: train_all(name), workers, servers, LIMIT_S, CUT
            )
        return done[name]

    return run


@pytest.mark.parametrize("job, name", [(j, n) for j in JOBS for n in JOBS[j][2]])
def test_weights_equal_the_oracle_after_every_step(jobs, job, name):
    assert_is_oracle([seen[name] for seen in jobs(job)], JOBS[job][2][name])


@pytest.mark.parametrize("name", PLAIN)
def test_weights_of_a_plain_trainer_equal_the_oracle(jobs, name):
    assert_is_oracle([seen[name] for seen in jobs("2 workers")], PLAIN[name][1])


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("name", MEANS)
def test_mean_of_the_local_weights_is_the_next_global_weight(jobs, job, name):
    seen = [rank[name] for rank in jobs(job)]
    warmup = MEANS[name].warmup
    for step, want in enumerate(seen[0]["global"]):
        local = [rank["local"][step] for rank in seen]
        mean = {key: np.mean([w[key] for w in local], 0, "float64") for key in want}
        assert_close(mean, want, False, f"step {step + 1}")
        differ = [np.any(local[0][key] != local[1][key]) for key in want]
        assert differ == [step >= warmup] * len(want)  # each has its own


# NAG makes L = W + mu mu m - (1 + mu) lr (g + wd W), so that L tells the worker's m.
# The servers' is the optimizer's in float64, fed with the sums of the gradients.
@pytest.mark.parametrize("name", LONG_CASES)
def test_momentum_from_displacements_is_the_servers_after_many_steps(jobs, name):
    ranks, case = [seen[name] for seen in jobs("2 workers")], LONG_CASES[name]
    assert_is_oracle(ranks, case)
    for key, start in ranks[0]["start"][0].items():
        weight = start.astype("float64")
        servers, hyper = NAG(weight), case.multiplied(case.values(1), 1, key)
        for step in range(LONG):
            momentum = servers.first
            both = sum(seen["gradient"][step][key].astype("float64") for seen in ranks)
            weight = servers(hyper, weight, both, 1.0)
        lr, mu, wd = float(hyper.lr), float(hyper.mu), float(hyper.wd)
        for seen in ranks:
            before = seen["global"][-2][key].astype("float64")
            own = 2.0 * seen["gradient"][-1][key] + wd * before
            followed = (seen["local"][-1][key] - before + (1 + mu) * lr * own) / mu**2
            error = np.abs(followed - momentum).max()
            assert error <= TOLERANCE * np.abs(before).max()


@pytest.mark.parametrize("name", BASES)
def test_training_is_the_same_when_nobody_looks_at_the_global_weights(jobs, name):
    for seen in jobs("2 workers"):
        watched, unwatched = seen[f"{name}, multipliers"], seen["unwatched", name]
        for what in ("start", "gradient", "local", "end"):
            np.testing.assert_equal(unwatched[what], watched[what])


# Slices, packs, pauses and assigned weights

SPLIT = {  # with other multipliers than before from step 4 on, in mid-pack
    1: {0: (2.0, 0.0), 3: (0.5, 1.0)},
    4: {0: (1.0, 3.0), 3: (1.0, 1.0), 6: (0.0, 0.5)},
}
PAUSES = {0: range(4, 6), 3: range(4, 6), 5: range(3, 6)}  # sliced, packed, alone
ASSIGNED = [(5, 0, 2.5), (5, 3, -1.5), (5, 2, 0.75)]  # sliced, packed, alone
LARGE = {
    f"{name}, {what}": (replace(base, **options), assigned)
    for name, base in BASES.items()
    for what, options, assigned in (
        ("multipliers", {"multipliers": SPLIT, "batch": 4}, ()),
        ("warm-up, multipliers", {"multipliers": SPLIT, "warmup": 3}, ()),
        ("pauses", {"paused": PAUSES, "multipliers": SPLIT, "warmup": 1}, ()),
        ("assigned", {}, ASSIGNED),
        ("assigned in warm-up", {"warmup": 6}, ASSIGNED),
    )
}


def train_large():
    """On a worker: every case of LARGE."""
    return {
        name: large.train(large.ours(), case, assigned)
        for name, (case, assigned) in LARGE.items()
    }


@pytest.fixture(scope="module")
def large_ones():
    """What each rank saw of parameters that are sliced, packed or neither."""
    return run_local(train_large, 2, 2, LIMIT_S, large.CUT)


@pytest.mark.parametrize("name", LARGE)
def test_slices_and_packs_equal_the_oracle_after_every_step(large_ones, name):
    case, assigned = LARGE[name]
    gradients = [
        [
            {key: large.gradient(step, rank, key) for key in range(len(large.SHAPES))}
            for step in range(1, large.STEPS + 1)
        ]
        for rank in range(len(large_ones))
    ]
    want = replay(case, large.start(), gradients, assigned)
    large.assert_is([seen[name] for seen in large_ones], want, TOLERANCE)
