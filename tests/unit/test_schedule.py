"""Warm-up and staleness by number of the update."""

import pytest

from odsgd_kvstore.schedule import Schedule


@pytest.mark.parametrize(
    "warmup_steps, delay, warm, stale",
    [
        # Update 3 is the first delayed one; its gradient is computed on W(3), which
        # update 2, still warm-up, gave. Update 4 is computed on what came of W(3).
        (3, 1, [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]),
        (0, 1, [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]),
        (1, 1, [1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]),
        (9, 1, [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]),
        (0, 0, [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]),
        (2, 0, [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]),
    ],
)
def test_each_update_is_warmup_and_stale_as_the_paper_says(
    warmup_steps, delay, warm, stale
):
    schedule = Schedule(warmup_steps, delay)
    assert [schedule.is_warmup(update) for update in range(6)] == list(map(bool, warm))
    assert [schedule.staleness(update) for update in range(6)] == stale


def test_staleness_is_never_more_than_the_delay():
    for warmup_steps in range(6):
        for delay in (0, 1):
            schedule = Schedule(warmup_steps, delay)
            assert {schedule.staleness(u) for u in range(12)} <= {0, delay}


@pytest.mark.parametrize(
    "warmup_steps, delay, full_every, whole",
    [
        (0, 1, 0, [1, 0, 0, 0, 0, 0, 0]),
        (3, 1, 0, [1, 1, 1, 0, 0, 0, 0]),
        (3, 0, 0, [1, 0, 0, 0, 0, 0, 0]),  # without a delay there is no warm-up
        (0, 1, 1, [1, 1, 1, 1, 1, 1, 1]),
        (0, 0, 1, [1, 1, 1, 1, 1, 1, 1]),
        (0, 1, 3, [1, 0, 0, 1, 0, 0, 1]),
        (2, 1, 3, [1, 1, 0, 1, 0, 0, 1]),
        (2, 0, 3, [1, 0, 0, 1, 0, 0, 1]),
    ],
)
def test_whole_pushes_are_the_first_the_warmup_s_and_every_kth(
    warmup_steps, delay, full_every, whole
):
    schedule = Schedule(warmup_steps, delay, full_every)
    assert [schedule.is_whole(push) for push in range(7)] == list(map(bool, whole))


def test_schedule_is_immutable():
    with pytest.raises(AttributeError):
        Schedule(3, 1).warmup_steps = 4
