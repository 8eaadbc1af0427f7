"""The servers' update on arrays: versions that hold from a step, offsets, slots."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import ndarray as nd
from mxnet import optimizer as opt

from odsgd_kvstore.checks import check_optimizer, check_slice
from odsgd_kvstore.config import Config
from odsgd_kvstore.errors import ConfigError
from odsgd_kvstore.global_update import GlobalUpdate, MemoisedSchedule

ONE = [(2, 1.0, 1.0)]  # one member: size, lr_mult, wd_mult


class Keys:
    """A global update with a weight for each key, all ones."""

    def __init__(self, optimizer, *keys):
        self.update = GlobalUpdate(optimizer, 1, 0.5)
        self.weights, self.gradients = {}, {}
        self.add(*keys)
        self.update.change(1, {}, dict.fromkeys(keys, ONE), {})

    def add(self, *keys):
        """Weights of new keys, and the arrays that the server receives into."""
        self.weights.update((key, nd.ones(2)) for key in keys)
        self.gradients.update((key, nd.zeros(2)) for key in keys)

    def push(self, key, gradient=1.0):
        """The change of a key's weight by one update."""
        before = self.weights[key].asnumpy()
        self.gradients[key][:] = gradient
        self.update(key, self.weights[key], self.gradients[key])
        return round(float((self.weights[key].asnumpy() - before)[0]), 5)


def test_update_is_the_optimizer_s_own_bit_for_bit():
    for name in ("sgd", "nag", "adam", "rmsprop", "adagrad", "adadelta", "ftrl"):
        settings = {"learning_rate": 0.1, "wd": 0.01}
        keys = Keys(opt.create(name, **settings), 5)
        updater = opt.get_updater(opt.create(name, **settings))
        weight = nd.ones(2)
        for step in range(6):
            gradient = nd.array([0.3 * step, -1.0])
            keys.push(5, gradient)
            updater(5, gradient, weight)
        assert np.array_equal(keys.weights[5].asnumpy(), weight.asnumpy()), name


def test_change_holds_from_its_step_for_each_key():
    keys = Keys(opt.SGD(learning_rate=0.5), 0, 1)
    assert keys.push(0) == -0.5  # Step 1 of key 0; key 1 is one behind.
    keys.update.change(2, {"lr": 0.25}, {}, {})
    assert keys.push(0) == -0.25  # Step 2 of key 0,
    assert keys.push(1) == -0.5  # and step 1 of key 1, with the older value.
    assert keys.push(1) == -0.25
    assert keys.push(0) == -0.25


def test_change_that_comes_early_waits_for_its_step():
    keys = Keys(opt.SGD(learning_rate=0.5), 0)
    keys.update.change(3, {"lr": 0.125}, {}, {})
    assert [keys.push(0) for _ in range(4)] == [-0.5, -0.5, -0.125, -0.125]


def test_changes_of_different_values_add_up():
    keys = Keys(opt.SGD(learning_rate=0.5), 0, 1)
    keys.update.change(2, {"lr": 0.25}, {}, {})
    keys.update.change(3, {"rescale_grad": 2.0}, {}, {})
    keys.update.change(4, {"lr": 1.0}, {}, {})
    wanted = [-0.5, -0.25, -0.5, -2.0, -2.0]
    for step in range(5):  # Key 1 always one step behind, and back again.
        assert keys.push(0) == wanted[step]
        if step:
            assert keys.push(1) == wanted[step - 1]


def test_many_changes_keep_the_newest():
    keys = Keys(opt.SGD(learning_rate=1.0), 0, 1)
    for step in range(2, 40):
        keys.push(0)
        if step > 2:
            lr = 1.0 if step == 3 else (step - 2) / 64
            assert keys.push(1) == round(-lr, 5)
        keys.update.change(step, {"lr": step / 64}, {}, {})
    assert keys.push(0) == round(-39 / 64, 5)


def test_state_survives_a_change():
    keys = Keys(opt.SGD(learning_rate=1.0, momentum=0.5), 0)
    assert keys.push(0) == -1.0
    keys.update.change(2, {"lr": 0.5}, {}, {})
    assert keys.push(0) == -1.0  # 0.5 * -1 - 0.5 * 1


def test_multipliers_travel_by_key_and_hold_from_their_step():
    keys = Keys(opt.SGD(learning_rate=0.5), 0, 1)
    keys.update.change(2, {}, {1: [(2, 0.5, 1.0)]}, {})
    assert [keys.push(0), keys.push(1)] == [-0.5, -0.5]
    assert [keys.push(0), keys.push(1)] == [-0.5, -0.25]


def test_wd_multiplier_applies():
    keys = Keys(opt.SGD(learning_rate=0.5, wd=0.5), 0, 1)
    keys.update.change(1, {}, {0: [(2, 1.0, 0.0)], 1: [(2, 1.0, 2.0)]}, {})
    assert [keys.push(0, 0.0), keys.push(1, 0.0)] == [0.0, -0.5]


def test_key_that_comes_late_uses_the_store_s_step():
    schedule = mx.lr_scheduler.MultiFactorScheduler(step=[2], factor=0.5, base_lr=0.5)
    keys = Keys(opt.SGD(lr_scheduler=schedule, learning_rate=0.5), 0)
    assert [keys.push(0) for _ in range(3)] == [-0.5, -0.5, -0.25]
    keys.add(7)
    keys.update.change(4, {}, {7: ONE}, {7: (1, 3)})  # Its update 1 is step 4.
    assert [keys.push(0), keys.push(7)] == [-0.25, -0.25]


