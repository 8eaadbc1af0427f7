"""Gives the servers weights that the user assigned between two steps."""

from __future__ import annotations

from typing import Any, Iterable

from .blocks import Block
from .keys import UserKeys
from .replicated import Replicated
from .transport import Connection
from .wire import Wire


class Assignment:
    """The parameters of one store that were assigned since its last step.

    Parameters
    ----------
    connection : Connection
    records : UserKeys of Replicated
        The store's parameters.
    store : int
        The store's number.
    wire : Wire

    Attributes
    ----------
    is_due : bool
        Whether weights were assigned; the same on every rank.
    """

    def __init__(
        self,
        connection: Connection,
        records: UserKeys[Replicated],
        store: int,
        wire: Wire,
    ) -> None:
        self._connection, self._records, self._store = connection, records, store
        self._wire = wire
        self._noted: set[Any] = set()
        self.is_due = False

    def note(self, records: Iterable[Replicated]) -> None:
        """Weights were assigned on every rank, and these differ on this one."""
        self._noted.update(record.key for record in records)
        self.is_due = True

    def holds(self, record: Replicated) -> bool:
        """Whether a parameter's weights are newer than the servers'."""
        return record.key in self._noted

    def give(self) -> None:
        """Make rank 0's present weights W on the servers and L on every rank.

        For every parameter that was noted on any rank. The servers' optimizer state
        stays, and so does A - B. Collective. No update may be
        pending: the servers would take it for the new weights.
        """
        records = self._agreed()
        given: dict[Block, list[int]] = {}
        for record in records:
            given.setdefault(record.block, []).append(record.place)
        if given and self._connection.rank == 0:
            keys = [slice_.native for block in given for slice_ in block.slices]
            self._connection.command({"op": "assign", "keys": keys})
        for block, places in given.items():
            self._wire.assign(block, places)
        for record in records:
            record.base, record.is_local = record.update, False
            for weight in record.weights:
                weight.wait_to_read()
        self._noted.clear()
        self.is_due = False

    def _agreed(self) -> list[Replicated]:
        """The parameters that any rank noted: ranks may have held them before."""
        known = list(self._records)
        bits = sum(1 << i for i, record in enumerate(known) if self.holds(record))
        rows = self._connection.exchange(
            {"op": f"assign weights of store {self._store}", "bits": f"{bits:x}"}
        )
        for row in rows:
            bits |= int(row["bits"], 16)
        return [record for i, record in enumerate(known) if bits >> i & 1]
