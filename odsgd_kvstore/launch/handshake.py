"""Two ends of a TCP connection prove to each other that they belong to one job.

The standard library's ``authkey`` does less: its proofs are the same for both sides
and for every address, so a stranger whom several ranks call could answer one with
the proof of another, or pass all on to the real rank 0.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from odsgd_kvstore.errors import LaunchError

NONCE = MAC = 32
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_KEEPALIVE["TCP_USER_TIMEOUT"] = 30_000  # Milliseconds.
MOST_CREDENTIAL, MOST_FRAME = 8192, 65536
NOT_OURS = (OSError, EOFError, ValueError, LookupError, TypeError, LaunchError)


@dataclass(frozen=True)
class Guest:
    """A process that proved itself to the listener.

    Parameters
    ----------
    rank : int
    node : str
        Its host, as it says.
    connection : multiprocessing.connection.Connection
        Blocking; the caller closes it.
    """

    rank: int
    node: str
    connection: Connection


def _proof(token: bytes, side: bytes, place: Sequence, *parts: bytes) -> bytes:
    """What shows that `side` knows the token, for this connection only.

    `side` keeps a proof from being sent back to its maker. `place`, the listener's
    address as both ends see it, keeps a stranger who got hold of another of the
    addresses where rank 0 may be from passing everything on to rank 0.
    """
    where = f"{place[0]}:{place[1]}".encode()
    return hmac.digest(token, b"\n".join([side, where, *parts]), "sha256")


def _check(given: bytes, expected: bytes) -> None:
    """Refuse a wrong proof, in constant time."""
    if not hmac.compare_digest(given, expected):
        raise LaunchError("it does not know the secret of this job")


def _open(sock: socket.socket) -> Connection:
    """A connection with a file descriptor of its own, so that `sock` may be closed."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that disappears is noticed in half a minute, in the middle of a message too.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux has all of them.
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(os.dup(sock.fileno()))


def shut(sock: socket.socket) -> None:
    """End a connection whose other end is too slow: its reader sees the end."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def admit(sock: socket.socket, seal: Callable[[], tuple[bytes, bytes]]) -> Guest:
    """The listener's side: return who called, once that is proved.

    Parameters
    ----------
    seal : callable
        Returns the token, and the bytes by which a caller gets it from
        `open_credential`; empty if it knows the token.

    Raises
    ------
    one of NOT_OURS
        It is a stranger, or `sock` was shut.
    """
    connection, place = _open(sock), sock.getsockname()
    try:
        theirs, ours = connection.recv_bytes(NONCE), secrets.token_bytes(NONCE)
        if len(theirs) != NONCE:
            raise LaunchError("it did not begin as a rank of a job does")
        token, credential = seal()
        proof = _proof(token, b"listener", place, theirs, ours)
        connection.send_bytes(ours + proof + credential)
        answer = connection.recv_bytes(MOST_FRAME)
        proof, frame = answer[:MAC], answer[MAC:]
        _check(proof, _proof(token, b"caller", place, theirs, ours, frame))
        said = json.loads(frame.decode())
        return Guest(int(said["rank"]), str(said["node"]), connection)
    except BaseException:
        connection.close()
        raise


def introduce(
    sock: socket.socket, open_credential: Callable[[bytes], bytes], said: Any
) -> Connection:
    """The caller's side: return a connection, once the listener has proved itself.

    Parameters
    ----------
    open_credential : callable
        Returns the token; its argument is what the listener sent, see `admit`.
    said : JSON value
        Told to the listener.

    Raises
    ------
    one of NOT_OURS
        It is a stranger, or `sock` was shut.
    """
    connection, place = _open(sock), sock.getpeername()
    try:
        ours = secrets.token_bytes(NONCE)
        connection.send_bytes(ours)
        answer = connection.recv_bytes(NONCE + MAC + MOST_CREDENTIAL)
        theirs, proof = answer[:NONCE], answer[NONCE : NONCE + MAC]
        token = open_credential(answer[NONCE + MAC :])
        _check(proof, _proof(token, b"listener", place, ours, theirs))
        frame = json.dumps(said).encode()
        proof = _proof(token, b"caller", place, ours, theirs, frame)
        connection.send_bytes(proof + frame)
    except BaseException:
        connection.close()
        raise
    return connection
