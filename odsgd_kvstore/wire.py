"""What is sent of a block, and how: whole, as float16, or compressed."""

from __future__ import annotations

import logging
from typing import Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import ndarray as nd

from .blocks import Block, Slice
from .compression import TwoBit, digits, num_words
from .config import Config
from .errors import ConfigError
from .keys import server_of
from .layout import PACK_NUMBERS
from .replicated import Replicated
from .schedule import Schedule
from .transport import Connection
from .views import Views, copy_to, flat_copy

_AT_ONCE = 4 * 1024 * 1024  # numbers that are copied for the servers at a time

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
            One per block, of its shape.
        """
        if not self.is_exact:
            self._connection.use_float16()
        keys, parts, total = [], [], 0
        for block, value in zip(blocks, values):
            self._check_range(block, value)
            if self._connection.rank == 0:
                # A copy, as the user's weights may have oneDNN's layout: see `Views`.
                value = value.astype(self.dtype)
            else:  # not sent, and so never allocated
                value = nd.empty(block.shape, mx.cpu(), self.dtype)
            views = Views(value)
            for slice_ in block.slices:
                keys.append(slice_.native)
                parts.append(block.part(views, slice_))
            total += block.length
            if total > _AT_ONCE:  # copies of all of them would be the peak of memory
                self._connection.init(keys, parts)
                keys, parts, total = [], [], 0
        if keys:
            self._connection.init(keys, parts)

    def _check_range(self, block: Block, value: nd.NDArray) -> None:
        """Refuse weights that float16 would make infinite."""
        if self.is_exact:
            return
        weights = value.asnumpy()
        if (np.isfinite(weights) & ~np.isfinite(weights.astype("float16"))).any():
            keys = ", ".join(str(record.key) for record in block.records)
            raise ConfigError(
                f"A weight of parameter {keys} is {np.abs(weights).max():g}, and with "
                "compression 'fp16' weights may be up to 65504. Leave the compression "
                "out."
            )

    def broadcast(self, pairs: Sequence[tuple[Replicated, nd.NDArray]]) -> None:
        """Give new parameters rank 0's values everywhere; collective.

        The servers have them when it returns; a wait on the weights ends the pull.
        """
        self.init([record.block for record, _ in pairs], [value for _, value in pairs])
        for record, _ in pairs:
            self.read(record, record.weights)

    def read(self, record: Replicated, outs: Sequence[nd.NDArray]) -> None:
        """Copy W into arrays of the parameter's shape; returns before it is done."""
        block = record.block
        views = block.global_weight
        if views is None and self.is_exact and not (block.is_pack or block.is_sliced):
            self._connection.pull([block.slices[0].native] * len(outs), outs)
            return
        if views is None:  # nothing is pending: as it is on the servers now
            views = Views(nd.empty(block.shape, mx.cpu(), self.dtype))
            for slice_ in block.slices:
                self._connection.pull([slice_.native], [block.part(views, slice_)])
        source = views.array
        if block.is_pack:
            source = views.view(*block.span(record.place)).reshape(record.shape)
        for out in outs:
            copy_to(source, out)

    def add_words(self, blocks: Iterable[Block]) -> None:
        """Give new blocks a key for compressed pushes; collective if any is new.

        Small ones are pushed whole: packs, and what could be in one.
        """
        if self._two_bit is None:
            return
        keys, new = self._connection.keys, []
        for block in blocks:
            if block.is_large(keys.bigarray_bound):
                new += [s for s in block.slices if s.words_key is None]
        for slice_ in new:
            server = server_of(slice_.native, self._connection.num_servers)
            slice_.words_key = keys.on_server(server)
        if new:
            workers = self._connection.num_workers
            zeros = [nd.zeros(num_words(slice_.size, workers)) for slice_ in new]
            self._connection.init([slice_.words_key for slice_ in new], zeros)

    def pushpull(self, block: Block, warm: Sequence[int]) -> None:
        """Push the staged gradient, pull W(t+1); returns before it is done.

        Parameters
        ----------
        block : Block
        warm : sequence of int
            Places of the members whose L is W(t+1), on every device.
        """
        block.keep_absent()
        target = block.target()
        direct = self.is_exact and not (block.is_pack or block.is_sliced)
        whole = self._schedule.is_whole(block.update)
        for slice_ in block.slices:
            outs = [] if target is None else [block.part(target, slice_)]
            if direct and warm:
                outs += block.records[0].weights
            if whole or slice_.words_key is None:
                self._push_whole(slice_, outs)
            else:
                self._push_words(slice_, outs)
        block.advance()
        if warm and not direct:
            block.copy_out(target, warm)

    def assign(self, block: Block, places: Sequence[int]) -> None:
        """Make rank 0's weights of these members W, and L on every rank.

        The servers must have been told; A - B stays. Collective, and returns before
        it is done.
        """
        value = Views(self._assigned(block, places))
        target = block.global_weight
        if target is None:
            target = Views(nd.empty(block.shape, mx.cpu(), self.dtype))
        block.subtract_spare(places)
        for slice_ in block.slices:
            part = block.part(value, slice_)
            if slice_.staging is not None:
                # One array, or the next push might overtake this; see `_push_words`.
                part = part.copyto(self._pushed_whole(slice_))
            out = block.part(target, slice_)
            self._connection.pushpull(slice_.native, part, [out])
        if block.slices[0].staging is None:
            target.array.wait_to_read()
        block.subtract_spare(places)
        block.copy_out(target, places)

    def _assigned(self, block: Block, places: Sequence[int]) -> nd.NDArray:
        """What this rank pushes: the servers sum it over the ranks."""
        value = nd.zeros(block.shape, mx.cpu(), self.dtype)
        if self._connection.rank != 0:
            return value
        if not block.is_pack:
            copy_to(block.records[0].weights[0], value)
            return value
        for place in places:
            weight = flat_copy(block.records[place].weights[0])
            copy_to(weight, value._slice(*block.span(place)))
        copy_to(block.mark(places), value._slice(block.size, block.length))
        return value

    def warn_if_useless(self, records: Iterable[Replicated]) -> None:
        """Say, on rank 0, that 2-bit compression was asked for and nothing is large."""
        slices = [slice_ for record in records for slice_ in record.block.slices]
        useless = all(slice_.words_key is None for slice_ in slices)
        if self.is_compressed and useless and self._connection.rank == 0:
            _logger.warning(
                "Compression '2bit' changes nothing here: it takes arrays of more than "
                "%d numbers that ps-lite has not cut over the servers "
                "(MXNET_KVSTORE_BIGARRAY_BOUND).",
                PACK_NUMBERS,
            )

    def rounded(self, weights: nd.NDArray) -> np.ndarray:
        """Weights as the servers would give them back."""
        weights = weights.asnumpy().astype(self.dtype, copy=False)
        return weights.astype("float32", copy=False)

    def stats(self) -> dict[str, int]:
        """Bytes pushed and pulled so far, without the transport's own."""
        return dict(self._stats)

    def _push_whole(self, slice_: Slice, outs: list[nd.NDArray]) -> None:
        value = self._pushed_whole(slice_)
        if not self.is_exact:
            slice_.staging.array.copyto(value)
        self._connection.pushpull(slice_.native, value, outs)
        size = slice_.size * (4 if self.is_exact else 2)
        self._count(size, size)

    def _pushed_whole(self, slice_: Slice) -> nd.NDArray:
        """The array in which a slice's whole pushes travel, the same each time."""
        staging = slice_.staging.array
        if self.is_exact:
            return staging
        if slice_.native not in self._halves:
            half = nd.empty(staging.shape, staging.context, self.dtype)
            self._halves[slice_.native] = half
        return self._halves[slice_.native]

    def _push_words(self, slice_: Slice, outs: list[nd.NDArray]) -> None:
        """Push codes under a key of their own, then pull the weights.

        MXNet orders a pull after a push of the same key only. So the array that it
        pulls through, which is the one that was pushed whole last (`staging`), is read
        by an operator that waits until the codes have been pushed.
        """
        key, gradient = slice_.words_key, slice_.staging.view(0, slice_.size)
        if key not in self._words:
            count = num_words(slice_.size, self._connection.num_workers)
            room = count * digits(self._connection.num_workers)
            self._words[key] = nd.zeros(count, gradient.context)
            self._codes[key] = nd.zeros(room, gradient.context)
            self._residuals[key] = nd.zeros(room, gradient.context)
        words = self._words[key]
        self._two_bit.compress(gradient, self._residuals[key], self._codes[key], words)
        self._connection.push(key, words)
        slice_.staging.view(0, words.size).copyto(words)
        self._connection.pull([slice_.native] * len(outs), outs)
        self._count(4 * words.size, 4 * slice_.size)

    def _count(self, pushed: int, pulled: int) -> None:
        self._stats["pushed_bytes"] += pushed
        self._stats["pulled_bytes"] += pulled
