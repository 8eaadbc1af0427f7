"""Addresses of a role: names made numeric, what is refused, what is waited for."""

import errno
import logging
import os
import socket

import pytest

from odsgd_kvstore import resolve
from odsgd_kvstore.errors import ConfigError, LaunchError
from odsgd_kvstore.resolve import settle_addresses

OWN = {"127.0.0.1", "127.0.1.1", "10.0.0.2", "10.1.0.2", "0.0.0.0"}
HOSTS = {
    "node1": ["10.0.0.2"],
    "node2": ["10.0.0.3"],
    "debian": ["127.0.1.1"],
    "localhost": ["127.0.0.1"],
    "two": ["10.0.0.1", "10.0.0.2"],
    "pod": ["10.0.0.3", "10.0.0.10"],
    "newer": ["fd00::2"],
}


class Clock:
    """Time that passes in `sleep` only; a name becomes known at 35 s."""

    def __init__(self, hosts):
        self.now, self.hosts = 0.0, hosts

    def sleep(self, seconds):
        self.now += seconds
        if self.now >= 35:
            self.hosts["late"] = ["10.0.0.3"]


@pytest.fixture
def clock(monkeypatch):
    """A machine with the addresses OWN, the names HOSTS and a clock."""
    hosts = dict(HOSTS)
    clock = Clock(hosts)

    def getaddrinfo(name, port, family, kind):
        if "." in name and name.replace(".", "").isdigit():
            hosts.setdefault(name, [name])
        found = [a for a in hosts.get(name, []) if (":" in a) == (family == 10)]
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(family, kind, 6, "", (address, 0)) for address in found]

    def bind(address, port):
        if address not in OWN:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(resolve, "_bind", bind)
    monkeypatch.setattr(resolve, "_interfaces", lambda: [("eth0", "10.0.0.2")])
    monkeypatch.setattr(resolve.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(resolve.time, "sleep", clock.sleep)
    return clock


def job(**env):
    return {"DMLC_PS_ROOT_URI": "node1", "DMLC_PS_ROOT_PORT": "9091", **env}


def refused(parts, role, kind=ConfigError, **env):
    with pytest.raises(kind) as caught:
        settle_addresses(role, job(**env))
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_name_of_the_scheduler_becomes_a_number(clock, caplog, role):
    environ = job(DMLC_NODE_HOST="10.0.0.2")
    assert settle_addresses(role, environ) == "node1 port 9091, 10.0.0.2"
    assert environ["DMLC_PS_ROOT_URI"] == "10.0.0.2"
    assert caplog.records == []


def test_number_stays_as_it_is(clock):
    environ = job(DMLC_PS_ROOT_URI="10.0.0.2")
    assert settle_addresses("scheduler", environ) == "10.0.0.2 port 9091"
    assert environ == job(DMLC_PS_ROOT_URI="10.0.0.2")


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_local_job_of_sockets_is_left_alone(role):
    environ = job(DMLC_LOCAL="1", DMLC_PS_ROOT_PORT="123456789", PORT="123456790")
    before = dict(environ)
    settle_addresses(role, environ)
    assert environ == before


def test_name_of_a_role_becomes_a_number(clock):
    environ = job(DMLC_PS_ROOT_URI="node2", DMLC_NODE_HOST="node1")
    settle_addresses("worker", environ)
    assert environ["DMLC_NODE_HOST"] == "10.0.0.2"


def test_role_without_an_address_gets_the_one_that_faces_the_scheduler():
    environ = job(DMLC_PS_ROOT_URI="localhost")  # Real sockets.
    settle_addresses("server", environ)
    assert environ["DMLC_NODE_HOST"] == environ["DMLC_PS_ROOT_URI"] == "127.0.0.1"


def test_interface_is_left_to_ps_lite_when_there_is_one(clock):
    environ = job(DMLC_INTERFACE="eth0")
    settle_addresses("server", environ)
    assert "DMLC_NODE_HOST" not in environ
    parts = ["DMLC_INTERFACE is 'ib0'", "10.0.0.2 (eth0)"]
    refused(parts, "server", DMLC_INTERFACE="ib0")


@pytest.mark.parametrize(
    "value, parts",
    [
        ("::1", ["'::1'", "IPv4 only", "10.0.0.2"]),
        ("[fd00::2]", ["'[fd00::2]'", "IPv4 only"]),
        ("tcp://node1", ["'tcp://node1'", "scheme and port stay out"]),
        ("node1:9091", ["'node1:9091'", "scheme and port stay out"]),
        ("newer", ["'newer'", "IPv6 addresses only"]),
        ("0.0.0.0", ["'0.0.0.0'", "cannot connect to it"]),
        ("256.1.1.1", ["'256.1.1.1'", "no IPv4 address"]),
        ("010.0.0.1", ["'010.0.0.1'", "no IPv4 address"]),
        ("10.0.1", ["'10.0.1'", "no IPv4 address"]),
    ],
)
@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_what_is_no_address_is_refused(clock, role, value, parts):
    refused(["DMLC_PS_ROOT_URI is", *parts], role, DMLC_PS_ROOT_URI=value)
    if role == "worker":
        refused(["DMLC_NODE_HOST is", *parts], role, DMLC_NODE_HOST=value)


def test_scheduler_s_address_must_be_its_machine_s(clock):
    parts = ["DMLC_PS_ROOT_URI is 'node2' (10.0.0.3)", "no address of this machine"]
    parts += ["it has 10.0.0.2 (eth0)", "DMLC_USE_KUBERNETES=1"]
    refused(parts, "scheduler", DMLC_PS_ROOT_URI="node2")
    environ = job(DMLC_PS_ROOT_URI="node2", DMLC_USE_KUBERNETES="1")
    settle_addresses("scheduler", environ)  # It binds all addresses.
    assert environ["DMLC_PS_ROOT_URI"] == "node2"


def test_scheduler_in_a_pod_does_not_wait_for_its_name(clock):
    env = {"DMLC_PS_ROOT_URI": "nobody", "DMLC_USE_KUBERNETES": "1"}
    assert settle_addresses("scheduler", job(**env)) == "nobody port 9091"
    assert clock.now == 0
    env["DMLC_PS_ROOT_URI"] = "fd00::2"
    refused(["IPv4 only"], "scheduler", **env)


def test_worker_in_a_pod_waits_for_the_scheduler_s_name_and_keeps_it(clock):
    environ = job(DMLC_PS_ROOT_URI="node2", DMLC_USE_KUBERNETES="1")
    assert settle_addresses("worker", environ) == "node2 port 9091, 10.0.0.3"
    assert environ["DMLC_PS_ROOT_URI"] == "node2"


def test_role_s_own_address_must_be_its_machine_s(clock):
    parts = ["DMLC_NODE_HOST is 'node2' (10.0.0.3)", "no address of this machine"]
    refused([*parts, "10.0.0.2 (eth0)"], "server", DMLC_NODE_HOST="node2")


def test_role_that_only_its_machine_reaches_is_refused_beside_a_far_scheduler(clock):
    env = {"DMLC_PS_ROOT_URI": "node2", "DMLC_NODE_HOST": "debian"}
    parts = ["DMLC_NODE_HOST is 'debian' (127.0.1.1)", "only this machine reaches"]
    refused([*parts, "10.0.0.3", "10.0.0.2 (eth0)"], "worker", **env)


@pytest.mark.parametrize(
    "role, what", [("scheduler", "listens where only"), ("worker", "own machine")]
)
def test_name_that_leads_to_the_machine_itself_is_warned_of(clock, caplog, role, what):
    settle_addresses(role, job(DMLC_PS_ROOT_URI="debian"))
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING and what in text
    for part in ("'debian'", "127.0.1.1", "/etc/hosts", "10.0.0.2 (eth0)"):
        assert part in text


@pytest.mark.parametrize("value", ["localhost", "127.0.0.1"])
def test_loopback_that_is_asked_for_is_not_warned_of(clock, caplog, value):
    settle_addresses("scheduler", job(DMLC_PS_ROOT_URI=value))
    assert caplog.records == []


@pytest.mark.parametrize(
    "role, chosen", [("scheduler", "10.0.0.2"), ("worker", "10.0.0.1")]
)
def test_one_of_several_addresses_is_chosen_and_said(clock, caplog, role, chosen):
    environ = job(DMLC_PS_ROOT_URI="two")
    settle_addresses(role, environ)
    assert environ["DMLC_PS_ROOT_URI"] == chosen
    assert "'two', which has several addresses: " in caplog.text
    assert f"Using {chosen};" in caplog.text


def test_several_addresses_are_ordered_as_numbers(clock):
    environ = job(DMLC_PS_ROOT_URI="pod")
    settle_addresses("worker", environ)
    assert environ["DMLC_PS_ROOT_URI"] == "10.0.0.3"


def test_worker_waits_for_the_scheduler_s_name_and_says_so(clock, caplog):
    environ = job(DMLC_PS_ROOT_URI="late")
    settle_addresses("worker", environ)
    assert environ["DMLC_PS_ROOT_URI"] == "10.0.0.3"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    for text, since in zip(said, (10, 20, 30)):
        assert "DMLC_PS_ROOT_URI, 'late'" in text and f"since {since} s" in text


@pytest.mark.parametrize(
    "role, variable", [("scheduler", "DMLC_PS_ROOT_URI"), ("worker", "DMLC_NODE_HOST")]
)
def test_own_name_that_does_not_resolve_is_an_error_in_seconds(clock, role, variable):
    parts = [f"{variable} is 'nobody'", "does not resolve on this machine", "not known"]
    refused(parts, role, **{variable: "nobody"})
    assert 0 < clock.now < 10


@pytest.mark.parametrize("value", ["70000", "0", "tcp://10.0.0.1:80", ""])
@pytest.mark.parametrize("variable", ["DMLC_PS_ROOT_PORT", "PORT"])
def test_what_is_no_port_is_refused(clock, variable, value):
    parts = [f"{variable} is {value!r}", "1 to 65535"]
    refused(parts, "worker", **{variable: value})


def test_port_that_is_taken_is_named_with_its_holder():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        parts = [f"127.0.0.1 port {port} (DMLC_PS_ROOT_PORT)", "in use"]
        parts.append(f"held by pid {os.getpid()} (")
        env = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port}
        refused(parts, "scheduler", LaunchError, **env)
        env["DMLC_USE_KUBERNETES"] = "1"  # It binds all addresses, this one too.
        refused([f"0.0.0.0 port {port}"], "scheduler", LaunchError, **env)
    settle_addresses("scheduler", job(**env))  # Free again.
