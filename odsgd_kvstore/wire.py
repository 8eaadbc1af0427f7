"""What is sent of a block, and how: whole, as float16, or compressed."""

from __future__ import annotations

import logging
from typing import Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import ndarray as nd

from .buffers import Block, Replicated
from .compression import TwoBit, digits, num_words
from .config import Config
from .keys import server_of
from .schedule import Schedule
from .transport import Connection
from .views import Views

_logger = logging.getLogger(__name__)


class Wire:
    """Pushes and pulls the blocks of one store.

    Parameters
    ----------
    config : Config
    connection : Connection
    schedule : Schedule
        Which pushes are whole.

    Attributes
    ----------
    dtype : str
        Of what is pulled: 'float32' or 'float16'.
    is_exact : bool
        Whether weights are pulled in float32.
    """

    def __init__(
        self, config: Config, connection: Connection, schedule: Schedule
    ) -> None:
        self._connection, self._schedule = connection, schedule
        self.is_exact = config.compression != "fp16"
        self.dtype = "float32" if self.is_exact else "float16"
        self._two_bit: TwoBit | None = None
        if config.compression == "2bit":
            self._two_bit = TwoBit(config.threshold, connection.num_workers)
        self._halves: dict[int, nd.NDArray] = {}  # gradients in float16
        self._residuals: dict[int, nd.NDArray] = {}
        self._codes: dict[int, nd.NDArray] = {}
        self._words: dict[int, nd.NDArray] = {}
        self._stats = {"pushed_bytes": 0, "pulled_bytes": 0}

    @property
    def is_compressed(self) -> bool:
        """Whether pushes are 2-bit codes, which are made on the CPU."""
        return self._two_bit is not None

    def init(self, blocks: Sequence[Block], values: Sequence[nd.NDArray]) -> None:
        """Give the servers rank 0's first weights; collective, returns when it is done.

        Parameters
        ----------
        blocks : sequence of Block
            New ones.
        values : sequence of NDArray
            One per block, of its length.
        """
        if not self.is_exact:
            self._connection.use_float16()
        values = [value.astype(self.dtype, copy=False) for value in values]
        self._connection.init([block.native for block in blocks], values)

    def broadcast(self, pairs: Sequence[tuple[Replicated, nd.NDArray]]) -> None:
        """Give new parameters rank 0's values everywhere; collective.

        The servers have them when it returns; a wait on the weights ends the pull.
        """
        blocks, numbers = [], []
        for record, value in pairs:
            flat = Views(value)
            for block, member in record.blocks:
                blocks.append(block)
                numbers.append(flat.view(member.start, member.stop))
        self.init(blocks, numbers)
        for record, _ in pairs:
            self.read(record, record.weights)

    def read(self, record: Replicated, outs: Sequence[nd.NDArray]) -> None:
        """Copy W into arrays of the parameter's shape; returns before it is done."""
        for block, member in record.blocks:
            parts = [Views(out).view(member.start, member.stop) for out in outs]
            if block.global_weight is None:
                self._pull(block, parts)
                continue
            for part in parts:
                block.global_of(member).copyto(part)

    def _pull(self, block: Block, outs: Sequence[nd.NDArray]) -> None:
        """Pull a block of one member as it is on the servers now."""
        if self.is_exact:
            self._connection.pull([block.native] * len(outs), outs)
            return
        for out in outs:
            half = nd.empty(out.shape, out.context, self.dtype)
            self._connection.pull([block.native], [half])
            half.copyto(out)

    def add_words(self, blocks: Iterable[Block]) -> None:
        """Give new blocks a key for compressed pushes; collective if any is new.

        Small ones are pushed whole: packs, and what could be in one.
        """
        if self._two_bit is None:
            return
        keys = self._connection.keys
        new = []
        for block in blocks:
            if block.words_key is None and block.is_large(keys.bigarray_bound):
                server = server_of(block.native, self._connection.num_servers)
                block.words_key = keys.on_server(server)
                new.append(block)
        if new:
            workers = self._connection.num_workers
            zeros = [nd.zeros(num_words(block.size, workers)) for block in new]
            self._connection.init([block.words_key for block in new], zeros)

    def pushpull(self, block: Block, warm: Sequence[int]) -> None:
        """Push the staged gradient, pull W(t+1); returns before it is done.

        Parameters
        ----------
        block : Block
        warm : sequence of int
            Members whose L is W(t+1), on every device.
        """
        block.keep_absent()
        target = block.target()
        direct = self.is_exact and not block.is_pack
        outs = [] if target is None else [target.array]
        if direct and warm:
            member = block.members[0]
            outs += [member.weight(d) for d in range(len(member.record.weights))]
        if block.words_key is not None and not self._schedule.is_whole(block.update):
            self._push_words(block, outs)
        else:
            self._push_whole(block, outs)
        block.advance()
        if warm and not direct:
            block.spread(target, warm)

    def assign(self, block: Block, members: Sequence[int]) -> None:
        """Make rank 0's weights of these members W, and L on every rank.

        The servers must have been told; A - B stays. Collective, and returns before
        it is done.
        """
        value = nd.zeros(block.length, mx.cpu(), self.dtype)
        if self._connection.rank == 0:
            for i in members:
                at, stop = block.span(i)
                block.members[i].weight(0).copyto(value._slice(at, stop))
            if block.is_pack:
                block.mark(members).copyto(value._slice(block.size, block.length))
        if block.staging is not None:
            # One array, or the next push might overtake this one; see `_push_words`.
            value = value.copyto(self._pushed_whole(block))
        target = block.global_weight or Views(nd.empty_like(value))
        block.subtract_spare(members)
        self._connection.pushpull(block.native, value, [target.array])
        if block.staging is None:
            target.array.wait_to_read()
        block.subtract_spare(members)
        block.spread(target, members)

    def rounded(self, weights: nd.NDArray) -> np.ndarray:
        """Weights as the servers would give them back."""
        return weights.asnumpy().astype(self.dtype).astype("float32")

    def stats(self) -> dict[str, int]:
        """Bytes pushed and pulled so far, without the transport's own."""
        return dict(self._stats)

    def _push_whole(self, block: Block, outs: list[nd.NDArray]) -> None:
        value = self._pushed_whole(block)
        if not self.is_exact:
            block.staging.array.copyto(value)
        self._connection.pushpull(block.native, value, outs)
        size = block.length * (4 if self.is_exact else 2)
        self._count(size, size)

    def _pushed_whole(self, block: Block) -> nd.NDArray:
        """The array in which a block's whole pushes travel, the same each time."""
        staging = block.staging.array
        if self.is_exact:
            return staging
        if block.native not in self._halves:
            half = nd.empty(staging.shape, staging.context, self.dtype)
            self._halves[block.native] = half
        return self._halves[block.native]

    def _push_words(self, block: Block, outs: list[nd.NDArray]) -> None:
        """Push codes under a key of their own, then pull the weights.

        MXNet orders a pull after a push of the same key only. So the array that it
        pulls through, which is the one that was pushed whole last (`staging`), is read
        by an operator that waits until the codes have been pushed.
        """
        key, gradient = block.words_key, block.staging.array
        if key not in self._words:
            count = num_words(block.size, self._connection.num_workers)
            room = count * digits(self._connection.num_workers)
            self._words[key] = nd.zeros(count, gradient.context)
            self._codes[key] = nd.zeros(room, gradient.context)
            self._residuals[key] = nd.zeros(block.size, gradient.context)
        words = self._words[key]
        self._two_bit.compress(gradient, self._residuals[key], self._codes[key], words)
        self._connection.push(key, words)
        gradient._slice(0, words.size).copyto(words)
        self._connection.pull([block.native] * len(outs), outs)
        self._count(4 * words.size, 4 * block.length)

    def _count(self, pushed: int, pulled: int) -> None:
        self._stats["pushed_bytes"] += pushed
        self._stats["pulled_bytes"] += pulled
