"""How processes of a job find and trust each other over TCP, strangers aside.

One process listens, the others dial. Both prove that they know a token, by HMAC, and
only then talk. Frames are bytes, at most JSON; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.handshake import (
    MOST_FRAME,
    NOT_OURS,
    Guest,
    admit,
    introduce,
    shut,
)

DIAL_S, ATTEMPT_S = 3.0, 10.0
ACCEPT_S, PAUSE_S, SAY_S = 0.2, 0.3, 10.0
MOST_PENDING = 64  # Strangers at a time: more are turned away at once.


def listen(ports: Iterable[int]) -> socket.socket:
    """Listen on the first free one of `ports`, at all IPv4 addresses of this host.

    Raises
    ------
    LaunchError
        None is free.
    """
    tried = []
    for port in ports:
        # No SO_REUSEADDR: nobody else shall be able to share the port with us.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind(("0.0.0.0", port))
            sock.listen(256)
        except OSError as error:
            sock.close()
            tried.append(f"{port} ({error.strerror})")
        else:
            return sock
    raise LaunchError(
        f"{socket.gethostname()} has no free port for the other ranks to connect to; "
        f"tried {len(tried)}, such as {', '.join(tried[:3])}. Give other ports with "
        "--port-range A-B"
    )


class _Lobby:
    """Who came so far. Each connection has a thread, so that none waits for another."""

    def __init__(self, size: int, seal: Callable[[], tuple[bytes, bytes]]) -> None:
        self.size, self._seal = size, seal
        self.guests: dict[int, Guest] = {}
        self.strangers: list[str] = []  # Why each was not let in.
        self._pending: dict[socket.socket, float] = {}  # Until when they may try.
        self._arrivals: queue.SimpleQueue = queue.SimpleQueue()

    def missing(self) -> list[int]:
        """Ranks that did not come yet."""
        return [rank for rank in range(1, self.size) if rank not in self.guests]

    def turn(self, listener: socket.socket, limit_s: float) -> None:
        """Let in who comes within the limit, and send away who is slow."""
        if select.select([listener], [], [], limit_s)[0]:
            self._accept(listener)
        for sock, until in self._pending.items():
            if time.monotonic() > until:
                shut(sock)
        while not self._arrivals.empty():
            self._settle(*self._arrivals.get())

    def _accept(self, listener: socket.socket) -> None:
        """Take one connection, if its maker is still there."""
        try:
            sock, (peer, _) = listener.accept()
        except OSError as error:
            self.strangers.append(_text(error))
            time.sleep(ACCEPT_S)  # Too many open files, perhaps: it would come again.
            return
        if len(self._pending) >= MOST_PENDING + self.size:
            sock.close()
            self.strangers.append(f"{peer}: too many at a time")
            return
        self._pending[sock] = time.monotonic() + ATTEMPT_S
        threading.Thread(target=self._try, args=(sock, peer), daemon=True).start()

    def _try(self, sock: socket.socket, peer: str) -> None:
        """Exchange proofs, in a thread of its own."""
        guest, reason = None, ""
        with sock:
            try:
                guest = admit(sock, self._seal)
            except NOT_OURS as error:
                reason = f"{peer}: {_text(error)}"
        self._arrivals.put((sock, guest, reason))

    def _settle(self, sock: socket.socket, guest: Guest | None, reason: str) -> None:
        """Note how an attempt ended."""
        del self._pending[sock]
        if guest is None:
            self.strangers.append(reason)
            return
        known = self.guests.get(guest.rank)
        if known is not None and known.connection.poll(0):  # It has hung up.
            known.connection.close()
            del self.guests[guest.rank]
        if guest.rank in self.missing():
            self.guests[guest.rank] = guest
        else:
            why = f"rank {guest.rank} of {guest.node} is here already, or not expected"
            self.strangers.append(why)
            _send_verdict([guest], why)

    def dismiss(self) -> None:
        """End what is still being tried."""
        for sock in self._pending:
            shut(sock)


def _text(error: BaseException) -> str:
    """Why an attempt failed."""
    if isinstance(error, EOFError):
        return "the connection was closed, or nothing was said in time"
    return str(error) or type(error).__name__


def _send_verdict(guests: Iterable[Guest], error: str = "") -> None:
    """Tell guests that all have come; with an error they are sent away."""
    for guest in guests:
        with contextlib.suppress(OSError):
            guest.connection.send_bytes(json.dumps({"error": error}).encode())
        if error:
            guest.connection.close()


def receive(
    listener: socket.socket,
    size: int,
    seal: Callable[[], tuple[bytes, bytes]],
    deadline: float,
    on_wait: Callable[[str], None] = lambda text: None,
    check: Callable[[], None] = lambda: None,
) -> list[Guest]:
    """Wait at `listener` for the ranks 1 to size - 1, and return them in order.

    Parameters
    ----------
    seal : callable
        Returns the token, and the bytes by which a caller gets it (`open_credential`
        of `dial`); empty if it knows it. Called for each caller, in a thread.
    deadline : float
        On the clock of `time.monotonic`.
    on_wait : callable
        Gets a line every ten seconds that says who is missing.
    check : callable
        Called several times a second; what it raises ends the meeting.

    Raises
    ------
    LaunchError
        Somebody is missing at the deadline; those who came are told, and sent away.
    """
    lobby, say_at = _Lobby(size, seal), time.monotonic() + SAY_S
    try:
        while lobby.missing():
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchError(_who_is_missing(lobby))
            check()
            lobby.turn(listener, min(left, ACCEPT_S))
            if time.monotonic() >= say_at:
                say_at += SAY_S
                on_wait(_who_is_missing(lobby))
    except BaseException as error:
        _send_verdict(lobby.guests.values(), _text(error))
        raise
    finally:
        lobby.dismiss()
    guests = [lobby.guests[rank] for rank in range(1, size)]
    _send_verdict(guests)
    return guests


def _who_is_missing(lobby: _Lobby) -> str:
    """Who came, who did not, and which strangers there were."""
    parts = [f"{_ranks(lobby.missing())} of {lobby.size} did not connect to rank 0"]
    if lobby.guests:
        guests = sorted(lobby.guests.values(), key=lambda guest: guest.rank)
        here = [f"{guest.rank} ({guest.node})" for guest in guests[:8]]
        more = f" and {len(guests) - 8} more" if len(guests) > 8 else ""
        parts.append(f"connected: {', '.join(here)}{more}")
    if lobby.strangers:
        count = len(lobby.strangers)
        parts.append(f"connections of strangers: {count} (last: {lobby.strangers[-1]})")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    """'rank 1', 'ranks 1, 2, 3 and 40 more'."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def dial(
    targets: Sequence[tuple[str, int]],
    rank: int,
    node: str,
    open_credential: Callable[[bytes], bytes],
    deadline: float,
) -> Connection:
    """Find rank 0 at one of `targets`, and return once all ranks have met.

    Parameters
    ----------
    targets : sequence of (str, int)
        Hosts and ports where it may be; who else is there is not trusted.
    rank, node
        Ours, told to rank 0 once it has proved itself.
    open_credential : callable
        Returns the token; its argument is what rank 0 sent, see `receive`.
    deadline : float
        On the clock of `time.monotonic`.

    Raises
    ------
    LaunchError
        Rank 0 was not found in time, or sent us away.
    """
    reasons: dict[tuple[str, int], str] = {}
    said = {"rank": rank, "node": node}
    while True:
        for host, port in targets:
            limit = min(DIAL_S, deadline - time.monotonic())
            if limit <= 0:
                raise LaunchError(_not_found(rank, node, reasons))
            try:
                connection = _dial_one((host, port), limit, open_credential, said)
            except NOT_OURS as error:
                reasons[host, port] = _text(error)
            else:
                return _await_verdict(connection, deadline)
        time.sleep(max(0.0, min(PAUSE_S, deadline - time.monotonic())))


