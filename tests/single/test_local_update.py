"""The worker's rules on arrays, against numpy; no store, no step of a trainer."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import ndarray as nd
from mxnet import optimizer as opt

from odsgd_kvstore import local_update
from odsgd_kvstore.errors import ConfigError
from odsgd_kvstore.local_update import Part
from odsgd_kvstore.optimizer_state import Run

RESCALE = 0.25
SHAPE = (3, 4)
SETTINGS = [
    {"learning_rate": 0.1},
    {"learning_rate": 0.1, "momentum": 0.9},
    {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    {"learning_rate": 0.1, "momentum": 0.5, "wd": 0.01, "clip_gradient": 0.1},
    {"learning_rate": 0.1, "wd": 0.01, "clip_gradient": 0.1},
]


def draw(seed):
    """A float32 array."""
    return np.random.RandomState(seed).randn(*SHAPE).astype(np.float32)


def make(rule, optimizer, params=None):
    """A rule; the optimizer's own rescale_grad must not be used."""
    optimizer.rescale_grad = 77.0
    made = local_update.create(rule, params or {}, optimizer, RESCALE)
    made.follow({}, 1)
    return made


def part_of(whole, index=0, count=0):
    """All numbers of one parameter, which is a key of its own."""
    return Part(index, 10 + index, Run(0, whole.size, (0,)), count, whole)


def flat(array):
    """As the rules see it."""
    return nd.array(array.reshape(-1))


def updated(rule, weight, previous, gradient, index=0, count=0):
    """L from W(t), W(t-1) and g, after checks of what must stay unchanged."""
    arrays = [flat(a) for a in (weight, previous, gradient)]
    local_weight = nd.full(weight.size, np.nan)
    kept = arrays[1] if rule.keeps_previous else None
    part = part_of(arrays[0], index, count)
    rule.update(part, local_weight, arrays[0], kept, arrays[2])
    assert np.array_equal(arrays[0].asnumpy(), weight.reshape(-1))
    assert np.array_equal(arrays[2].asnumpy(), gradient.reshape(-1))
    return local_weight.asnumpy().reshape(SHAPE)


def sgd(weight, momentum, gradient, lr, wd, mu, clip):
    """MXNet's momentum SGD: m = mu m - lr (g + wd W); W + m."""
    scaled = gradient * RESCALE
    if clip:
        scaled = np.clip(scaled, -clip, clip)
    return weight + mu * momentum - lr * (scaled + wd * weight)


def mirrored(settings, seed=0, lr_mult=1, wd_mult=1):
    """(L by the rule, L by the formula of `algorithm.md`)."""
    weight, previous, gradient = draw(seed), draw(seed + 1), draw(seed + 2)
    optimizer = opt.SGD(**settings)
    optimizer.set_lr_mult({0: lr_mult})
    optimizer.set_wd_mult({0: wd_mult})
    rule = make("mirror", optimizer)
    wanted = sgd(
        weight.astype(np.float64),
        weight.astype(np.float64) - previous,
        gradient,
        settings["learning_rate"] * lr_mult,
        settings.get("wd", 0) * wd_mult,
        settings.get("momentum", 0),
        settings.get("clip_gradient"),
    )
    return updated(rule, weight, previous, gradient), wanted


def close(one, other):
    """Equal to 2e-6 of the largest weight (`algorithm.md`, invariant 5)."""
    assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max()


@pytest.mark.parametrize("settings", SETTINGS)
def test_mirror_is_the_global_update_with_own_gradient(settings):
    close(*mirrored(settings))


def test_mirror_uses_the_multipliers():
    close(*mirrored(SETTINGS[2], lr_mult=0.5, wd_mult=3))


def test_mirror_by_hand():
    # W=2, W before=1, g=8, rescale 1/4: 2 + 0.5 (2-1) - 0.1 (8/4 + 0.5*2) = 2.2
    rule = make("mirror", opt.SGD(learning_rate=0.1, momentum=0.5, wd=0.5))
    ones = np.ones(SHAPE, np.float32)
    close(updated(rule, 2 * ones, ones, 8 * ones), 2.2 * ones)


