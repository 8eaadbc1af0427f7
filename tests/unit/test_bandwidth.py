"""Rates, addresses and the commands that make links: nothing is made here."""

import sys
from pathlib import Path

import pytest

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import bandwidth, local, network
from odsgd_kvstore.launch.bandwidth import Link, parse_rate
from odsgd_kvstore.launch.commands import Job, Role
from odsgd_kvstore.launch.namespaces import FORBIDDEN

LINK = Link("198.18.0.254", 200_000_000)


@pytest.mark.parametrize(
    "text, rate",
    [
        ("200mbit", 200_000_000),
        ("1gbit", 1_000_000_000),
        ("1.5Gbit", 1_500_000_000),
        ("800 KBIT", 800_000),
        (" 0.29mbit ", 290_000),
        ("100kbit", 100_000),
        ("100gbit", 100_000_000_000),
    ],
)
def test_parse_rate_takes_a_number_and_a_unit(text, rate):
    assert parse_rate(text) == rate


BAD = "|9|mbit|-1mbit|1e3mbit|200mb|200mbps|200 mbit/s|nanmbit|1,5gbit|1tbit|\u0662mbit"


@pytest.mark.parametrize("text", [*BAD.split("|"), None, 200_000_000])
def test_parse_rate_refuses_another_form_and_names_the_units(text):
    with pytest.raises(LaunchError, match="kbit, mbit, gbit") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0mbit", "99.9kbit", "100.1gbit"])
def test_parse_rate_refuses_what_is_out_of_range(text):
    with pytest.raises(LaunchError, match=f"is {text}; .* from 100kbit to 100gbit"):
        parse_rate(text)


def test_job_refuses_a_bad_rate_and_too_many_roles():
    with pytest.raises(LaunchError, match="--emulate-bandwidth is 'fast'"):
        Job(1, 1, ("true",), bandwidth="fast")
    Job(100, 54, ("true",), bandwidth="1gbit")
    with pytest.raises(LaunchError, match="155 roles, and the job has 156"):
        Job(100, 55, ("true",), bandwidth="1gbit")


def test_addresses_descend_as_strings():
    addresses = bandwidth.link_addresses(155)
    assert addresses[:2] == ["198.18.0.254", "198.18.0.253"]
    assert addresses == sorted(set(addresses), reverse=True)
    assert {len(address) for address in addresses} == {12}


def test_roles_get_addresses_and_tcp_in_the_order_of_their_ranks():
    job = Job(16, 16, ("true",), bandwidth="200mbit")
    base = {"DMLC_LOCAL": "1", "DMLC_INTERFACE": "lo", "DMLC_NODE_HOST": "1.2.3.4"}
    roles, sockets = local.new_job(job, base)
    assert (sockets, base["DMLC_LOCAL"]) == ([], "1")
    names = ["scheduler", *(f"server {i}" for i in range(16))]
    assert [r.name for r in roles] == names + [f"worker {i}" for i in range(16)]
    hosts = [role.env["DMLC_NODE_HOST"] for role in roles]
    assert hosts == [f"198.18.0.{254 - i}" for i in range(33)]
    assert hosts == [role.link.address for role in roles]
    assert {role.link.rate for role in roles} == {200_000_000}
    assert {role.env["DMLC_PS_ROOT_URI"] for role in roles} == {hosts[0]}
    assert {role.env["DMLC_PS_ROOT_PORT"] for role in roles} == {"20000"}
    ports = [int(role.env["PORT"]) for role in roles[1:]]
    assert ports == list(range(20001, 20033))
    assert not {"DMLC_LOCAL", "DMLC_INTERFACE"} & set().union(*(r.env for r in roles))


def test_job_without_a_rate_has_no_links():
    roles, sockets = local.new_job(Job(1, 1, ("true",)), {})
    assert [role.link for role in roles] == [None] * 3 and len(sockets) == 3
    assert {role.env["DMLC_LOCAL"] for role in roles} == {"1"}


