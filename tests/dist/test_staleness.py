"""Staleness is 0 during warm-up, then 1, never more; proven by the weights' values.

Plain SGD, learning rate 1, rescale 1, W(0) = 0 and gradients that sum to -1 over
the workers make every element of W(t) equal t, exactly. With the local rule `none`
L(t+1) = W(t), so the weights that a forward pass sees tell their own age.
"""

import hashlib
import os
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import odsgd_kvstore
from odsgd_kvstore.config import Config
from odsgd_kvstore.testing import run_local

LIMIT_S = 120
SLOW_LIMIT_S = 240
SHAPES = [(3,), (7, 5), (1001,), (64, 33)]  # the last two are cut over the servers
BOUND = {"MXNET_KVSTORE_BIGARRAY_BOUND": "1000"}
SHARES = {2: [0.25, 0.75], 3: [0.5, 0.375, 0.125]}  # of the sum, by rank
STEPS = 12


def rank():
    return int(os.environ["ODSGD_LOCAL_RANK"])


def make_params(shapes=SHAPES, value=0.0):
    params = [gluon.Parameter(f"p{i}", shape=shape) for i, shape in enumerate(shapes)]
    for param in params:
        param.initialize(mx.init.Constant(value))
    return params


def make_trainer(params, **controls):
    sgd = {"learning_rate": 1.0}
    return odsgd_kvstore.Trainer(params, "sgd", sgd, **controls)


def backward(params, gradient):
    """Give each parameter exactly this gradient, and see what a forward pass sees."""
    with autograd.record():
        outputs = [param.data() * gradient for param in params]
    autograd.backward(outputs)
    return [param.data().asnumpy() for param in params]


def version(arrays):
    """The one number that all elements of all arrays have."""
    values = {float(v) for array in arrays for v in (array.min(), array.max())}
    assert len(values) == 1, f"versions are mixed: {values}"
    return values.pop()


def seen_versions(steps, pause_s=0.0, read_global=False, **controls):
    """Versions seen by the forward passes and pulled, and what `stats` says."""
    params = make_params()
    trainer = make_trainer(params, **controls)
    gradient = -SHARES[int(os.environ["DMLC_NUM_WORKER"])][rank()]
    locals_, globals_, said = [], [], []
    for _ in range(steps):
        locals_.append(version(backward(params, gradient)))
        time.sleep(pause_s * (rank() == 1))  # a load, not a synchronisation
        trainer.step(1)
        said.append(trainer.stats()["staleness"])
        if read_global:
            with trainer.global_weights():
                globals_.append(version([p.data().asnumpy() for p in params]))
    trainer.synchronize()
    last = version([p.data().asnumpy() for p in params])
    most = trainer.stats()["max_staleness"]
    seen = {"local": locals_, "global": globals_, "said": said}
    return {**seen, "last": last, "max": most}


def digest(arrays):
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def quadratic(steps=20, warmup_steps=5):
    """Digests of W and L after each step of a real problem, other data per rank."""
    params = make_params(value=0.5)
    sgd = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
    trainer = odsgd_kvstore.Trainer(params, "sgd", sgd, warmup_steps=warmup_steps)
    noise = np.random.RandomState(rank())
    global_, local = [], []
    for _ in range(steps):
        with autograd.record():
            losses = [
                ((p.data() - mx.nd.array(noise.randn(*p.shape))) ** 2).sum()
                for p in params
            ]
        autograd.backward(losses)
        trainer.step(2)
        local.append(digest([p.data().asnumpy() for p in params]))
        with trainer.global_weights():
            global_.append(digest([p.data().asnumpy() for p in params]))
    return {"global": global_, "local": local}


def constant_pushes(warmup_steps, pushes=10, rate=0.125, gradient=0.5):
    """What k constant pushes at the store level make of W, every time."""
    store = odsgd_kvstore.ODSGDStore(Config(warmup_steps=warmup_steps))
    store.set_optimizer(mx.optimizer.SGD(learning_rate=rate))
    weights = [mx.nd.ones(shape) for shape in SHAPES]
    store.init(list(range(len(SHAPES))), weights)
    pulled = [mx.nd.zeros(shape) for shape in SHAPES]
    values = []
    for _ in range(pushes):
        for key, weight in enumerate(weights):
            store.pushpull(key, mx.nd.full(weight.shape, gradient), out=weight)
        for key, out in enumerate(pulled):
            store.pull(key, out=out)
        values.append(version([out.asnumpy() for out in pulled]))
    return values