def _dial_one(
    target: tuple[str, int], limit_s: float, open_credential: Callable, said: Any
) -> Connection:
    """Try one address; raises one of `NOT_OURS`."""
    with socket.create_connection(target, limit_s) as sock:
        timer = threading.Timer(ATTEMPT_S, shut, [sock])
        timer.daemon = True
        timer.start()
        try:
            return introduce(sock, open_credential, said)
        finally:
            timer.cancel()


def _await_verdict(connection: Connection, deadline: float) -> Connection:
    """Wait until all have come; rank 0 tells even if they have not."""
    left = max(0.0, deadline - time.monotonic()) + ATTEMPT_S
    try:
        error = "it did not say in time that all ranks have come"
        if connection.poll(left):
            error = json.loads(connection.recv_bytes(MOST_FRAME).decode())["error"]
    except (OSError, EOFError):
        error = "it was gone before all ranks had come"
    if error:
        connection.close()
        raise LaunchError(f"rank 0 ended the job: {error}")
    return connection


def _not_found(rank: int, node: str, reasons: dict) -> str:
    """Where rank 0 was looked for, and what was there instead."""
    shown = [f"{host}:{port}: {why}" for (host, port), why in reasons.items()][:16]
    return f"rank {rank} on {node} did not find rank 0. Tried " + "; ".join(
        shown or ["nothing, as no address was known in time"]
    )
