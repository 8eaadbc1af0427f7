"""What a server says of itself, as numbers in its status key.

A status can be pulled at any time, also while pushes are pending. It is float32,
with three bytes to a number (exact up to 2**24), and small enough not to be cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .commands import PROTOCOL

_MAGIC = 0x0D56D1
_HEADER = 5  # magic, protocol, bytes of nonce, bytes of error text, kind
_NONCE_BYTES = 16
_MOST_NUMBERS = 1400  # 4 KB of text


@dataclass(frozen=True)
class Status:
    """A server's status.

    Attributes
    ----------
    nonce : str
        Hexadecimal; '' when no server of ours has written the status.
    error : str
        A failure with its traceback, the exception first; '' when all is well.
    protocol : int
        Version of messages and status; -1 when the status is not ours.
    is_stock : bool
        Whether our updater runs in MXNet's own server, and not in ours.
    """

    nonce: str = ""
    error: str = ""
    protocol: int = PROTOCOL
    is_stock: bool = False


def length(bigarray_bound: int) -> int:
    """Numbers in a status array: whole on one server, whatever the bound."""
    return min(_MOST_NUMBERS, bigarray_bound - 1)


def encode(status: Status, size: int) -> np.ndarray:
    """The status as `size` float32 numbers; a text that is too long loses its end."""
    room = 3 * (size - _HEADER) - _NONCE_BYTES
    text = status.error.encode()[:room]
    data = bytes.fromhex(status.nonce).ljust(_NONCE_BYTES, b"\0") + text
    data += b"\0" * (-len(data) % 3)
    triples = np.frombuffer(data, np.uint8).reshape(-1, 3) @ (65536, 256, 1)
    array = np.zeros(size, np.float32)
    header = _MAGIC, status.protocol, _NONCE_BYTES, len(text), status.is_stock
    array[:_HEADER] = header
    array[_HEADER : _HEADER + len(triples)] = triples
    return array


def decode(array: np.ndarray) -> Status:
    """The status in `array`; protocol -1 when no server of ours wrote it."""
    numbers = array.astype(np.int64)
    if numbers[0] != _MAGIC:
        return Status(protocol=-1)
    body = numbers[_HEADER:]
    data = np.stack([body >> 16, body >> 8 & 255, body & 255], 1).astype(np.uint8)
    raw = data.tobytes()
    text = raw[_NONCE_BYTES : _NONCE_BYTES + numbers[3]]
    return Status(
        nonce=raw[:_NONCE_BYTES].hex(),
        error=text.decode(errors="replace"),
        protocol=int(numbers[1]),
        is_stock=bool(numbers[4]),
    )
