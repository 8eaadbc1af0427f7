"""Ranks meet over TCP; strangers who call, or who are called, learn and get nothing."""

import contextlib
import socket
import struct
import time
from multiprocessing.connection import Connection

import pytest
from meetings import LIMIT_S, LOCAL, TOKEN, Way, agent, close, controller

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import handshake, meeting


@pytest.fixture
def listener():
    """A socket that listens on loopback."""
    with socket.create_server((LOCAL, 0)) as sock:
        yield sock


@pytest.fixture
def impatient(monkeypatch):
    """An attempt may take half a second."""
    monkeypatch.setattr(meeting, "ATTEMPT_S", 0.5)


def test_ranks_meet_in_order_and_talk(listener):
    way = Way(listener)
    second = agent(way, 2)
    zero, first = controller(way), agent(way, 1)
    guests = zero.result()
    assert [(g.rank, g.node) for g in guests] == [(1, "node1"), (2, "node2")]
    for guest, other in zip(guests, (first, second)):
        guest.connection.send_bytes(b"say %d" % guest.rank)
        with other.result() as connection:
            assert connection.recv_bytes() == b"say %d" % guest.rank
            connection.send_bytes(b"x" * 1_000_000)
            assert len(guest.connection.recv_bytes()) == 1_000_000
        guest.connection.close()


