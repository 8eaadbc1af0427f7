"""The servers' update: aggregated gradient to global weight, state in slots.

W(t+1) = Opt(W(t), sum_i g(i,t)), once every worker's gradient of the step has
arrived (Xu et al., ACM TACO 17(4), 2020). Runs on every server, for the keys, or
the slices of keys, that this server holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np
from mxnet import ndarray as nd
from mxnet import optimizer as opt

from .compression import TwoBit
from .errors import MismatchError
from .optimizer_state import FlatState, Run, apply_optimizer, runs

# Keys are at most one step apart: a worker makes a step only with the weights of the
# one before, and rank 0 sends a change only when its own pulls are here. Two would do.
_VERSIONS_KEPT = 8


@dataclass(frozen=True)
class Multipliers:
    """Stands in for a Gluon Parameter in `Optimizer.param_dict` on a server."""

    lr_mult: float = 1.0
    wd_mult: float = 1.0


class KeyState:
    """One key of a store on this server: a parameter, a slice of one, or a pack.

    Attributes
    ----------
    sizes : list of int
        Numbers of each member; of a single member they are the array's, whatever it is.
    counts : list of int
        Updates of each member so far.
    pushes : int
        Pushes of this key so far.
    offsets : list of (count, int)
        Steps that the store is ahead of this key, from a count of its pushes on.
    weight, gradient : NDArray, float32, 1-D
        The arrays that MXNet's server hands over, the same each time.
    state : FlatState
        The optimizer's; None before the first push.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.counts = [0] * len(sizes)
        self.pushes = 0
        self.offsets: list[tuple[int, int]] = [(0, 0)]
        self.weight: nd.NDArray | None = None
        self.gradient: nd.NDArray | None = None
        self.state: FlatState | None = None
        self._plans: dict[Any, list[tuple[Run, nd.NDArray, nd.NDArray, Any]]] = {}

    def take(
        self, weight: nd.NDArray, gradient: nd.NDArray, optimizer: Any, key: int
    ) -> None:
        """Keep the arrays; make the state at the weights of now."""
        self.weight, self.gradient = weight, gradient
        if len(self.sizes) == 1:
            self.sizes = [weight.size]
        numbers = weight if len(self.sizes) == 1 else weight._slice(0, sum(self.sizes))
        self.state = FlatState.of_optimizer(optimizer, key, numbers)

    def present(self, gradient: nd.NDArray, num_workers: int) -> tuple[int, ...]:
        """The members that the workers have stepped; waits for the sum of a pack.

        Raises
        ------
        MismatchError
            Not the same on every worker.
        """
        if len(self.sizes) == 1:
            return (0,)
        marks = gradient._slice(sum(self.sizes), gradient.size).asnumpy()
        if not np.isin(marks, (0, num_workers)).all():
            raise MismatchError(
                "A small parameter was stepped by some of the workers only "
                f"({int(max(marks[marks % num_workers != 0]))} of {num_workers}). Every "
                "rank must step the same parameters."
            )
        return tuple(np.flatnonzero(marks).tolist())

    def plan(
        self, present: tuple[int, ...], multipliers: Sequence[Multipliers]
    ) -> list[tuple[Run, nd.NDArray, nd.NDArray, Any]]:
        """Runs of members that are alike, with views of weight, gradient and state."""
        first = self.counts[present[0]] if present else 0
        ahead = tuple(self.counts[i] - first for i in present)
        key = (present, ahead, tuple(multipliers))
        if key not in self._plans:
            alike: list[Any] = [None] * len(self.sizes)
            for i in present:
                alike[i] = (self.counts[i], multipliers[i])
            self._plans = {
                key: [
                    (run, self._cut(self.weight, run), self._cut(self.gradient, run))
                    + (self.state.of(run),)
                    for run in runs(self.sizes, alike)
                ]
            }
        return self._plans[key]

    def _cut(self, array: nd.NDArray, run: Run) -> nd.NDArray:
        whole = (run.start, run.stop) == (0, array.size)
        return array if whole else array._slice(run.start, run.stop)


class MemoisedSchedule:
    """A learning-rate schedule that may be asked for the step before, too.

    MXNet's schedules change themselves as `num_update` grows. Keys can be one step
    apart, so each step's value is kept from the first time it is asked for.
    """

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._values: dict[int, float] = {}

    def __call__(self, num_update: int) -> float:
        if num_update not in self._values:
            self._values[num_update] = self._schedule(num_update)
            self._values.pop(num_update - _VERSIONS_KEPT, None)
        return self._values[num_update]


