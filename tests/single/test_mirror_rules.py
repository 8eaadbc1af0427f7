"""`mirror` of NAG and Adam on arrays, with MXNet's own optimizers as the servers'."""

import logging

import mxnet as mx
import numpy as np
import pytest
from mxnet import ndarray as nd
from mxnet import optimizer as opt

import odsgd_kvstore
from odsgd_kvstore import connection, local_update
from odsgd_kvstore.errors import ConfigError
from odsgd_kvstore.local_update import Part
from odsgd_kvstore.optimizer_state import Run

SIZE = 24
TOLERANCE = 2e-6  # of the largest weight
NAG = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.02}
ADAM = {"learning_rate": 0.01, "wd": 0.02}
KINDS = {"sgd": opt.SGD, "nag": opt.NAG, "adam": opt.Adam}
LISTED = ["SGD", "ccSGD", "NAG", "Adam"]


@pytest.fixture(autouse=True)
def own_connection(monkeypatch):
    """A job of one worker for each test."""
    monkeypatch.setattr(connection, "_failure", None)
    monkeypatch.setattr(connection, "_open", None)


def draw(seed, size=SIZE):
    """A float32 array."""
    return np.random.RandomState(seed).randn(size).astype(np.float32)


class Workers:
    """Some workers' rules and the servers' optimizer, on one array; never waits.

    Attributes
    ----------
    weight, before : NDArray
        W(t) and W(t-1).
    local : list of NDArray
        L(i,t) of each worker.
    state : NDArray or tuple
        The servers', as MXNet's optimizer keeps it.
    """

    def __init__(self, name, settings, rule, workers, weight, params=None):
        self.weight = self.before = nd.array(weight)
        self.local = [self.weight] * workers
        rescale = 1 / workers
        self._servers = KINDS[name](**settings, rescale_grad=rescale)
        self.state = self._servers.create_state(0, self.weight)
        self._rules = []
        for _ in range(workers):
            seen = KINDS[name](**settings, rescale_grad=77.0)  # must not be used
            made = local_update.create(rule, params or {}, seen, rescale * workers)
            self._rules.append(made)
        self._updates = 0

    def step(self, gradients, is_warm=False, **changes):
        """One step; `changes` hold from it on."""
        self._updates += 1
        for name, value in changes.items():
            setattr(self._servers, name, value)
        for rule in self._rules:
            rule.follow(changes, self._updates)
        after = self._global_update(sum(gradients[1:], gradients[0]))
        made = [self._local_update(*pair, is_warm) for pair in enumerate(gradients)]
        self.local = [after] * len(made) if is_warm else made
        self.before, self.weight = self.weight, after

    def _global_update(self, gradient):
        weight = self.weight.copy()
        arguments = 0, weight, gradient, self.state
        if self._servers.aggregate_num:
            arguments = tuple([argument] for argument in arguments)
        self._servers.update(*arguments)
        return weight

    def _local_update(self, worker, gradient, is_warm):
        rule, local = self._rules[worker], self.local[worker].copy()
        run = Run(0, self.weight.size, (0,))
        part = Part(0, 10, run, self._updates - 1, self.weight)
        before = self.before.copy() if rule.keeps_previous else None
        call = rule.observe if is_warm else rule.update
        call(part, local, self.weight, before, gradient)
        return local


CHANGES = {  # step: what holds from it on
    "nag": {20: {"lr": 0.1}, 40: {"momentum": 0.6}, 60: {"wd": 0.1}, 80: {"lr": 0.02}},
    "adam": {20: {"lr": 0.02}, 40: {"beta1": 0.7}, 60: {"wd": 0.1}, 80: {"beta2": 0.9}},
}


def run(name, settings, workers, steps, warmup=0, changes=None):
    """Train on random gradients, another one for each worker and step."""
    made = Workers(name, settings, "mirror", workers, draw(7))
    for step in range(steps):
        gradients = [nd.array(draw(1000 * step + i)) for i in range(workers)]
        given = (changes or {}).get(step, {})
        made.step(gradients, is_warm=step < warmup, **given)
        yield made


