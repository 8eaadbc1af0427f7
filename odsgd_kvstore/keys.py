"""User keys to our own small int keys, each on the server that we choose.

ps-lite sends an array below MXNET_KVSTORE_BIGARRAY_BOUND whole to server
`key * 9973 % num_servers` and cuts a larger one over all servers. So a server is
chosen by choosing the key. Native keys are never reused in a process.
"""

from __future__ import annotations

import contextlib
from typing import Any, Generic, Iterator, TypeVar, Union

from .errors import ConfigError, JobError

UserKey = Union[int, str]
Record = TypeVar("Record")

_HASH = 9973
_LARGEST_KEY = (2**31 - 1) // _HASH  # above it MXNet's hash overflows an int


class NativeKeys:
    """Deals out native keys in the same order on every rank.

    Parameters
    ----------
    num_servers : int
    bigarray_bound : int
        Arrays of that many numbers or more are cut over all servers by ps-lite.

    Attributes
    ----------
    loads : list of int
        Numbers that are pushed to each server in a step.
    """

    def __init__(self, num_servers: int, bigarray_bound: int) -> None:
        self.bigarray_bound = bigarray_bound
        self._next = 0
        self.loads = [0] * num_servers

    def on_server(self, server: int) -> int:
        """A new key whose whole array lives on server `server`."""
        while server_of(self._next, len(self.loads)) != server:
            self._next += 1
        self._next += 1
        if self._next > _LARGEST_KEY:
            raise JobError(
                f"This process has used all {_LARGEST_KEY} keys that MXNet's server "
                "choice allows. Start a new job."
            )
        return self._next - 1

    def place(self, size: int) -> int:
        """A new key for `size` numbers, on the server that holds fewest so far."""
        if size >= self.bigarray_bound:
            return self.on_server(server_of(self._next, len(self.loads)))
        server = self.lightest()
        self.loads[server] += size
        return self.on_server(server)

    @contextlib.contextmanager
    def given_back_on_error(self) -> Iterator[None]:
        """Take back what was dealt out inside, if that ends with an exception."""
        before = self._next, list(self.loads)
        try:
            yield
        except Exception:
            self._next, self.loads[:] = before
            raise

    def lightest(self) -> int:
        """The server that holds fewest numbers so far."""
        return self.loads.index(min(self.loads))


def server_of(key: int, num_servers: int) -> int:
    """The server that ps-lite sends a small array of this key to."""
    return key * _HASH % num_servers


class UserKeys(Generic[Record]):
    """The user's keys of one store, int and str mixed, in order of creation."""

    def __init__(self) -> None:
        self._records: dict[UserKey, Record] = {}

    def add(self, key: UserKey, record: Record) -> None:
        """Remember a new key.

        Raises
        ------
        ConfigError
            The key exists.
        """
        self.check_new(key)
        self._records[key] = record

    def check_new(self, key: UserKey) -> None:
        """Raise ConfigError unless `key` is an int or str that is not known yet."""
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise ConfigError(f"Key {key!r} is a {type(key).__name__}; use int or str.")
        if key in self._records:
            raise ConfigError(
                f"Key {key!r} was initialised before, and a key of a distributed store "
                "keeps its shape and its place on the servers. Use another key, or a "
                "new store: mx.kv.create('dist_odsgd')."
            )

    def __getitem__(self, key: UserKey) -> Record:
        try:
            return self._records[key]
        except (KeyError, TypeError):
            known = list(self._records)
            shown = ", ".join(repr(k) for k in known[:8]) + ("..." if known[8:] else "")
            raise ConfigError(
                f"Key {key!r} is not known to this store; known are: {shown or 'none'}. "
                "Call broadcast (or init) for it first, on every rank."
            ) from None

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)


def grouped(key: Any, value: Any, out: Any) -> list[tuple[UserKey, list, list]]:
    """(key, values, outs) per key, whatever the nesting that KVStore allows.

    Parameters
    ----------
    key : int, str, or list of them
    value : NDArray, list of NDArray, or list of lists
    out : as `value`, or None

    Returns
    -------
    list of (key, list of NDArray, list of NDArray)
        The last is empty where `out` is None.

    Raises
    ------
    ConfigError
        The lengths differ, or a list of arrays is empty.
    """
    triples = _nested(key, value, out)
    for user_key, values, outs in triples:
        if not values or out is not None and not outs:
            raise ConfigError(f"Key {user_key} came with an empty list of arrays.")
    return triples


def _nested(
    key: Any, value: Any, out: Any
) -> list[tuple[UserKey, list[Any], list[Any]]]:
    if not isinstance(key, (list, tuple)):
        return [(key, as_list(value), [] if out is None else as_list(out))]
    outs = [None] * len(key) if out is None else out
    if not len(key) == len(value) == len(outs):
        raise ConfigError(
            f"{len(key)} keys came with {len(value)} values and {len(outs)} outs; give "
            "one of each per key."
        )
    return [
        (k, as_list(v), [] if o is None else as_list(o))
        for k, v, o in zip(key, value, outs)
    ]


def as_list(value: Any) -> list[Any]:
    """A list of one, unless it is a list or tuple already."""
    return list(value) if isinstance(value, (list, tuple)) else [value]