class GlobalUpdate:
    """The optimizer of one store, with hyper-parameters that hold from a step.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
        Used as it is; its `param_dict` is replaced by the members' multipliers, by
        `member_index`.
    num_workers : int
        How many gradients a sum has.
    threshold : float
        Of 2-bit compression.
    """

    def __init__(
        self, optimizer: opt.Optimizer, num_workers: int, threshold: float
    ) -> None:
        if optimizer.lr_scheduler is not None:
            optimizer.lr_scheduler = MemoisedSchedule(optimizer.lr_scheduler)
        self._optimizer = optimizer
        self._num_workers = num_workers
        self._two_bit = TwoBit(threshold, num_workers)
        self._keys: dict[int, KeyState] = {}
        self._versions: list[tuple[int, dict[str, Any], dict[Any, Multipliers]]] = []
        self._versions.append((0, {}, {}))
        self._applied = 0

    def change(
        self,
        step: int,
        values: Mapping[str, Any],
        members: Mapping[int, Sequence[tuple[int, float, float]]],
        offsets: Mapping[int, tuple[int, int]],
    ) -> None:
        """New hyper-parameters, multipliers and keys, which hold from a step on.

        Parameters
        ----------
        step : int
            The first step (from 1) that uses them.
        values : mapping
            Attributes of the optimizer.
        members : mapping
            Key to (size, lr_mult, wd_mult) of each member; an unknown key is new.
        offsets : mapping
            Key to (count, offset): from that count of its pushes on, the store's step
            is the count plus offset.
        """
        values = dict(values)
        if values.get("lr_scheduler") is not None:
            values["lr_scheduler"] = MemoisedSchedule(values["lr_scheduler"])
        for _, older, _ in self._versions:  # so that a key one step behind goes back
            for name in values:
                older.setdefault(name, getattr(self._optimizer, name))
        last_step, last_values, last_multipliers = self._versions[-1]
        made = {}
        for key, listed in members.items():
            if key not in self._keys:
                self._keys[key] = KeyState([size for size, _, _ in listed])
            for i, (_, lr_mult, wd_mult) in enumerate(listed):
                made[member_index(key, i)] = Multipliers(lr_mult, wd_mult)
        self._versions.append(
            (
                max(step, last_step),
                {**last_values, **values},
                {**last_multipliers, **made},
            )
        )
        del self._versions[:-_VERSIONS_KEPT]
        self._applied = -1
        for key, (count, offset) in offsets.items():
            self._keys[key].offsets = self._keys[key].offsets[-1:] + [(count, offset)]

    def __call__(self, key: int, weight: nd.NDArray, gradient: nd.NDArray) -> None:
        """Update `weight` in place; returns before the work is done.

        Parameters
        ----------
        key : int
            A key made known by `change`.
        weight, gradient : NDArray, float32, 1-D, same size
            The key's (slice's) global weight and the sum over the workers; the same
            arrays each time.
        """
        entry = self._keys[key]
        if entry.state is None:
            entry.take(weight, gradient, self._optimizer, key)
        self._update(key, entry)

    def restore(
        self, key: int, words_key: int, stored: nd.NDArray, words: nd.NDArray
    ) -> None:
        """Update a key by a compressed sum; returns when the work is done.

        Parameters
        ----------
        key : int
            Whose weight to update; its first push was whole.
        words_key, stored
            Not used.
        words : NDArray, float32, 1-D
            The sum over the workers, see `TwoBit.restore`.
        """
        entry = self._keys[key]
        self._two_bit.restore(words, entry.gradient)
        self._update(key, entry)
        entry.weight.wait_to_read()  # the pull that follows does not wait for it

    def assign(self, key: int, weight: nd.NDArray, value: nd.NDArray) -> None:
        """Make `value` the weight, of a pack's members that are marked; no update."""
        entry = self._keys[key]
        if len(entry.sizes) == 1:
            value.copyto(weight)
            return
        marks = value._slice(sum(entry.sizes), value.size).asnumpy()
        start = 0
        for size, mark in zip(entry.sizes, marks):
            if mark:
                part = value._slice(start, start + size)
                part.copyto(weight._slice(start, start + size))
            start += size

    def _update(self, key: int, entry: KeyState) -> None:
        present = entry.present(entry.gradient, self._num_workers)
        entry.pushes += 1
        count = entry.pushes + self._optimizer.begin_num_update
        step = count + [o for since, o in entry.offsets if since <= entry.pushes][-1]
        self._hold(step)
        self._optimizer.num_update = step
        table = self._optimizer.param_dict
        multipliers = [table[member_index(key, i)] for i in range(len(entry.sizes))]
        for run, weight, gradient, state in entry.plan(present, multipliers):
            first = run.members[0]
            index, count = member_index(key, first), entry.counts[first]
            apply_optimizer(self._optimizer, index, count, weight, gradient, state)
        for i in present:
            entry.counts[i] += 1

    def _hold(self, step: int) -> None:
        """Make the optimizer's attributes those that hold at `step`."""
        chosen = max(i for i, v in enumerate(self._versions) if i == 0 or v[0] <= step)
        if chosen == self._applied:
            return
        _, values, multipliers = self._versions[chosen]
        for name, value in values.items():
            setattr(self._optimizer, name, value)
        self._optimizer.param_dict = multipliers
        self._applied = chosen


def member_index(key: int, member: int) -> int | str:
    """A member's index in the optimizer: not a tuple, which MXNet takes for a list."""
    return key if member == 0 else f"{key}.{member}"
