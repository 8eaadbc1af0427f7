"""Copies of the user's optimizer, and what of it may change between steps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from mxnet import optimizer as opt

_COUNTERS = ("num_update", "begin_num_update", "rescale_grad")
_PLAIN = (int, float, str, type(None), np.generic)


def uncounted_copy(optimizer: opt.Optimizer) -> opt.Optimizer:
    """A copy with counters of its own; parameters (`param_dict`) stay shared."""
    twin = copy.copy(optimizer)  # __getstate__ leaves param_dict out
    for name, value in vars(optimizer).items():
        if type(value) in (dict, list):
            setattr(twin, name, copy.copy(value))
    twin.param_dict = optimizer.param_dict
    twin.lr_scheduler = own_copy(optimizer.lr_scheduler)
    twin.num_update = optimizer.begin_num_update
    twin._all_index_update_counts = {0: {}}
    twin._index_update_count = twin._all_index_update_counts[0]
    return twin


def own_copy(value: Any) -> Any:
    """A learning-rate schedule changes itself: a copy of one. Else the value."""
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def hyper_parameters(optimizer: opt.Optimizer) -> dict[str, Any]:
    """What may change between steps: plain attributes and the schedule.

    Counters and `rescale_grad` are left out: a worker scales its own gradient.
    """
    values = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, _PLAIN) and name not in _COUNTERS
    }
    values["lr_scheduler"] = optimizer.lr_scheduler
    return values
