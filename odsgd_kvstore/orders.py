"""What the ranks agree on at the first step, and what the servers are told from then on.

Rank 0 gives the orders. Whatever changes is told before the step from which it holds.
"""

from __future__ import annotations

import logging
from typing import Any, Iterable

import mxnet as mx
from mxnet import optimizer as opt

from .blocks import Block
from .hyper import HyperParameters
from .keys import UserKeys
from .placement import Placement
from .replicated import Replicated, wait_for_pulls
from .transport import Connection, check_equal
from .wire import Wire

_logger = logging.getLogger(__name__)


class Orders:
    """One store's agreement, between ranks and with the servers.

    Parameters
    ----------
    connection : Connection
    number : int
        The store's number.
    records : UserKeys of Replicated
        The store's parameters.
    wire : Wire
    placement : Placement

    Attributes
    ----------
    step : int
        The step that is being made, as MXNet's optimizers count: from 1.
    rescale : float
        Rank 0's `rescale_grad` at the first step, which the servers use.
    packs : list of Block
        Small parameters that travel together.
    """

    def __init__(
        self,
        connection: Connection,
        number: int,
        records: UserKeys[Replicated],
        wire: Wire,
        placement: Placement,
    ) -> None:
        self._connection, self._number = connection, number
        self._records, self._wire, self._placement = records, wire, placement
        self._optimizer: opt.Optimizer | None = None
        self._hyper: HyperParameters | None = None
        self.step = 0
        self.rescale = 1.0
        self.packs: list[Block] = []
        self._num_placed = 0  # parameters that have their blocks
        self._blocks: dict[Block, None] = {}  # all of them, in order

    def begin(self, optimizer: opt.Optimizer, threshold: float) -> None:
        """The first step: compare the ranks, give the servers the optimizer.

        Collective.

        Parameters
        ----------
        optimizer : mxnet.optimizer.Optimizer
            The user's own.
        threshold : float
            Of 2-bit compression.
        """
        self._optimizer = optimizer
        self._hyper = HyperParameters(optimizer, self._number)
        self.rescale = self._agree_on_start(optimizer)
        self._place_packs()
        self.step = optimizer.begin_num_update + 1
        if self._connection.rank == 0:
            message = self._hyper.begin(
                self.step,
                self._blocks,
                rescale=self.rescale,
                num_workers=self._connection.num_workers,
                threshold=threshold,
            )
            self._connection.command(message)

    def is_changed(self) -> bool:
        """Whether the user changed the optimizer since the last step began."""
        return bool(self._hyper.changed())

    def follow(self, coming: Iterable[Replicated]) -> dict[str, Any]:
        """A later step, in which the parameters `coming` come, as far as is known.

        Returns the optimizer's attributes that were changed, by name. Waits only if
        something has to be told; collective if small parameters are new.
        """
        changes = self._hyper.changes(self.step + 1)
        self.step += 1
        self._place_packs()
        offsets = {}
        for block in {record.block for record in coming}:
            offsets.update(self._new_offset(block))
        self._tell(changes, offsets)
        return changes

    def note_pause(self, block: Block) -> None:
        """Tell the servers, if a block came later or paused; then it waits."""
        offsets = self._new_offset(block)
        if offsets:
            self._tell({}, offsets)

    def _agree_on_start(self, optimizer: opt.Optimizer) -> float:
        """Compare the ranks' optimizers; rank 0's rescale_grad, which the servers use."""
        rows = self._connection.exchange(
            {
                "op": f"first step of store {self._number}",
                "keys": [f"{r.key!r} {r.shape}" for r in self._records],
                "optimizer": type(optimizer).__name__,
                "rescale_grad": optimizer.rescale_grad,
                "hyper": repr(self._hyper.summary()),
            }
        )
        check_equal(rows, "keys", "parameters", "Build the same network on every rank.")
        check_equal(rows, "optimizer", "optimizers", "Use the same one on every rank.")
        mine, theirs = rows[self._connection.rank]["hyper"], rows[0]["hyper"]
        if mine != theirs:
            _logger.warning(
                "Rank %d's optimizer has %s. The servers use rank 0's, %s; only this "
                "rank's local updates use its own. Use the same values on every rank.",
                self._connection.rank,
                mine,
                theirs,
            )
        return rows[0]["rescale_grad"]

    def _place_packs(self) -> None:
        """Put new parameters that are small together; collective if any are new."""
        new = list(self._records)[self._num_placed :]
        if not new:
            return
        self._num_placed = len(self._records)
        for record in new:  # a push must not overtake the pull of the first weights
            for weight in record.weights:
                weight.wait_to_read()
        packs = self._placement.pack(new, self._optimizer)
        rows = self._connection.exchange(
            {
                "op": f"pack parameters of store {self._number}",
                "packs": [repr([r.key for r in pack.records]) for pack in packs],
            }
        )
        check_equal(
            rows, "packs", "trained parameters", "Set grad_req alike on every rank."
        )
        self._blocks = dict.fromkeys(record.block for record in self._records)
        self._wire.add_words(self._blocks)
        if packs:
            values = [p.first_weights(mx.cpu(), self._wire.dtype) for p in packs]
            self._wire.init(packs, values)
            self.packs += packs

    def _new_offset(self, block: Block) -> dict[int, list[int]]:
        """By how many steps a block came later, or paused; empty if that is known."""
        offset = self.step - self._optimizer.begin_num_update - block.update - 1
        if offset == block.offset:
            return {}
        block.offset = offset
        return {s.native: [block.update + 1, offset] for s in block.slices}

    def _tell(self, changes: dict[str, Any], offsets: dict[int, list[int]]) -> None:
        """Rank 0: send the servers what is new, to hold from this step on.

        Its own pulls are waited for first: all earlier updates are done then, so that
        none can take what is sent for its own.
        """
        if self._connection.rank != 0:
            return
        message = self._hyper.change(self.step, self._blocks, changes, offsets)
        if message:
            wait_for_pulls(self._records)
            self._connection.command(message)
