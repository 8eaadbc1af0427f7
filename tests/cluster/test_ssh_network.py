"""Which addresses and ports a job over ssh takes, and what it says of a bad network."""

import pytest
from cluster_jobs import train
from test_ssh_training import TWO, addresses

EPHEMERAL = "tcp flags & (syn | ack) == syn tcp dport 32768-60999"
MOST = "tcp flags & (syn | ack) == syn tcp dport != { 22, 25000-25009 }"
SYN = "tcp flags & (syn | ack) == syn tcp dport != 22"
# Long enough for busy machines, too short for a wait of ps-lite's, which has no end.
SOON = {"limit_s": 100}


@pytest.fixture
def firewalls(hosts):
    """Let both hosts drop what matches a rule."""
    with hosts["alpha"].firewall(EPHEMERAL), hosts["beta"].firewall(EPHEMERAL):
        yield


def test_second_network_by_interface(over_ssh, hosts, expected):
    job = over_ssh(["alpha", "beta"], *TWO, "--interface", "ib0", *train())
    result = job.finish()
    alpha, beta = hosts["alpha"], hosts["beta"]
    wanted = [alpha.fast, alpha.fast, beta.fast]
    assert addresses(result.check(expected)) == wanted
    for host in (alpha, beta):
        assert f"{host.name}: advertising {host.fast} (from " in result.output
        assert "interface ib0" in result.output


def test_second_network_by_addresses_in_the_host_file(over_ssh, hosts, expected):
    alpha, beta = hosts["alpha"], hosts["beta"]
    job = over_ssh([alpha.fast, f"root@{beta.fast}"], *TWO, *train())
    reports = job.finish().check(expected)
    assert addresses(reports) == [alpha.fast, alpha.fast, beta.fast]


def test_second_address_of_an_interface(over_ssh, hosts, expected):
    alpha, beta = hosts["alpha"], hosts["beta"]
    reports = over_ssh([alpha.second, beta.second], *TWO, *train()).finish()
    # '198.19.n.110' is larger than '198.19.n.109': here beta is first.
    found = addresses(reports.check(expected))
    assert found == [alpha.second, beta.second, alpha.second]


def test_default_ports_where_the_ephemeral_range_is_dropped(
    over_ssh, firewalls, expected
):
    over_ssh(["alpha", "beta"], *TWO, *train()).finish().check(expected)


def test_port_range_through_a_firewall(over_ssh, hosts, expected):
    with hosts["alpha"].firewall(MOST), hosts["beta"].firewall(MOST):
        ports = ("--port-range", "25000-25009")
        job = over_ssh(["alpha", "beta"], *TWO, *ports, *train())
        reports = job.finish().check(expected)
    for report in reports.values():
        assert 25000 <= int(report["env"]["PORT"]) <= 25009
        assert 25000 <= int(report["env"]["DMLC_PS_ROOT_PORT"]) <= 25009


def test_a_firewall_in_the_way_is_named(over_ssh, hosts):
    with hosts["alpha"].firewall(SYN):
        result = over_ssh(["alpha", "beta"], *TWO, *train(), **SOON).finish()
    assert result.code in (1, 2) and result.reports() == {}, result
    text = f"beta does not reach alpha at {hosts['alpha'].address} port "
    assert text in result.errors
    assert "--port-range" in result.errors


def test_networks_without_a_route_between_them(over_ssh, hosts):
    rule = f"ip saddr {hosts['alpha'].address} meta l4proto tcp"
    with hosts["beta"].firewall(rule):
        result = over_ssh(["alpha", "beta"], *TWO, *train(), **SOON).finish()
    assert result.code in (1, 2) and result.reports() == {}, result
    assert "does not reach" in result.errors
    assert "--interface" in result.errors


def test_an_interface_that_is_not_there(over_ssh):
    job = over_ssh(["alpha", "beta"], *TWO, "--interface", "eth7", *train(), **SOON)
    result = job.finish()
    assert result.code in (1, 2) and result.reports() == {}, result
    for text in ("eth7", "ib0", "eth0", "alpha"):
        assert text in result.errors


def test_too_few_free_ports(over_ssh):
    job = over_ssh(["alpha"], *TWO, "--port-range", "2221-2224", *train(), **SOON)
    result = job.finish()
    assert result.code in (1, 2) and result.reports() == {}, result
    assert "--port-range" in result.errors
    assert "alpha" in result.errors


def test_a_taken_port_is_left_out(over_ssh, expected):
    ports = ("--port-range", "2221-2225")  # sshd has 2222, and four are needed.
    reports = over_ssh(["alpha"], *TWO, *ports, *train()).finish().check(expected)
    assert "2222" not in {report["env"]["PORT"] for report in reports.values()}