@pytest.mark.parametrize("momentum, keeps", [(0.0, False), (0.9, True)])
def test_mirror_keeps_the_weights_before_only_for_momentum(momentum, keeps):
    assert make("mirror", opt.SGD(momentum=momentum)).keeps_previous is keeps


def test_mean_of_mirrors_over_workers_is_the_global_update():
    # W(t+1) by the sum of the gradients; each worker stands for the sum by N = 4.
    weight, previous = draw(0), draw(1)
    gradients = [draw(10 + i) for i in range(4)]
    optimizer = opt.SGD(learning_rate=0.1, momentum=0.9, wd=0.01)
    rule = make("mirror", optimizer)
    mean = np.mean([updated(rule, weight, previous, g) for g in gradients], axis=0)
    total = sgd(weight, weight - previous, sum(gradients) / 4, 0.1, 0.01, 0.9, None)
    close(mean, total)


def test_none_is_the_global_weight():
    rule = make("none", opt.SGD(learning_rate=0.1, momentum=0.9))
    assert np.array_equal(updated(rule, draw(0), draw(1), draw(2)), draw(0))
    assert not rule.keeps_previous


@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "rmsprop", "adagrad", "signum"])
def test_replica_is_the_optimizer_with_state_fed_since_warmup(name):
    rule = make("replica", opt.create(name, learning_rate=0.1, wd=0.01))
    twin = opt.create(name, learning_rate=0.1, wd=0.01, rescale_grad=RESCALE)
    state = twin.create_state(0, nd.zeros(SHAPE))
    for step in range(1, 5):
        rule.follow({}, step)
        weight, gradient = nd.array(draw(step)), nd.array(draw(step + 20))
        if step < 3:  # Warm-up: only the state takes note.
            arrays = flat(draw(step)), flat(draw(step + 20))
            part = part_of(arrays[0], count=step - 1)
            rule.observe(part, nd.zeros(weight.size), arrays[0], None, arrays[1])
        else:
            local_weight = updated(
                rule, draw(step), draw(9), draw(step + 20), count=step - 1
            )
        update = twin.update_multi_precision
        update([0], [weight], [gradient], [state]) if twin.aggregate_num else update(
            0, weight, gradient, state
        )
        if step >= 3:  # Each update starts from W(t), in both.
            close(local_weight, weight.asnumpy())


def test_replica_keeps_a_state_for_each_parameter():
    rule = make("replica", opt.SGD(learning_rate=0.1, momentum=0.9))
    first = updated(rule, draw(0), draw(1), draw(2), index=0)
    assert np.array_equal(updated(rule, draw(0), draw(1), draw(2), index=1), first)
    again = updated(rule, draw(0), draw(1), draw(2), index=0)
    # m = -0.1 g/4 the first time, 0.9 m - 0.1 g/4 the second.
    close(again - draw(0), (first - draw(0)) * 1.9)


def test_named_optimizer_has_no_momentum_unless_given():
    optimizer = opt.SGD(learning_rate=0.2, momentum=0.9, wd=0.01)
    rule = make("sgd", optimizer)
    for _ in range(3):  # Without momentum it is the same each time.
        close(
            updated(rule, draw(0), draw(1), draw(2)),
            sgd(draw(0), 0, draw(2), 0.2, 0.01, 0, None),
        )


def test_named_optimizer_follows_what_is_not_given():
    optimizer = opt.SGD(learning_rate=0.2, wd=0.01, clip_gradient=0.1)
    rule = make("sgd", optimizer)
    rule.follow({"lr": 0.4, "wd": 0.02, "clip_gradient": 0.05}, 2)
    close(
        updated(rule, draw(0), draw(1), draw(2)),
        sgd(draw(0), 0, draw(2), 0.4, 0.02, 0, 0.05),
    )


