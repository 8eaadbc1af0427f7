"""Notices weights that the user gave to parameters between two steps.

MXNet tells nobody of it but a Gluon Trainer, and that one before it happens.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from typing import Any, Callable, Iterable

import numpy as np
from mxnet import gluon
from mxnet import ndarray as nd
from mxnet.base import _LIB, check_call
from mxnet.module import Module

from .keys import UserKeys
from .kvstore import ODSGDStore
from .replicated import Replicated


class AssignedParameters:
    """The Gluon parameters that got new weights since the last step."""

    def __init__(self) -> None:
        self._before: dict[int, np.ndarray] | None = None

    def expect(self, params: Iterable[tuple[int, gluon.Parameter]]) -> None:
        """Remember the weights, by key, before any is assigned in this step."""
        if self._before is None:
            self._before = {key: p.list_data()[0].asnumpy() for key, p in params}

    def take(
        self,
        params: Iterable[tuple[int, gluon.Parameter]],
        records: UserKeys[Replicated],
    ) -> tuple[bool, list[int]]:
        """Whether any was assigned to, and the keys of those that differ; starts anew.

        The first is the same on every rank. The second need not be: a rank may assign
        what it held before.
        """
        touched, differing = self._before is not None, []
        for key, param in params:
            record, weights = records[key], param.list_data()
            if _is_new(record, weights):
                touched = True
                differing.append(key)
            elif self._differs(key, weights):
                differing.append(key)
            record.weights = weights
        self._before = None
        return touched, differing

    def _differs(self, key: int, weights: list[nd.NDArray]) -> bool:
        return self._before is not None and not np.array_equal(
            self._before[key], weights[0].asnumpy()
        )


def _is_new(record: Replicated, weights: list[nd.NDArray]) -> bool:
    """Whether a parameter was initialised once more, with memory of its own.

    Setting `grad_req` makes new NDArrays, too, but of the same memory.
    """
    known, now = record.weights[0], weights[0]
    return known is not now and _address(known) != _address(now)


def _address(array: nd.NDArray) -> int | None:
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return address.value


def marks_assigned(method: Callable[..., None]) -> Callable[..., None]:
    """A Module's method that assigns weights, made to tell a store of ours.

    Parameters
    ----------
    method : callable
        `Module.set_params` or `Module.init_params`.

    Notes
    -----
    `fit` hands a Module's own dict back to it after each epoch, with the weights that
    the devices hold, averaged over them: what differs by rounding alone is the same.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def marking(self: Module, *args: Any, **kwargs: Any) -> None:
        store = getattr(self, "_kvstore", None)
        records = list(store.pipeline.records) if isinstance(store, ODSGDStore) else []
        if records:
            store.pipeline.check("Weights were assigned")
        given = signature.bind(self, *args, **kwargs).arguments.get("arg_params")
        is_own = given is not None and given is getattr(self, "_arg_params", None)
        before = [record.weights[0].asnumpy() for record in records]
        method(self, *args, **kwargs)
        differing = [
            record
            for record, old in zip(records, before)
            if not np.allclose(record.weights[0].asnumpy(), old, 1e-6, 0, True)
        ]
        if records and (differing or not is_own):
            store.pipeline.assignment.note(differing)

    return marking
