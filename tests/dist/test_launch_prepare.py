"""What a job over several hosts does before its roles, with real agents here."""

import os
import sys
import threading
from multiprocessing import Pipe

import pytest

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import cluster, ports, probe
from odsgd_kvstore.launch.addresses import Seat
from odsgd_kvstore.launch.agent import Agent
from odsgd_kvstore.launch.cluster import Machine, Settings
from odsgd_kvstore.launch.commands import Job
from odsgd_kvstore.launch.remote import RemoteAgent

FIRST, LAST = 15_400, 15_402  # As many as the job has roles.
KEY = "do-not-show"


@pytest.fixture
def prepare(tmp_path):
    """Prepare a job of one worker on a host whose agent is a thread of this process."""
    ours, theirs = Pipe()
    thread = threading.Thread(target=Agent(theirs, theirs).serve)
    thread.start()
    agent = RemoteAgent("node", ours, ours)
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    settings = Settings(
        env, sys.executable, str(tmp_path), KEY, port_range=(FIRST, LAST)
    )
    job = Job(1, 1, (sys.executable, "train.py"))
    seats = [Seat(kind, 0) for kind in job.kinds]

    def call():
        return cluster.prepare(
            job, [Machine("node", "node", (agent,))], seats, settings, lambda text: None
        )

    yield call
    agent.close()
    thread.join()
    ports.close({"release": True})


def taken(times, monkeypatch):
    """Have another job take the ports of the first so many attempts to listen."""
    asked = []

    def listen(request):
        asked.append(request["ports"])
        found = ports.listen(request)
        if len(asked) <= times:
            found["failed"][str(request["ports"][0])] = ports.TAKEN_BY_A_JOB
        return found

    monkeypatch.setitem(probe.OPERATIONS, "listen", listen)
    return asked


def test_ports_that_another_job_took_are_replaced(prepare, monkeypatch):
    asked = taken(2, monkeypatch)
    roles = prepare()
    assert len(asked) == 3
    scheduler, server, worker = roles
    assert [int(scheduler.env["DMLC_PS_ROOT_PORT"])] + [
        int(role.env["PORT"]) for role in (server, worker)
    ] == asked[-1]
    assert all(FIRST <= port <= LAST for port in asked[-1])
    assert sorted(ports._reserved) == asked[-1]
    assert all(ports._is_free(port) for port in asked[-1])  # Nobody listens any more.


def test_ports_that_are_always_taken_end_it_with_what_to_do(prepare, monkeypatch):
    asked = taken(99, monkeypatch)
    with pytest.raises(LaunchError, match="node: cannot listen on 127.0.0.1: .*range"):
        prepare()
    assert len(asked) == cluster.ATTEMPTS


def test_settings_do_not_show_the_key():
    settings = Settings({"SECRET": KEY}, "python", "/", KEY)
    assert KEY not in repr(settings)