def test_key_that_paused_skips_the_steps():
    schedule = mx.lr_scheduler.MultiFactorScheduler(step=[3], factor=0.5, base_lr=0.5)
    keys = Keys(opt.SGD(lr_scheduler=schedule, learning_rate=0.5), 0, 1)
    assert [keys.push(0), keys.push(1)] == [-0.5, -0.5]
    for _ in range(3):
        keys.push(0)
    keys.update.change(5, {}, {}, {1: (2, 3)})  # Its update 2 is step 5.
    assert [keys.push(0), keys.push(1)] == [-0.25, -0.25]


def test_offset_holds_from_a_count_of_the_key_only():
    keys = Keys(opt.SGD(learning_rate=0.5), 0)
    keys.update.change(5, {"lr": 0.25}, {}, {0: (3, 2)})  # Update 3 is step 5.
    assert [keys.push(0) for _ in range(4)] == [-0.5, -0.5, -0.25, -0.25]


def test_counting_starts_at_begin_num_update():
    schedule = mx.lr_scheduler.MultiFactorScheduler(step=[41], factor=0.5, base_lr=0.5)
    optimizer = opt.SGD(lr_scheduler=schedule, begin_num_update=40, learning_rate=0.5)
    keys = Keys(optimizer, 0)
    assert [keys.push(0) for _ in range(3)] == [-0.5, -0.25, -0.25]


def test_schedule_may_be_asked_for_the_step_before():
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    plain = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    wanted = [plain(step) for step in range(1, 20)]
    memoised = MemoisedSchedule(schedule)
    for step in range(1, 19):
        assert memoised(step) == wanted[step - 1]
        assert memoised(step + 1) == wanted[step]
        assert memoised(step) == wanted[step - 1]


def test_memory_of_a_schedule_is_bounded():
    memoised = MemoisedSchedule(lambda step: step * 0.5)
    assert [memoised(step) for step in range(100)][-1] == 49.5
    assert len(memoised._values) < 10


def test_keys_one_step_apart_get_the_schedule_s_value_of_their_step():
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    keys = Keys(opt.SGD(lr_scheduler=schedule, learning_rate=1.0), 0, 1)
    # FactorScheduler(step=1): 1 at update 1, then half at each.
    assert [keys.push(0), keys.push(0), keys.push(1), keys.push(0), keys.push(1)] == [
        -1.0,
        -0.5,
        -1.0,
        -0.25,
        -0.5,
    ]


def test_new_schedule_holds_from_its_step_and_the_old_one_before():
    keys = Keys(opt.SGD(learning_rate=0.5), 0, 1)
    keys.push(0)
    schedule = mx.lr_scheduler.FactorScheduler(step=100, base_lr=0.125)
    keys.update.change(2, {"lr_scheduler": schedule}, {}, {})
    assert [keys.push(0), keys.push(1), keys.push(1)] == [-0.125, -0.5, -0.125]


@pytest.mark.parametrize(
    "name, slots", [("sgd", 0), ("nag", 0), ("adam", 2), ("rmsprop", 1), ("ftrl", 2)]
)
def test_slots_are_the_arrays_that_the_optimizer_uses(name, slots):
    keys = Keys(opt.create(name, learning_rate=0.1), 0)
    keys.push(0)
    found = keys.update._keys[0].state.slots
    assert len(found) == slots
    assert all(slot.shape == (2,) and slot.dtype == np.float32 for slot in found)
    assert all(np.abs(slot.asnumpy()).max() > 0 for slot in found)


def test_writing_a_slot_changes_the_next_update():
    keys = Keys(opt.SGD(learning_rate=1.0, momentum=0.5), 0)
    keys.push(0)
    keys.update._keys[0].state.slots[0][:] = 4.0
    assert keys.push(0) == 1.0  # 0.5 * 4 - 1


def test_state_is_made_once_for_each_key():
    keys = Keys(opt.SGD(learning_rate=1.0, momentum=0.5), 0, 1)
    assert [keys.push(0), keys.push(0), keys.push(1)] == [-1.0, -1.5, -1.0]


def test_unknown_key_raises():
    with pytest.raises(KeyError):
        GlobalUpdate(opt.SGD(), 1, 0.5)(3, nd.ones(2), nd.ones(2))


@pytest.mark.parametrize(
    "optimizer, servers, parts",
    [
        (opt.SGLD(), 1, ["SGLD", "random", "dist_sync"]),
        (opt.DCASGD(momentum=0.9), 1, ["DCASGD", "momentum", "dist_sync"]),
        (opt.Nadam(), 1, ["Nadam", "order in which keys", "dist_sync"]),
        (opt.create("groupadagrad"), 1, ["GroupAdaGrad", "rows", "dist_sync"]),
        ("sgd", 1, ["'sgd'", "mxnet.optimizer.Optimizer"]),
    ],
)
def test_optimizer_that_would_train_wrongly_is_refused(optimizer, servers, parts):
    with pytest.raises(ConfigError) as caught:
        check_optimizer(optimizer, Config(), servers)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize(
    "name", sorted(set(opt.Optimizer.opt_registry) - {"sgld", "groupadagrad"})
)
def test_every_other_optimizer_is_allowed(name):
    check_optimizer(opt.create(name), Config(), 0 if name == "nadam" else 1)


@pytest.mark.parametrize("kind", [opt.LARS, opt.LAMB, opt.LBSGD])
def test_optimizer_of_whole_layers_is_refused_only_for_a_cut_array(kind):
    check_slice(kind(), "w", 99, 100, 2)
    check_slice(kind(), "w", 100, 100, 1)
    check_slice(opt.SGD(), "w", 100, 100, 2)
    with pytest.raises(ConfigError) as caught:
        check_slice(kind(), "fc_weight", 100, 100, 2)
    text = str(caught.value)
    assert kind.__name__ in text and "fc_weight with 100 numbers" in text
    assert "2 servers" in text and "BIGARRAY_BOUND above 100" in text