def test_named_optimizer_keeps_what_is_given():
    params = {"learning_rate": 0.5, "wd": 0.0, "momentum": 0.9, "rescale_grad": 1.0}
    rule = make("sgd", opt.SGD(learning_rate=0.2, wd=0.01), params)
    rule.follow({"lr": 0.4, "wd": 0.02}, 2)
    close(updated(rule, draw(0), draw(1), draw(2)), draw(0) - 0.5 * draw(2))


def test_named_optimizer_follows_the_schedule():
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.1, base_lr=0.2)
    rule = make("sgd", opt.SGD(lr_scheduler=schedule, learning_rate=0.2))
    for step, lr in ((1, 0.2), (2, 0.2), (3, 0.02), (4, 0.02), (5, 0.002)):
        rule.follow({}, step)
        close(
            updated(rule, draw(0), draw(1), draw(2)),
            sgd(draw(0), 0, draw(2), lr, 0, 0, None),
        )


def test_mirror_follows_a_change_at_its_step():
    rule = make("mirror", opt.SGD(learning_rate=0.2, momentum=0.5))
    rule.follow({"lr": 0.05, "momentum": 0.25}, 2)
    close(
        updated(rule, draw(0), draw(1), draw(2)),
        sgd(draw(0), draw(0) - draw(1), draw(2), 0.05, 0, 0.25, None),
    )


@pytest.mark.parametrize("rule", ["mirror", "replica", "none", "sgd", "adam", "dcsgd"])
def test_rules_never_change_the_user_s_optimizer(rule):
    optimizer = opt.SGD(learning_rate=0.1, momentum=0.9)
    made = make(rule, optimizer)
    before = {k: repr(v) for k, v in vars(optimizer).items()}
    made.follow({"lr": 0.5}, 9)
    updated(made, draw(0), draw(1), draw(2))
    assert {k: repr(v) for k, v in vars(optimizer).items()} == before


def test_auto_is_mirror_for_exactly_the_types_that_have_one():
    own = type("Own", (opt.SGD,), {})
    chosen = {
        kind.__name__: local_update.create("auto", {}, kind(), 1.0).name
        for kind in (opt.SGD, opt.ccSGD, own, opt.NAG, opt.Adam, opt.RMSProp)
    }
    assert chosen == {
        "SGD": "mirror",
        "ccSGD": "mirror",
        "Own": "replica",
        "NAG": "mirror",
        "Adam": "mirror",
        "RMSProp": "replica",
    }


@pytest.mark.parametrize("rule", ["AUTO", "Mirror", "NONE", "SGD", "Replica"])
def test_names_are_taken_in_any_case(rule):
    made = local_update.create(rule, {}, opt.SGD(), 1.0)
    assert made.name == ("mirror" if rule == "AUTO" else rule.lower())


@pytest.mark.parametrize(
    "rule, optimizer, parts",
    [
        ("mirror", opt.RMSProp(), ["'mirror'", "RMSProp", "SGD", "NAG", "'auto'"]),
        ("sdg", opt.SGD(), ["'sdg'", "'mirror'", "'none'", "'dcsgd'", "adam", "sgd"]),
    ],
)
def test_rule_that_does_not_fit_is_refused_by_name(rule, optimizer, parts):
    with pytest.raises(ConfigError) as caught:
        local_update.create(rule, {}, optimizer, 1.0)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("value", ["big", None, float("nan"), True])
@pytest.mark.parametrize("key", ["learning_rate", "wd", "momentum"])
def test_value_of_a_named_optimizer_that_is_no_number_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"{key} {value!r}.*finite number"):
        local_update.create("sgd", {key: value}, opt.SGD(), 1.0)


@pytest.mark.parametrize("params", [{"learning_rat": 0.1}, {"beta1": 0.9, "lr": 3}])
def test_wrong_parameter_of_a_named_optimizer_is_named(params):
    with pytest.raises(ConfigError) as caught:
        local_update.create("sgd", params, opt.SGD(), 1.0)
    text = str(caught.value)
    assert "'sgd'" in text and repr(params) in text and "mxnet.optimizer" in text
    assert next(iter(params)) in text.split(repr(params))[1]
