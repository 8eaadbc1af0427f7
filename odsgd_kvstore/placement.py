"""Gives parameters their blocks: native keys on chosen servers, slices and packs.

The one place that knows how a parameter travels. What may be cut or packed depends on
the optimizer (`optimizer_state.py`); how it is cut, on integers alone (`layout.py`).
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import numpy as np
from mxnet import optimizer as opt

from .buffers import Block, Member, Replicated
from .keys import NativeKeys
from .layout import PACK_NUMBERS, slice_size, spread
from .optimizer_state import is_elementwise


class Placement:
    """The blocks of one store; every rank must ask in the same order.

    Parameters
    ----------
    keys : NativeKeys
    """

    def __init__(self, keys: NativeKeys) -> None:
        self._keys = keys
        self._bound = keys.bigarray_bound
        self._planned: dict[Any, list[tuple[int, int]]] = {}
        self._plans_known = False

    def place(self, record: Replicated, optimizer: opt.Optimizer | None) -> None:
        """Give a new parameter its blocks.

        A small parameter that a Gluon Trainer will step gets a key for the broadcast
        only: `pack` gives it its block before the first step.
        """
        if not self._may_cut(optimizer) or record.size <= PACK_NUMBERS:
            packs = self.may_pack(record, optimizer)
            server = self._keys.lightest()
            native = (
                self._keys.on_server(server) if packs else self._keys.place(record.size)
            )
            block = Block(native, [Member(record, 0, record.size)])
            record.blocks = [(block, block.members[0])]
            return
        self._plan_all(optimizer)
        slices = self._planned.pop(record.index, None)
        if slices is None or sum(size for _, size in slices) != record.size:
            largest = self._slice_size(4 * record.size)  # one of several, probably
            slices = spread([record.size], self._keys.loads, largest)[0]
        record.blocks, start = [], 0
        for server, size in slices:
            member = Member(record, start, start + size)
            block = Block(self._keys.on_server(server), [member])
            record.blocks.append((block, member))
            start += size

    def pack(self, records: Iterable[Replicated], optimizer: Any) -> list[Block]:
        """Put small parameters of a Gluon Trainer together; returns the packs.

        The servers do not have the packs' keys yet.
        """
        groups: dict[Any, list[Replicated]] = {}
        for record in records:
            if self.may_pack(record, optimizer):
                contexts = tuple(str(weight.context) for weight in record.weights)
                groups.setdefault(contexts, []).append(record)
        packs = []
        for group in groups.values():
            for members in self._portions(group):
                packs.append(self._pack(members))
        return packs

    def may_pack(self, record: Replicated, optimizer: Any) -> bool:
        """Whether it is small, and known beforehand whether it comes in a step."""
        return (
            self._may_cut(optimizer)
            and record.size <= PACK_NUMBERS
            and steps(record, optimizer)
        )

    def _slice_size(self, total: int) -> int:
        return min(slice_size(total, len(self._keys.loads)), self._bound - 1)

    def _may_cut(self, optimizer: Any) -> bool:
        return is_elementwise(optimizer) and self._bound > 2 * PACK_NUMBERS

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
        portions: list[list[Replicated]] = [[] for _ in range(count)]
        done = 0
        for record in records:
            portions[min(count * done // total, count - 1)].append(record)
            done += record.size
        return [portion for portion in portions if len(portion) > 1]

    def _pack(self, records: Sequence[Replicated]) -> Block:
        members = [Member(record, 0, record.size) for record in records]
        size = sum(member.size for member in members)
        server = self._keys.lightest()
        self._keys.loads[server] += size
        pack = Block(self._keys.on_server(server), members)
        for record, member in zip(records, members):
            record.blocks = [(pack, member)]
        return pack


def steps(record: Replicated, optimizer: Any) -> bool:
    """Whether a Gluon Trainer would push this parameter in a step."""
    param = getattr(optimizer, "param_dict", {}).get(record.index)
    return param is not None and param.grad_req != "null"
