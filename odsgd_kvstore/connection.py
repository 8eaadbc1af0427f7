"""This process's one connection to its job, shared by all its stores.

A second native store in a process would hang, so there is one, and each store has
keys and an optimizer of its own on it.
"""

from __future__ import annotations

from .config import Cluster, set_log_level
from .errors import ConfigError
from .native import Native
from .transport import Connection, Standalone

# One native handle per process, whether or not its handshake succeeded.
_open: Connection | None = None
_failure: Exception | None = None
_native_types: list[str] = []  # stores of MXNet's own; a deleted one still counts


def connect() -> Connection:
    """This process's connection; made, with all other roles, at the first call.

    Returns
    -------
    Connection
        To the job that the DMLC_* variables describe, or stand-alone without them.

    Raises
    ------
    ConfigError
        A DMLC_* variable is missing or malformed, or this process has made a
        distributed store of MXNet's own.
    HandshakeError
        A server does not run our updater; so does every later call.

    Notes
    -----
    Blocks until all workers, servers and the scheduler have joined.
    """
    global _open, _failure
    if _failure is not None:
        raise _failure
    if _open is None:
        if _native_types:
            raise ConfigError(
                "A 'dist_odsgd' store was asked for in a process that has made a "
                f"{_native_types[0]!r} store. MXNet can have one distributed connection "
                "per process and would hang. Use dist_odsgd for both, or run two jobs."
            )
        set_log_level()
        cluster = Cluster.from_environment()
        try:
            _open = Standalone() if cluster is None else Native(cluster)
        except Exception as error:
            _failure = error
            raise
    _open.check()
    return _open


def note_native(kind: str) -> None:
    """Remember that MXNet made a distributed store of its own in this process."""
    _native_types.append(kind)


def is_native_open() -> bool:
    """Whether this process has joined a job, so that no second store may be made."""
    return _failure is not None or isinstance(_open, Native)