STRANGERS = {
    "silent": b"",
    "browser": b"GET / HTTP/1.1\r\n\r\n",
    "huge": struct.pack("!i", -1) + struct.pack("!Q", 1 << 62),
    "short": struct.pack("!i", 3) + b"abc",
    "half a frame": struct.pack("!i", 32) + b"abc",
    "no proof": struct.pack("!i", 32) + b"n" * 32 + struct.pack("!i", 40) + b"p" * 40,
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_who_call_hold_nobody_up(listener, stranger, impatient):
    way = Way(listener)
    with socket.create_connection(listener.getsockname()) as sock:
        sock.sendall(STRANGERS[stranger])
        zero = controller(way, size=2)
        one = agent(way, 1, size=2)
        assert [guest.rank for guest in close(zero.result())] == [1]
        one.result().close()


def test_strangers_are_counted_when_somebody_is_missing(
    listener, impatient, monkeypatch
):
    monkeypatch.setattr(meeting, "SAY_S", 0.05)
    way, lines = Way(listener), []
    with contextlib.ExitStack() as stack:
        for data in STRANGERS.values():
            sock = socket.create_connection(listener.getsockname())
            stack.enter_context(sock).sendall(data)
        one = agent(way, 1)
        zero = controller(way, timeout=4, on_wait=lines.append)
        message = (
            r"^rank 2 of 3 did not connect to rank 0; connected: 1 \(node1\); "
            r"connections of strangers: 6 \(last: 127.0.0.1: "
        )
        with pytest.raises(LaunchError, match=message) as caught:
            zero.result()
    with pytest.raises(LaunchError, match="rank 0 ended the job: rank 2 of 3 did not"):
        one.result()
    assert lines[-1] == str(caught.value)  # All were told by then.
    assert not any(TOKEN.decode() in line for line in lines)


def test_a_line_says_who_is_missing_meanwhile(listener, monkeypatch):
    monkeypatch.setattr(meeting, "SAY_S", 0.05)
    lines = []
    zero = controller(Way(listener), size=20, timeout=1, on_wait=lines.append)
    text = "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of 20 did not connect to rank 0"
    with pytest.raises(LaunchError, match=text):
        zero.result()
    assert lines[0] == text


def test_a_request_to_stop_ends_the_meeting_and_is_told(listener, monkeypatch):
    def check():
        if "connected: 1" in lines[-1]:
            raise InterruptedError("stop")

    monkeypatch.setattr(meeting, "SAY_S", 0.05)
    way, lines = Way(listener), [""]
    zero, one = controller(way, check=check, on_wait=lines.append), agent(way, 1)
    with pytest.raises(InterruptedError):
        zero.result()
    with pytest.raises(LaunchError, match="rank 0 ended the job: stop"):
        one.result()


def test_a_wrong_token_is_a_stranger_to_both(listener):
    zero = controller(Way(listener), timeout=2)
    other = agent(Way(listener, token=b"other"), 1, timeout=1)
    with pytest.raises(LaunchError, match="did not find rank 0.*not know the secret"):
        other.result()
    with pytest.raises(LaunchError, match="ranks 1, 2 of 3 did not.*strangers: "):
        zero.result()


def test_a_rank_that_comes_twice_is_refused(listener):
    way = Way(listener)
    zero, first = controller(way), None
    two = agent(way, 2)
    # Which of the two is first is open; exactly one is let in.
    with pytest.raises(LaunchError, match="rank 2 of node2 is here already"):
        again = agent(way, 2)
        while two.is_alive() and again.is_alive():
            two.join(0.05)
        (again if two.is_alive() else two).result()
    first = agent(way, 1)
    close(zero.result())
    first.result().close()
    (two if two.outcome is None or two.outcome[0] else again).result().close()


def test_a_rank_that_hung_up_may_come_again(listener, monkeypatch):
    monkeypatch.setattr(meeting, "SAY_S", 0.05)
    way, lines = Way(listener), [""]
    zero = controller(way, on_wait=lines.append)
    with socket.create_connection(listener.getsockname()) as sock:
        said = {"rank": 2, "node": "old"}
        handshake.introduce(sock, way.open_credential, said).close()
    two, deadline = agent(way, 2), time.monotonic() + LIMIT_S
    while "2 (node2)" not in lines[-1]:
        assert time.monotonic() < deadline
        two.join(0.05)
        if not two.is_alive():  # Refused: the end of the old one is on its way.
            two = agent(way, 2)
    one = agent(way, 1)
    assert [guest.node for guest in close(zero.result())] == ["node1", "node2"]
    one.result().close()
    two.result().close()


def test_an_unexpected_rank_is_refused(listener):
    zero = controller(Way(listener), size=2)
    with pytest.raises(LaunchError, match="rank 7 of node7 is .* not expected"):
        agent(Way(listener), 7).result()
    one = agent(Way(listener), 1)
    close(zero.result())
    one.result().close()


def test_the_end_of_rank_0_is_told(listener):
    one = agent(Way(listener), 1)
    sock, _ = listener.accept()
    guest = handshake.admit(sock, Way(listener).seal)
    sock.close()
    guest.connection.close()
    with pytest.raises(LaunchError, match="it was gone before all ranks had come"):
        one.result()


def test_a_relay_to_the_real_rank_0_learns_nothing(listener):
    """Who holds another of the ports passes all bytes on to rank 0, and back."""
    with socket.create_server((LOCAL, 0)) as squatter:
        way = Way(listener, before=[squatter.getsockname()])
        zero, one = controller(way, size=2), agent(way, 1, size=2)
        passed = relay(squatter, listener.getsockname())
        assert len(passed["answer"]) == 4 + 64
        assert passed["proof"] == b"", "the rank proved itself to a stranger"
        assert [guest.rank for guest in close(zero.result())] == [1]
        one.result().close()


def relay(squatter, target):
    """Pass on nonce and answer; return what came then."""
    ours, _ = squatter.accept()
    with ours, socket.create_connection(target) as theirs:
        ours.settimeout(LIMIT_S)
        theirs.settimeout(LIMIT_S)
        theirs.sendall(ours.recv(4096))
        answer = theirs.recv(4096)
        ours.sendall(answer)
        return {"answer": answer, "proof": ours.recv(4096)}


def test_a_rank_does_not_answer_the_challenge_of_another(listener):
    """Two ranks call a stranger, who sends each what the other one sent."""
    with socket.create_server((LOCAL, 0)) as squatter:
        way = Way(listener, before=[squatter.getsockname()])
        callers = [agent(way, 1), agent(way, 2)]
        socks = [squatter.accept()[0] for _ in callers]
        connections = [Connection(sock.detach()) for sock in socks]
        nonces = [connection.recv_bytes() for connection in connections]
        for connection, nonce in zip(connections, reversed(nonces)):
            connection.send_bytes(nonce + nonce)
        for connection in connections:
            with pytest.raises((EOFError, OSError)):
                connection.recv_bytes()
            connection.close()
        zero = controller(way)
        close(zero.result())
        for caller in callers:
            caller.result().close()


def test_no_free_port_is_explained(listener):
    port = listener.getsockname()[1]
    with pytest.raises(
        LaunchError, match=rf"tried 1, such as {port} \(Address already"
    ):
        meeting.listen([port])