def numbers(arrays):
    """NDArrays side by side in one of numpy, in float64."""
    return nd.stack(*arrays).asnumpy().astype("float64")


def close(one, other, tolerance=TOLERANCE):
    """Rows equal to `tolerance` of the largest number of the second's."""
    limit = tolerance * np.abs(other).max(-1)
    off = np.abs(one - other).max(-1)
    assert (off <= limit).all(), f"off by {np.max(off / limit)} of what is allowed"


@pytest.mark.parametrize("name, settings", [("nag", NAG), ("adam", ADAM)])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("warmup", [0, 15])
def test_one_worker_is_the_optimizer_over_many_steps(name, settings, clip, warmup):
    settings = {**settings, "clip_gradient": clip}
    steps = run(name, settings, 1, 100, warmup, CHANGES[name])
    local, weights = zip(*((made.local[0], made.weight) for made in steps))
    close(numbers(local), numbers(weights))


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("warmup", [0, 15])
def test_mean_of_nag_s_mirrors_over_the_workers_is_the_next_weight(workers, warmup):
    steps = run("nag", NAG, workers, 100, warmup, CHANGES["nag"])
    local, weights = zip(*((nd.stack(*made.local), made.weight) for made in steps))
    close(numbers(local).mean(1), numbers(weights))


def test_momentum_of_nag_is_the_servers_after_many_steps():
    # L = W + mu mu m - (1 + mu) lr (g + wd W), so that L tells the worker's m, to the
    # rounding of W. After the last change of CHANGES mu is 0.6, lr 0.02 and wd 0.1.
    changes, mu, lr, wd = CHANGES["nag"], 0.6, 0.02, 0.1
    *_, made = run("nag", NAG, 4, 100, changes=changes)
    momentum, weight, gradient = made.state.asnumpy(), made.weight.asnumpy(), draw(5)
    made.step([nd.array(gradient)] * 4)
    moved = numbers(made.local) - weight + (1 + mu) * lr * (gradient + wd * weight)
    assert np.abs(moved / mu**2 - momentum).max() <= 5e-7 * np.abs(weight).max()
    assert np.abs(momentum).max() > 0.01


def test_mean_of_adam_s_mirrors_is_near_the_next_weight_only():
    # Each worker divides by its own gradient's size, so this is not an invariant.
    *_, made = run("adam", ADAM, 4, 50)
    off = np.abs(numbers(made.local).mean(0) - made.weight.asnumpy()).max()
    assert 1e-4 < off < 3 * ADAM["learning_rate"]


def test_adam_by_the_formula():
    # m = -D (sqrt(v) + eps) / c(t), with the worker's own v; m = 0 at first.
    own, moved, c = np.zeros(SIZE), 0.0, 1.0
    for step, made in enumerate(run("adam", {**ADAM, "wd": 0}, 2, 9)):
        t, before = step + 1, made.before.asnumpy()
        g = draw(1000 * step + 1).astype("float64")
        m = 0.9 * -moved * (np.sqrt(own) + 1e-8) / c + 0.1 * g
        own = 0.999 * own + 0.001 * g**2
        c = ADAM["learning_rate"] * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        close(made.local[1].asnumpy(), before - c * m / (np.sqrt(own) + 1e-8))
        moved = made.weight.asnumpy().astype("float64") - before


def test_adam_goes_on_after_a_learning_rate_of_zero():
    # W stands still, and so does L; then D = 0 says nothing of m.
    lr = {5: {"lr": 0.0}, 12: {"lr": 0.01}}
    for step, made in enumerate(run("adam", {**ADAM, "wd": 0}, 2, 30, 0, lr)):
        before, after = made.before.asnumpy(), made.weight.asnumpy()
        for local in made.local:
            moved = np.abs(local.asnumpy() - before)
            assert moved.max() <= 4 * ADAM["learning_rate"]
            assert (moved.max() > 0) == (not 5 <= step < 12)
        assert (after != before).any() == (not 5 <= step < 12)


