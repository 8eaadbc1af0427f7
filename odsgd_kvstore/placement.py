"""Gives parameters their blocks: native keys on chosen servers, slices and packs.

The one place that knows how a parameter travels. What may be cut or packed depends on
the optimizer (`optimizer_state.py`); how it is cut, on integers alone (`layout.py`).
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import numpy as np
from mxnet import optimizer as opt

from .blocks import Block
from .keys import NativeKeys
from .layout import PACK_NUMBERS, slice_size, spread
from .optimizer_state import is_elementwise
from .replicated import Replicated


class Placement:
    """The blocks of one store; every rank must ask in the same order.

    Parameters
    ----------
    keys : NativeKeys
    local_is_elementwise : callable
        Returns whether the local update, too, treats every number alike.
    """

    def __init__(
        self, keys: NativeKeys, local_is_elementwise: Callable[[], bool]
    ) -> None:
        self._keys = keys
        self._local_is_elementwise = local_is_elementwise
        self._bound = keys.bigarray_bound
        self._planned: dict[Any, list[tuple[int, int]]] = {}
        self._plans_known = False

    def place(self, record: Replicated, optimizer: opt.Optimizer | None) -> None:
        """Give a new parameter its block.

        A small parameter that a Gluon Trainer will step gets a key for the broadcast
        only: `pack` gives it its block before the first step.
        """
        if not self._may_cut(optimizer) or record.size <= PACK_NUMBERS:
            packs = self._may_pack(record, optimizer)
            server = self._keys.lightest()
            native = (
                self._keys.on_server(server) if packs else self._keys.place(record.size)
            )
            Block([record], [(native, record.size)])
            return
        self._plan_all(optimizer)
        slices = self._planned.pop(record.index, None)
        if slices is None or sum(size for _, size in slices) != record.size:
            largest = self._slice_size(4 * record.size)  # one of several, probably
            loads = self._keys.loads
            if is_frozen(record, optimizer):  # nothing of it is pushed
                loads = list(loads)
            slices = spread([record.size], loads, largest)[0]
        on_server = self._keys.on_server
        Block([record], [(on_server(server), size) for server, size in slices])

    def pack(self, records: Iterable[Replicated], optimizer: Any) -> list[Block]:
        """Put small parameters of a Gluon Trainer together; returns the packs.

        The servers do not have the packs' keys yet.
        """
        groups: dict[Any, list[Replicated]] = {}
        for record in records:
            if self._may_pack(record, optimizer):
                contexts = tuple(str(weight.context) for weight in record.weights)
                groups.setdefault(contexts, []).append(record)
        packs = []
        for group in groups.values():
            for members in self._portions(group):
                packs.append(self._pack(members))
        return packs

    def _may_pack(self, record: Replicated, optimizer: Any) -> bool:
        """Whether it is small, and known beforehand whether it comes in a step."""
        return (
            self._may_cut(optimizer)
            and record.size <= PACK_NUMBERS
            and is_trained(record, optimizer)
        )

    def _slice_size(self, total: int) -> int:
        return min(slice_size(total, len(self._keys.loads)), self._bound - 1)

    def _may_cut(self, optimizer: Any) -> bool:
        has_room = self._bound > 2 * PACK_NUMBERS
        return has_room and is_elementwise(optimizer) and self._local_is_elementwise()

    def _plan_all(self, optimizer: opt.Optimizer) -> None:
        """Plan all that a Gluon Trainer will step at once: it tells one by one."""
        if self._plans_known:
            return
        self._plans_known = True
        sizes = {
            index: int(np.prod(param.shape))
            for index, param in optimizer.param_dict.items()
            if param.grad_req != "null" and param.shape and min(param.shape) > 0
        }
        large = {i: size for i, size in sizes.items() if size > PACK_NUMBERS}
        total = sum(sizes.values())
        small = total - sum(large.values())
        loads = list(self._keys.loads)
        plan = spread([*large.values(), small], loads, self._slice_size(total))
        self._planned = dict(zip(large, plan))
        for slices in self._planned.values():  # the packs have no place yet
            for server, size in slices:
                self._keys.loads[server] += size

    def _portions(self, records: Sequence[Replicated]) -> list[list[Replicated]]:
        """One pack, or several where one server would carry too much."""
        total = sum(record.size for record in records)
        loads = list(self._keys.loads)
        largest = self._slice_size(sum(loads) + total)
        count = len(spread([total], loads, largest)[0])
        portions: list[list[Replicated]] = [[]]
        newest = done = length = 0
        for record in records:
            number = count * done // total
            is_full = length + record.size + 1 >= self._bound  # with the marks
            if number > newest or is_full:
                portions.append([])
                newest, length = number, 0
            portions[-1].append(record)
            done += record.size
            length += record.size + 1
        return [portion for portion in portions if len(portion) > 1]

    def _pack(self, records: Sequence[Replicated]) -> Block:
        size = sum(record.size for record in records)
        server = self._keys.lightest()
        self._keys.loads[server] += size
        marks = len(records)  # see `Block.length`
        return Block(records, [(self._keys.on_server(server), size + marks)])


def is_trained(record: Replicated, optimizer: Any) -> bool:
    """Whether a Gluon Trainer would push this parameter in a step."""
    param = getattr(optimizer, "param_dict", {}).get(record.index)
    return param is not None and param.grad_req != "null"


def is_frozen(record: Replicated, optimizer: Any) -> bool:
    """Whether a Gluon Trainer would not push this parameter."""
    known = record.index in getattr(optimizer, "param_dict", {})
    return known and not is_trained(record, optimizer)
