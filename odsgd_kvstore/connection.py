"""This process's one connection to its job, shared by all its stores.

A second native store in a process would hang, so there is one, and each store has
keys and an optimizer of its own on it.
"""

from __future__ import annotations

from .config import Cluster
from .native import Native
from .transport import Connection, Standalone

_open: Connection | None = None  # one native handle per process


def connect() -> Connection:
    """This process's connection; made, with all other roles, at the first call.

    Returns
    -------
    Connection
        To the job that the DMLC_* variables describe, or stand-alone without them.

    Raises
    ------
    ConfigError
        A DMLC_* variable is missing or malformed.
    HandshakeError
        A server does not run our updater.

    Notes
    -----
    Blocks until all workers, servers and the scheduler have joined.
    """
    global _open
    if _open is None:
        cluster = Cluster.from_environment()
        _open = Standalone() if cluster is None else Native(cluster)
    _open.check()
    return _open


def is_native_open() -> bool:
    """Whether this process holds the native store, so that no second may be made."""
    return isinstance(_open, Native)
