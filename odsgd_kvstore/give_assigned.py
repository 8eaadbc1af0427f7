"""Gives the servers weights that the user assigned between two steps."""

from __future__ import annotations

from typing import Any, Iterable

import mxnet as mx
from mxnet import ndarray as nd

from .buffers import Replicated
from .keys import UserKeys
from .transport import Connection


class Assignment:
    """The parameters of one store that were assigned since its last step.

    Parameters
    ----------
    connection : Connection
    records : UserKeys of Replicated
        The store's parameters.
    store : int
        The store's number.

    Attributes
    ----------
    is_due : bool
        Whether weights were assigned; the same on every rank.
    """

    def __init__(
        self, connection: Connection, records: UserKeys[Replicated], store: int
    ) -> None:
        self._connection, self._records, self._store = connection, records, store
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
        if records and self._connection.rank == 0:
            keys = [record.native for record in records]
            self._connection.command({"op": "assign", "keys": keys})
        for record in records:
            self._give(record)
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

    def _give(self, record: Replicated) -> None:
        """One parameter: A := X, B := X - (A - B), L := X."""
        if record.spare is not None:
            nd.elemwise_sub(record.global_weight, record.spare, out=record.spare)
        value = nd.zeros(record.shape, mx.cpu())  # the servers sum what ranks push
        if self._connection.rank == 0:
            record.weights[0].copyto(value)
        kept = [] if record.global_weight is None else [record.global_weight]
        self._connection.pushpull(record.native, value, kept + record.weights)
        if record.spare is not None:
            nd.elemwise_sub(record.global_weight, record.spare, out=record.spare)
        record.base, record.is_local = record.update, False
        for weight in record.weights:
            weight.wait_to_read()