@pytest.mark.parametrize("rise", [50, 10**7])
def test_adam_takes_no_rounding_for_momentum_when_the_rate_rises(rise):
    # D holds c(t) m(t) to the rounding of W: after a rise of 10^7 it would move L by
    # about W itself. After one of 50 one worker is still Adam.
    low = ADAM["learning_rate"] / rise
    changes = {5: {"lr": low}, 12: {"lr": ADAM["learning_rate"]}}
    *_, made = run("adam", {**ADAM, "wd": 0}, 1, 13, 0, changes)
    moved = np.abs(made.local[0].asnumpy() - made.before.asnumpy()).max()
    assert 0 < moved <= 4 * ADAM["learning_rate"]
    if rise == 50:
        off = np.abs(made.local[0].asnumpy() - made.weight.asnumpy()).max()
        assert off <= rise * 1e-6


@pytest.mark.parametrize("changes", [{}, {5: {"lr": -0.01}}])
def test_adam_with_a_negative_rate_keeps_its_momentum(changes):
    # As with lr_mult -1, which reverses gradients.
    settings = {**ADAM, "wd": 0, "learning_rate": 0.01 if changes else -0.01}
    *_, made = run("adam", settings, 1, 6, 0, changes)
    close(made.local[0].asnumpy(), made.weight.asnumpy())


def test_adam_of_a_worker_that_never_had_a_gradient_follows_the_displacement():
    # v = 0: m = -D eps / c(t), so that L = W + beta1 c(t+1) / c(t) D.
    made = Workers("adam", {**ADAM, "wd": 0}, "mirror", 2, draw(7))
    for step in range(10):
        moved = made.weight - made.before
        made.step([nd.array(draw(step)), nd.zeros(SIZE)])
    c10, c9 = (np.sqrt(1 - 0.999**t) / (1 - 0.9**t) for t in (10, 9))
    want = made.before + 0.9 * c10 / c9 * moved
    close(made.local[1].asnumpy(), want.asnumpy())


@pytest.mark.parametrize("name, momentum", [("nag", 0.0), ("nag", 0.9), ("adam", None)])
def test_assigned_weights_keep_the_displacement(name, momentum):
    # W := X and W(t-1) := X - D: as if all had been X - W further from the start.
    settings = {"adam": {**ADAM, "wd": 0}}.get(name, {**NAG, "wd": 0})
    if momentum is not None:
        settings = {**settings, "momentum": momentum}
    runs, shift = [run(name, settings, 2, 20) for _ in range(2)], 2 * nd.array(draw(3))
    for step, (plain, moved) in enumerate(zip(*runs)):
        if step >= 10:
            off = numbers([moved.weight, *moved.local])
            close(off - numbers([plain.weight, *plain.local]), shift.asnumpy())
        if step == 9:
            moved.before, moved.weight = moved.before + shift, moved.weight + shift


@pytest.mark.parametrize(
    "optimizer, keeps",
    [
        (opt.NAG(momentum=0.9), True),
        (opt.NAG(momentum=0.0), False),
        (opt.Adam(), True),
    ],
)
def test_mirror_keeps_the_weights_before_if_it_needs_them(optimizer, keeps):
    assert local_update.create("mirror", {}, optimizer, 1.0).keeps_previous is keeps