def test_roles_of_another_system_keep_their_environment():
    roles = [Role("worker", i, {"DMLC_LOCAL": "1"}, ("true",)) for i in range(2)]
    linked = local.on_links(roles, "1gbit")
    assert [role.env for role in linked] == [{"DMLC_LOCAL": "1"}] * 2
    assert [str(role.link) for role in linked] == [
        "198.18.0.254, 1000 Mbit/s in each direction",
        "198.18.0.253, 1000 Mbit/s in each direction",
    ]


@pytest.mark.parametrize(
    "rate, burst, queue, packet",
    [
        # 2 ms and 100 ms of the rate, with lower limits; a packet fits a burst.
        ("200mbit", 50_000, 2_500_000, 47_500),
        ("1gbit", 250_000, 12_500_000, 65_536),
        ("1mbit", 12_000, 131_072, 11_400),
    ],
)
def test_sizes_follow_the_rate(rate, burst, queue, packet):
    link = Link("198.18.0.254", parse_rate(rate))
    sizes = (link.burst_bytes, link.queue_bytes, link.packet_bytes)
    assert sizes == (burst, queue, packet)


def test_commands_limit_both_ends_of_a_link():
    ip, tc = bandwidth.role_commands(LINK)
    limit = "root tbf rate 200000000bit burst 50000b limit 2500000b\n"
    assert ip.splitlines() == [
        "link set lo up",
        "addr add 198.18.0.254/24 dev eth0",
        "link set eth0 gso_max_size 47500 up",
    ]
    assert tc == f"qdisc add dev eth0 {limit}"
    ip, tc = bandwidth.switch_commands([LINK, LINK])
    assert ip.format("/a", "/b").splitlines() == [
        "link add switch type bridge",
        "link set switch up",
        "link add port0 type veth peer name eth0 netns /a",
        "link set port0 gso_max_size 47500 master switch up",
        "link add port1 type veth peer name eth0 netns /b",
        "link set port1 gso_max_size 47500 master switch up",
    ]
    assert tc == "".join(f"qdisc add dev port{i} {limit}" for i in range(2))


def test_a_role_without_a_link_starts_as_before():
    nothing = network.Network(())
    assert nothing.entry(None) == ([], [])
    nothing.close()


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_a_missing_tool_is_named_before_anything_is_made(monkeypatch, missing):
    which = network.shutil.which
    found = {"ip": which, "tc": which, missing: lambda *args, **kwargs: None}
    monkeypatch.setattr(
        network.shutil, "which", lambda name, path: found[name]("true", path=path)
    )
    monkeypatch.setattr(network.subprocess, "Popen", lambda *a, **k: pytest.fail("run"))
    with pytest.raises(LaunchError, match=f"'{missing}', which .* install iproute2"):
        network.Network([LINK])


def test_another_system_than_linux_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match="needs Linux"):
        network.Network([LINK])


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"user/max_user_namespaces": "0"}, "sysctl -w user.max_user_namespaces=10000"),
        (
            {"kernel/unprivileged_userns_clone": "0"},
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            {"kernel/apparmor_restrict_unprivileged_userns": "1"},
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({"user/max_user_namespaces": "9"}, "Docker: --privileged"),
        ({}, "start as root"),
    ],
)
def test_a_refusal_of_the_kernel_says_what_to_do(
    monkeypatch, tmp_path, settings, words
):
    for name, value in settings.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setattr(network, "SETTINGS", tmp_path)
    text = network.explain(FORBIDDEN, "[Errno 1] unshare: Operation not permitted")
    assert "unshare: Operation not permitted" in text and words in text
    assert text.endswith("or leave --emulate-bandwidth out")


def test_a_failed_command_is_repeated():
    text = network.explain(1, "ip: Error: Unknown device type.\n")
    assert "ip: Error: Unknown device type.;" in text and "sch_tbf" in text


def test_program_of_the_namespaces_imports_nothing_of_the_package():
    assert "odsgd_kvstore" not in Path(network.PROGRAM).read_text(encoding="utf-8")
