"""An optimizer on runs of a flat array: the same as on each parameter alone."""

import numpy as np
import pytest
from mxnet import nd
from mxnet import optimizer as opt

from odsgd_kvstore.optimizer_state import (
    ELEMENTWISE,
    FlatState,
    Run,
    apply_optimizer,
    flatten,
    is_elementwise,
    runs,
)

SIZES = [3, 1, 40, 7]


def test_runs_join_neighbours_that_are_alike():
    assert runs([2, 3, 4, 1], "aaba") == [
        Run(0, 5, (0, 1)),
        Run(5, 9, (2,)),
        Run(9, 10, (3,)),
    ]


def test_runs_leave_out_and_never_join_across_a_gap():
    assert runs([2, 3, 4, 1], ["a", None, "a", "a"]) == [
        Run(0, 2, (0,)),
        Run(5, 10, (2, 3)),
    ]
    assert runs([2, 3], [None, None]) == []
    assert runs([], []) == []


def test_flatten_goes_through_any_nesting():
    a, b, c = nd.zeros(1), nd.zeros(2), nd.zeros(3)
    assert flatten(None) == []
    assert [x.shape for x in flatten((a, [b, None, (c,)]))] == [(1,), (2,), (3,)]


def test_state_of_a_run_shares_the_whole_state_s_memory():
    state = FlatState.of_optimizer(opt.Adam(), 0, nd.ones(6))
    mean, square = state.of(Run(2, 5, (1,)))
    mean[:] = 7
    assert (mean.shape, square.shape) == ((3,), (3,))
    assert state.slots[0].asnumpy().tolist() == [0, 0, 7, 7, 7, 0]
    assert state.of(Run(2, 5, (1,)))[0] is mean
    assert state.of(Run(0, 6, (0, 1, 2)))[0] is state.slots[0]


def test_no_state_stays_none():
    state = FlatState.of_optimizer(opt.SGD(), 0, nd.ones(6))
    assert state.slots == []
    assert state.of(Run(0, 3, (0,))) is None


def test_elementwise_is_by_exact_type():
    assert not is_elementwise(type("Own", (opt.SGD,), {})())
    assert not is_elementwise(None)
    assert not any(is_elementwise(kind()) for kind in (opt.LARS, opt.LAMB, opt.LBSGD))
    assert is_elementwise(opt.SGD())


def settings(kind):
    """Arguments that switch on what a kind has."""
    more = {opt.SGD: "momentum", opt.NAG: "momentum", opt.Signum: "momentum"}
    made = {"learning_rate": 0.03, "wd": 0.02, "clip_gradient": 1.5}
    if kind in more or kind is opt.ccSGD:
        made["momentum"] = 0.75
    if kind is opt.RMSProp:
        made["centered"] = True
    return made


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_update_of_a_run_is_each_member_s_own_bit_for_bit(kind):
    random = np.random.RandomState(5)
    start = random.normal(0, 1, sum(SIZES)).astype("float32")
    flat, gradient = nd.array(start), nd.zeros(start.size)
    state, optimizer = (
        FlatState.of_optimizer(kind(**settings(kind)), 0, flat),
        kind(**settings(kind)),
    )
    ends = np.cumsum(SIZES)
    alone = [nd.array(part) for part in np.split(start, ends[:-1])]
    updaters = [opt.get_updater(kind(**settings(kind))) for _ in SIZES]
    counts = [0] * len(SIZES)
    for step in range(8):
        gradient[:] = nd.array(random.normal(0, 1, start.size))
        present = [i for i in range(len(SIZES)) if (step + i) % 3 or step < 2]
        alike = [counts[i] if i in present else None for i in range(len(SIZES))]
        for run in runs(SIZES, alike):
            parts = (
                flat._slice(run.start, run.stop),
                gradient._slice(run.start, run.stop),
            )
            count = counts[run.members[0]]
            apply_optimizer(optimizer, 0, count, *parts, state.of(run))
        for i in present:
            counts[i] += 1
            own = gradient._slice(int(ends[i]) - SIZES[i], int(ends[i])).copy()
            updaters[i](0, own, alone[i])
        want = np.concatenate([part.asnumpy() for part in alone])
        np.testing.assert_array_equal(flat.asnumpy(), want, err_msg=f"step {step}")
    assert not np.array_equal(want, start)
