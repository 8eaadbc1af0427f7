"""Ports of this machine: found, listened on, reached, and their holders."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from odsgd_kvstore.launch import ports

LIMIT_S = 60
# A range of ports below those that the kernel gives to connections.
FIRST, LAST = 15_300, 15_399


@pytest.fixture(autouse=True)
def no_listener_left():
    before = threading.active_count()
    yield
    ports.close({"release": True})
    assert not ports._reserved
    assert threading.active_count() == before


def test_a_port_of_another_job_that_starts_is_not_offered():
    code = "import sys; from odsgd_kvstore.launch import ports\n"
    code += f"asked = {{'ip': '127.0.0.1', 'ports': [{FIRST}]}}\n"
    code += "print(ports.listen(asked), ports.close({}), flush=True); sys.stdin.read()"
    asked = {"range": [FIRST, FIRST + 1], "ports": 2, "least_ports": 1}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout.readline() == b"{'failed': {}} {}\n"
            assert ports.find_ports(asked)["ports"] == [FIRST + 1]
            taken = ports.listen({"ip": "127.0.0.1", "ports": [FIRST]})
            assert taken == {"failed": {str(FIRST): ports.TAKEN_BY_A_JOB}}
        finally:
            other.kill()
    assert ports.find_ports(asked)["ports"] == [FIRST, FIRST + 1]


def test_a_taken_port_is_not_offered():
    with socket.create_server(("127.0.0.2", 0)) as server:  # Any address counts.
        port = server.getsockname()[1]
        found = ports.find_ports({"ports": 9, "range": [port, port]})
    error = f"of the ports {port}-{port} only 0 are free, and this host needs 9"
    assert found == {"ports": [], "ports_error": error}


def test_ports_are_in_the_range_and_start_anywhere():
    seen = set()
    for _ in range(20):
        found = ports.find_ports({"ports": 3, "range": [FIRST, LAST]})
        assert found["ports_error"] == "" and found["ports"] == sorted(found["ports"])
        assert len(set(found["ports"])) == 3
        assert FIRST <= found["ports"][0] and found["ports"][2] <= LAST
        seen.add(tuple(found["ports"]))
    assert len(seen) > 1


def test_more_ports_than_needed_are_no_must():
    wanted = {"ports": 50, "least_ports": 1, "range": [FIRST, FIRST + 9]}
    found = ports.find_ports(wanted)
    assert 1 <= len(found["ports"]) <= 10 and found["ports_error"] == ""


def test_the_kernels_own_ports_come_last(monkeypatch):
    monkeypatch.setattr(ports, "_kernels_own", lambda: (FIRST + 2, FIRST + 9))
    monkeypatch.setattr(ports, "_is_free", lambda port: True)
    wanted = {"ports": 2, "range": [FIRST, FIRST + 9]}
    assert ports.find_ports(wanted)["ports"] == [FIRST, FIRST + 1]
    assert len(ports.find_ports({**wanted, "ports": 5})["ports"]) == 5
    inside = {"ports": 2, "range": [FIRST + 4, FIRST + 5]}
    assert ports.find_ports(inside)["ports"] == [FIRST + 4, FIRST + 5]


def test_listeners_are_reached_until_they_are_closed():
    free = ports.find_ports({"ports": 3, "range": [FIRST, LAST]})["ports"]
    targets = [["127.0.0.1", port] for port in free]
    asked = {"ip": "127.0.0.1", "ports": free[:2]}
    assert ports.listen(asked) == {"failed": {}}
    refused = [*targets[2], "refused"]
    many = {"targets": targets[:2] * 300 + targets[2:], "timeout": LIMIT_S}
    assert ports.reach(many) == {"failed": [refused]}
    assert ports.close({}) == {}
    assert [why for _, _, why in ports.reach(many)["failed"]] == ["refused"] * 601
    # No port is left waiting: it is free for another program at once.
    assert all(ports._is_free(port) for port in free)


def test_a_port_that_cannot_be_had_is_explained():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = ports.listen({"ip": "127.0.0.1", "ports": [port]})
        comm = Path("/proc/self/comm").read_text().strip()
        taken = f"taken by {comm} (pid {os.getpid()})"
        assert found == {"failed": {str(port): taken}}
    found = ports.listen({"ip": "192.0.2.77", "ports": [port]})
    assert found["failed"] == {str(port): "192.0.2.77 is not an address of this host"}
    assert ports.holder(port) == ""