def many_cases():
    return {
        "none, warm-up 3": seen_versions(STEPS, local_optimizer="none", warmup_steps=3),
        "none, warm-up 0": seen_versions(
            STEPS, local_optimizer="none", warmup_steps=0, read_global=True
        ),
        "none, warm-up all": seen_versions(
            STEPS, local_optimizer="none", warmup_steps=STEPS
        ),
        "none, delay 0": seen_versions(
            STEPS, local_optimizer="none", warmup_steps=0, delay=0
        ),
        "quadratic": quadratic(),
        "constant": [constant_pushes(warmup) for warmup in (0, 4, 200)],
    }


def all_cases_of(num_workers):
    return run_local(many_cases, num_workers, 2, timeout=LIMIT_S, env=BOUND)


@pytest.fixture(scope="module")
def two_workers():
    return all_cases_of(2)


@pytest.fixture(scope="module")
def three_workers():
    return all_cases_of(3)


@pytest.fixture(params=["two_workers", "three_workers"])
def ranks(request):
    """What each rank of a job on 2 servers saw."""
    return request.getfixturevalue(request.param)


def ages(seen):
    return [step - v for step, v in enumerate(seen["local"])]


@pytest.mark.parametrize("case, expected", [
    # L(0) to L(K) are W(0) to W(K); L(t) is W(t-1) from t = K + 1 on.
    ("none, warm-up 3", [0] * 4 + [1] * (STEPS - 4)),
    ("none, warm-up 0", [0] + [1] * (STEPS - 1)),
    ("none, warm-up all", [0] * STEPS),
    ("none, delay 0", [0] * STEPS),
])  # fmt: skip
def test_the_weights_beneath_a_gradient_tell_their_age(ranks, case, expected):
    for rank in ranks:
        assert ages(rank[case]) == expected
        assert rank[case]["said"] == expected
        assert rank[case]["max"] == max(expected)
        assert rank[case]["last"] == STEPS


def test_every_pull_holds_one_version_of_all_keys(ranks):
    for rank in ranks:
        assert rank["none, warm-up 0"]["global"] == list(range(1, STEPS + 1))


def test_global_weights_are_the_same_bits_on_every_rank_at_every_step(ranks):
    first = ranks[0]["quadratic"]
    for rank in ranks[1:]:
        assert rank["quadratic"]["global"] == first["global"]
    assert len(set(first["global"])) == 20  # they do change


def test_local_weights_are_global_during_warm_up_and_each_ranks_own_after(ranks):
    first = ranks[0]["quadratic"]
    for rank in (other["quadratic"] for other in ranks[1:]):
        assert rank["local"][:5] == rank["global"][:5]
        assert not set(rank["local"][5:]) & set(first["local"][5:])
        assert not set(rank["local"][5:]) & set(first["global"][5:])


def test_k_constant_pushes_move_the_weights_by_k_n_c_lr(ranks):
    # W(k) = 1 - k N 0.5 0.125, exact in float32.
    expected = [1 - k * len(ranks) * 0.0625 for k in range(1, 11)]
    for rank in ranks:
        assert rank["constant"] == [expected] * 3


def test_a_slow_worker_makes_nobody_staler():
    steps, warmup = 500, 10
    ranks = run_local(
        lambda: seen_versions(
            steps, pause_s=0.2, local_optimizer="none", warmup_steps=warmup
        ),
        3, 2, timeout=SLOW_LIMIT_S, env=BOUND,
    )  # fmt: skip
    expected = [0] * (warmup + 1) + [1] * (steps - warmup - 1)
    for seen in ranks:
        assert ages(seen) == expected
        assert (seen["said"], seen["max"]) == (expected, 1)
        assert seen["last"] == steps
