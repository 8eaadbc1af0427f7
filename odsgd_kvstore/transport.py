"""What a store needs of the servers, and its stand-alone form; `native.py` has the other.

Everything here moves arrays and messages; nothing here knows what they mean.
"""

from __future__ import annotations

import abc
import logging
import secrets
from typing import Any, Mapping, Sequence

from mxnet import ndarray as nd
from mxnet.base import KVStoreHandle

from .commands import Sealer
from .errors import JobError, MismatchError, ServerError
from .keys import NativeKeys
from .server import Server
from .views import copy_to

_logger = logging.getLogger(__name__)


class Connection(abc.ABC):
    """What the store needs of the servers.

    Attributes
    ----------
    handle : KVStoreHandle
        MXNet's; null when stand-alone.
    rank, num_workers, num_servers : int
    is_standalone : bool
    bigarray_bound : int
        Arrays of that many numbers are cut over the servers.
    keys : NativeKeys
        Deals out native keys.
    num_stores : int
        Stores made so far, to number them.
    """

    handle = KVStoreHandle()
    rank = 0
    num_workers = 1
    num_servers = 1
    is_standalone = False
    bigarray_bound = 2**31

    def __init__(self) -> None:
        self.keys = NativeKeys(self.num_servers, self.bigarray_bound)
        self.num_stores = 0

    @abc.abstractmethod
    def init(self, keys: Sequence[int], values: Sequence[nd.NDArray]) -> None:
        """Give new keys rank 0's values; collective, returns when it is done."""

    @abc.abstractmethod
    def pushpull(self, key: int, value: nd.NDArray, outs: Sequence[nd.NDArray]) -> None:
        """Push `value`, pull the updated weight into every array of `outs`.

        Returns before it is done; a wait on an array of `outs` ends it. `value` is
        overwritten, and may be written to again by engine operators only.
        """

    @abc.abstractmethod
    def push(self, key: int, value: nd.NDArray) -> None:
        """Push `value`, which is not changed; returns before it is done.

        An engine operator that writes to `value` waits until the servers have it and
        have updated what depends on it.
        """

    @abc.abstractmethod
    def use_float16(self) -> None:
        """Have the servers keep float32 masters of keys that are float16."""

    @abc.abstractmethod
    def pull(self, keys: Sequence[int], outs: Sequence[nd.NDArray]) -> None:
        """Pull what the servers hold now; returns before it is done."""

    @abc.abstractmethod
    def command(self, body: Mapping[str, Any]) -> None:
        """Rank 0 only: have every server obey; returns when all have.

        Raises
        ------
        ServerError
            A server could not.
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ServerError if a server is known to have failed; never waits."""

    @abc.abstractmethod
    def check_now(self) -> None:
        """Ask every server, then `check`; waits for one round trip."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until every worker is here; collective."""

    def exchange(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's `row` (JSON), by rank; collective, returns when it is done.

        Raises
        ------
        MismatchError
            The ranks are not doing the same thing: their rows' 'op' differ.
        """
        rows = self._gather(row)
        if any(other["op"] != row["op"] for other in rows):
            raise MismatchError(
                "The ranks of this job do different things at the same time ("
                + ", ".join(f"rank {i}: {r['op']}" for i, r in enumerate(rows))
                + "). Every rank must make the same stores, keys and steps in the same "
                "order."
            )
        return rows

    @abc.abstractmethod
    def _gather(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The transport of `exchange`."""


class Standalone(Connection):
    """One worker with the servers' code in its own process; no network."""

    is_standalone = True

    def __init__(self) -> None:
        super().__init__()
        self._stored: dict[int, nd.NDArray] = {}
        self._merged: dict[int, nd.NDArray] = {}
        key = secrets.token_bytes()
        self._server = Server(0, "", key, on_refused=_refused_stand_alone)
        self._sealer = Sealer(key, "", 0)
        _logger.warning(
            "dist_odsgd runs stand-alone: no DMLC_* variables are set, so this process "
            "is a job of one worker. To use more, start it with 'odsgd-launch -n "
            "WORKERS -s SERVERS -- python train.py'."
        )

    def init(self, keys: Sequence[int], values: Sequence[nd.NDArray]) -> None:
        for key, value in zip(keys, values):
            self._stored[key] = nd.empty(value.size)  # float32, as the servers' masters
            self._merged[key] = nd.empty(value.size)
            copy_to(value.reshape(-1), self._stored[key])

    def pushpull(self, key: int, value: nd.NDArray, outs: Sequence[nd.NDArray]) -> None:
        self.push(key, value)
        self.pull([key] * len(outs), outs)

    def push(self, key: int, value: nd.NDArray) -> None:
        copy_to(value.reshape(-1), self._merged[key])
        self._server.update(key, self._stored[key], self._merged[key])

    def use_float16(self) -> None:
        pass

    def pull(self, keys: Sequence[int], outs: Sequence[nd.NDArray]) -> None:
        for key, out in zip(keys, outs):
            copy_to(self._stored[key].reshape(out.shape), out)

    def command(self, body: Mapping[str, Any]) -> None:
        self._server.command(self._sealer.seal(body, [self._server.nonce]))
        self.check()

    def check(self) -> None:
        if self._server.error:
            raise ServerError(self._server.error)

    def check_now(self) -> None:
        self.check()

    def barrier(self) -> None:
        pass

    def _gather(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(row)]


def check_equal(
    rows: Sequence[Mapping[str, Any]], name: str, what: str, remedy: str
) -> None:
    """Raise MismatchError, with what differs, unless all ranks gave the same.

    Parameters
    ----------
    rows : sequence of mapping
        As `Connection.exchange` returned them.
    name : str
        The field to compare: text, or a list of texts.
    what, remedy : str
        For the message.
    """
    values = [row[name] for row in rows]
    if all(value == values[0] for value in values):
        return
    if isinstance(values[0], list):
        common = set.intersection(*map(set, values))
        values = [
            _shown([v for v in value if v not in common] or value) for value in values
        ]
    shown = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
    raise MismatchError(
        f"The ranks of this job have different {what} ({shown}). {remedy}"
    )


def _shown(values: Sequence[str]) -> str:
    """The first few of many texts."""
    more = f" and {len(values) - 5} more" if len(values) > 5 else ""
    return (", ".join(values[:5]) or "none") + more


def _refused_stand_alone(message: str) -> None:
    raise JobError(message)