# Stability. lr times curvature at which the iteration begins to grow, with momentum 0.9
# and every worker alike (mean), or with workers that differ (difference), which
# disturbs L(i) - mean L by noise. By the recurrences, with lr = 1 and curvature h:
#
# mirror, SGD: the mean is SGD itself, 2 (1 + mu); the difference is d := -h d.
# mirror, NAG: the mean is NAG itself, 2 (1 + mu) / (1 + 2 mu); d := -(1 + mu) h d.
# none: W(t+1) = W + mu (W - W(t-1)) - h W(t-1): 1 - mu. There is no difference.
# sgd: the mean is 0.125 (spectral radius of the recurrence); d := -h d.
LIMITS = [
    ("sgd", "mirror", "mean", 3.8),
    ("sgd", "mirror", "difference", 1.0),
    ("sgd", "none", "mean", 0.1),
    ("sgd", "sgd", "mean", 0.125),
    ("sgd", "sgd", "difference", 1.0),
    ("sgd", "dcsgd", "mean", 0.125),  # with lamda 0 it is sgd
    ("nag", "mirror", "mean", 3.8 / 2.8),
    ("nag", "mirror", "difference", 1 / 1.9),
]
NEAR, STEPS = 0.03, 300


@pytest.mark.parametrize("name, rule, mode, limit", LIMITS)
def test_iteration_contracts_below_its_limit_and_grows_above(name, rule, mode, limit):
    curvature = nd.array([(1 - NEAR) * limit, (1 + NEAR) * limit])
    settings = {"learning_rate": 1.0, "momentum": 0.9}
    params = {"lamda": 0} if rule == "dcsgd" else {}
    start = np.ones(2, np.float32) * (mode == "mean")
    made = Workers(name, settings, rule, 2, start, params)
    noise, sizes = nd.ones(2) * (mode != "mean"), []
    for _ in range(STEPS):
        one, other = (curvature * local for local in made.local)
        made.step([one + noise, other - noise])
        noise = nd.zeros(2)
        difference = made.local[0] - made.local[1]
        sizes.append(made.weight if mode == "mean" else difference)
    early, late = np.abs(numbers(sizes)).reshape(2, -1, 2).max(1)
    assert late[0] < 0.9 * early[0] and not late[1] < 1.1 * early[1], (early, late)


# What is chosen, and what is refused


class OwnNAG(opt.NAG):
    """A user's."""


class OwnAdam(opt.Adam):
    """A user's."""


@pytest.mark.parametrize("optimizer", [OwnNAG(momentum=0.9), OwnAdam(), opt.RMSProp()])
def test_other_types_get_a_replica_and_no_mirror(optimizer):
    assert local_update.create("auto", {}, optimizer, 1.0).name == "replica"
    with pytest.raises(ConfigError) as caught:
        local_update.create("mirror", {}, optimizer, 1.0)
    text, name = str(caught.value), type(optimizer).__name__
    for part in ["'mirror'", name, *LISTED, "'auto'", "'replica'"]:
        assert part in text
    with pytest.raises(ConfigError, match=f"'mirror'.*{name}"):
        odsgd_kvstore.Trainer([parameter()], optimizer, local_optimizer="mirror")


def parameter():
    """One that is ready."""
    made = mx.gluon.Parameter("p", shape=(3,))
    made.initialize(mx.init.One())
    return made


FP16 = {"type": "fp16"}


@pytest.mark.parametrize("name", ["nag", "adam"])
def test_mirror_is_refused_with_pulls_in_float16(name):
    controls = {"compression_params": FP16, "local_optimizer": "mirror"}
    with pytest.raises(ConfigError, match="'mirror'.*'fp16'.*'replica'"):
        odsgd_kvstore.Trainer([parameter()], name, **controls)


@pytest.mark.parametrize("name", ["nag", "adam"])
@pytest.mark.parametrize(
    "compression, rule",
    [(None, "mirror"), (FP16, "replica"), ({"type": "2bit"}, "mirror")],
)
def test_auto_needs_whole_pulls_for_mirror(caplog, name, compression, rule):
    param = parameter()
    trainer = odsgd_kvstore.Trainer([param], name, compression_params=compression)
    with mx.autograd.record():
        loss = (param.data() * 2).sum()
    loss.backward()
    with caplog.at_level(logging.WARNING):
        trainer.step(1)
    assert f"local update '{rule}'" in caplog.text
