"""Ranks of a meeting as threads of one process."""

import threading

from odsgd_kvstore.launch import ranks
from odsgd_kvstore.launch.ranks import Rank

LIMIT_S = 60
TOKEN = b"t" * 32
LOCAL = "127.0.0.1"


class Way(ranks.Way):
    """Rank 0 is at a known place, and its token is known."""

    def __init__(self, listener, token=TOKEN, before=()):
        self.listener, self.token, self.before = listener, token, list(before)

    def listen(self, deadline, check=None):
        return self.listener

    def seal(self):
        return self.token, b""

    def targets(self, deadline):
        return [*self.before, self.listener.getsockname()]

    def open_credential(self, credential):
        return self.token


class Thread(threading.Thread):
    """Calls a function; `result` waits, and raises what it raised."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self.call, self.outcome = (function, args, kwargs), None
        self.start()

    def run(self):
        function, args, kwargs = self.call
        try:
            self.outcome = function(*args, **kwargs), None
        except Exception as error:  # noqa: BLE001
            self.outcome = None, error

    def result(self):
        self.join(LIMIT_S)
        assert self.outcome is not None, "it did not end in time"
        value, error = self.outcome
        if error is not None:
            raise error
        return value


def controller(way, size=3, timeout=LIMIT_S, **options):
    """Rank 0, in a thread."""
    rank = Rank(0, size, "node0", "Slurm")
    return Thread(ranks.meet_as_controller, rank, way, timeout=timeout, **options)


def agent(way, number, size=3, timeout=LIMIT_S):
    """Another rank, in a thread."""
    rank = Rank(number, size, f"node{number}", "Slurm")
    return Thread(ranks.meet_as_agent, rank, way, timeout=timeout)


def close(guests):
    """Close the connections."""
    for guest in guests:
        guest.connection.close()
    return guests
