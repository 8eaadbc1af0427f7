"""The servers' update: aggregated gradient to global weight, state in slots.

W(t+1) = Opt(W(t), sum_i g(i,t)), once every worker's gradient of the step has
arrived (Xu et al., ACM TACO 17(4), 2020). Runs on every server, for the keys, or
the slices of keys, that this server holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

from mxnet import ndarray as nd
from mxnet import optimizer as opt

from .local_update import apply_optimizer

# Keys are at most one step apart: a worker makes a step only with the weights of the
# one before, and rank 0 sends a change only when its own pulls are here. Two would do.
_VERSIONS_KEPT = 8


@dataclass
class Multipliers:
    """Stands in for a Gluon Parameter in `Optimizer.param_dict` on a server."""

    lr_mult: float = 1.0
    wd_mult: float = 1.0


@dataclass
class KeyState:
    """One key of a store on this server.

    Attributes
    ----------
    slots : list of NDArray
        The optimizer's state arrays, float32, of the weight's (slice's) size.
    state : object
        The same arrays in the optimizer's own structure; valid once `created`.
    count : int
        Updates of this key so far.
    offsets : list of (count, int)
        Steps that the store is ahead of this key, from a count of this key on.
    """

    slots: list[nd.NDArray] = field(default_factory=list)
    state: Any = None
    created: bool = False
    count: int = 0
    offsets: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])


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
        Used as it is; its `param_dict` is replaced by the keys' multipliers.
    """

    def __init__(self, optimizer: opt.Optimizer) -> None:
        if optimizer.lr_scheduler is not None:
            optimizer.lr_scheduler = MemoisedSchedule(optimizer.lr_scheduler)
        self._optimizer = optimizer
        self._keys: dict[int, KeyState] = {}
        self._versions: list[tuple[int, dict[str, Any], dict[int, Multipliers]]] = []
        self._versions.append((0, {}, {}))
        self._applied = 0

    def change(
        self,
        step: int,
        values: Mapping[str, Any],
        multipliers: Mapping[int, tuple[float, float]],
        offsets: Mapping[int, tuple[int, int]],
    ) -> None:
        """New hyper-parameters, multipliers and keys, which hold from a step on.

        Parameters
        ----------
        step : int
            The first step (from 1) that uses them.
        values : mapping
            Attributes of the optimizer.
        multipliers : mapping
            Key to (lr_mult, wd_mult); an unknown key is a new key.
        offsets : mapping
            Key to (count, offset): from that count of the key on, the store's step is
            the key's count plus offset.
        """
        values = dict(values)
        if values.get("lr_scheduler") is not None:
            values["lr_scheduler"] = MemoisedSchedule(values["lr_scheduler"])
        for _, older, _ in self._versions:  # so that a key one step behind goes back
            for name in values:
                older.setdefault(name, getattr(self._optimizer, name))
        last_step, last_values, last_multipliers = self._versions[-1]
        for key in multipliers:
            self._keys.setdefault(key, KeyState())
        made = {key: Multipliers(*pair) for key, pair in multipliers.items()}
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
            The key's (slice's) global weight and the sum over the workers.
        """
        entry = self._keys[key]
        if not entry.created:
            entry.state = self._optimizer.create_state_multi_precision(key, weight)
            entry.slots = flatten(entry.state)
            entry.created = True
        entry.count += 1
        count = entry.count + self._optimizer.begin_num_update
        step = count + [o for since, o in entry.offsets if since <= entry.count][-1]
        self._hold(step)
        self._optimizer.num_update = step
        apply_optimizer(self._optimizer, key, weight, gradient, entry.state)

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


def flatten(state: Any) -> list[nd.NDArray]:
    """The arrays of an optimizer's state, in order."""
    if state is None:
        return []
    if isinstance(state, (tuple, list)):
        return [array for part in state for array in flatten(part)]
    return [state]
