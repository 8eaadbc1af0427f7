"""Which host, address, port and rank each role gets: nothing is looked up here."""

import pytest

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.addresses import (
    Address,
    Place,
    Seat,
    choose_addresses,
    number,
    parse_port_range,
    seats,
)
from odsgd_kvstore.launch.hosts import parse_hosts

ONE_MACHINE = Address("127.0.0.1", "loopback, as all roles are on one machine")


def report(machine, *interfaces, **more):
    """A report of a machine with loopback and 'eth0 10.0.0.1/24', as words."""
    found = [["lo", "127.0.0.1", 8]]
    for name, text in (interface.split() for interface in interfaces):
        ip, bits = text.split("/")
        found.append([name, ip, int(bits)])
    base = {"machine": machine, "interfaces": found, "ssh_address": ""}
    return {**base, "resolved": {}, "routes": {}, **more}


def choose(*reports, names=("n1", "n2", "n3"), interface=None):
    """Address and origin of each host, as pairs."""
    found = choose_addresses(reports, names[: len(reports)], interface)
    return [(address.ip, address.origin) for address in found]


def refusal(*reports, **kwargs):
    with pytest.raises(LaunchError) as caught:
        choose(*reports, **kwargs)
    return str(caught.value)


# Two networks: 'a' holds the first of a pair, 'b' the second.
A1, A2, A3 = (f"eth0 10.0.0.{i}/24" for i in (1, 2, 3))
B1, B2, B3 = (f"ib0 192.168.9.{i}/24" for i in (1, 2, 3))


def test_one_machine_takes_its_loopback():
    same = report("m", A1, B1, ssh_address="10.0.0.1")
    found = choose_addresses([same, same], ["10.0.0.1", "n1"], None)
    assert found == [ONE_MACHINE, ONE_MACHINE]


def test_interface_counts_on_one_machine_too():
    assert choose(report("m", A1, B1), interface="ib0") == [
        ("192.168.9.1", "interface ib0")
    ]
    assert choose(report("m", A1), interface="lo") == [("127.0.0.1", "interface lo")]


def test_order_of_choice():
    """Each line takes away what was chosen in the line before."""
    many = ("eth0 10.0.0.1/24", "eth1 10.1.0.1/24", "eth2 10.2.0.1/24")
    many += ("eth3 10.3.0.1/24", "eth4 10.4.0.1/24")
    facts = {
        "resolved": {"n1": "10.2.0.1"},
        "ssh_address": "10.3.0.1",
        "routes": {"n2": "10.4.0.1"},
    }
    # The other one is in no network of the first.
    other = report("m2", "eth0 10.9.0.2/24", ssh_address="10.9.0.2")

    def first(name="n1", interface=None, facts=facts):
        reports = report("m1", *many, **facts), other
        return choose(*reports, names=(name, "n2"), interface=interface)[0]

    networks = "10.0.0.0/15"  # 10.0.0.1 and 10.1.0.1, of which one is in the file
    reports = report("m1", *many, **facts), report("m2", "eth7 10.0.7.7/24")
    wanted = choose(*reports, names=("10.1.0.1", "n2"), interface=networks)
    assert wanted == [
        ("10.1.0.1", "network 10.0.0.0/15"),
        ("10.0.7.7", "network 10.0.0.0/15"),
    ]
    assert first(name="10.1.0.1") == ("10.1.0.1", "host file")
    assert first() == ("10.2.0.1", "what n1 stands for")
    assert first(name="alias") == ("10.3.0.1", "the address ssh reached")
    facts = {"routes": {"n2": "10.4.0.1"}}
    assert first(facts=facts) == ("10.4.0.1", "route to n2")
    only = report("m1", A1)
    assert choose(only, other)[0] == ("10.0.0.1", "its only address")


def test_loopback_never_counts_between_machines():
    """Debian gives the host's own name 127.0.1.1; ssh may have come from itself."""
    bad = {
        "resolved": {"n1": "127.0.1.1", "localhost": "127.0.0.1"},
        "ssh_address": "127.0.0.1",
        "routes": {"localhost": "127.0.0.1", "n2": "10.0.0.1"},
    }
    first = report("m1", A1, B1, **bad)
    second = report("m2", A2, ssh_address="10.0.0.2")
    for name in ("n1", "localhost", "127.0.0.1"):
        found = choose(first, second, names=(name, "n2"))
        assert found[0] == ("10.0.0.1", "route to n2")
    text = refusal(report("m1"), second)
    assert "n1 has no IPv4 address" in text and "it has lo 127.0.0.1/8" in text
    assert "ps-lite has no IPv6" in text
    text = refusal(first, second, interface="lo")
    assert "--interface lo: n1 has no such" in text


def test_name_may_be_resolved_by_another_host():
    views = {"n1": "192.168.9.1"}
    first = report("m1", A1, B1, resolved={"n1": "127.0.1.1"}, ssh_address="10.0.0.1")
    second = report("m2", A2, B2, resolved=views, ssh_address="10.0.0.2")
    assert choose(first, second) == [
        ("192.168.9.1", "what n1 stands for"),
        ("192.168.9.2", "interface ib0, in 192.168.9.0/24 as all other hosts"),
    ]


def test_name_means_first_what_the_host_itself_makes_of_it():
    first = report("m1", A1, B1, resolved={"n1": "10.0.0.1", "n2": "10.0.0.2"})
    second = report("m2", A2, B2, resolved={"n1": "192.168.9.1", "n2": "192.168.9.2"})
    assert [ip for ip, _ in choose(first, second)] == ["10.0.0.1", "192.168.9.2"]


def test_address_of_a_router_in_front_of_a_host_does_not_count():
    first = report("m1", A1, ssh_address="10.0.0.1", resolved={"n1": "203.0.113.5"})
    second = report("m2", A2, ssh_address="10.0.0.2")
    assert choose(first, second, names=("203.0.113.5", "n2"))[0][0] == "10.0.0.1"


def test_host_file_wins_over_the_network_that_ssh_used():
    """The host file has the second network (dmlc-core issue 364)."""
    first = report("m1", A1, B1, ssh_address="10.0.0.1")
    second = report("m2", A2, B2, ssh_address="10.0.0.2")
    names = ("192.168.9.1", "192.168.9.2")
    assert choose(first, second, names=names) == [
        ("192.168.9.1", "host file"),
        ("192.168.9.2", "host file"),
    ]


def test_host_file_wins_over_a_network_that_all_have():
    first = report("m1", "eth0 10.1.0.1/24", B1, ssh_address="192.168.9.1")
    second = report("m2", "eth0 10.2.0.1/24", B2, ssh_address="192.168.9.2")
    names = ("10.1.0.1", "10.2.0.1")
    assert [ip for ip, _ in choose(first, second, names=names)] == [*names]
    # One in the host file: the other host has no address in its network.
    assert [ip for ip, _ in choose(first, second, names=("10.1.0.1", "n2"))] == [
        "10.1.0.1",
        "192.168.9.2",
    ]


def test_hosts_get_addresses_of_a_network_that_all_have():
    # ssh reached them through networks of their own.
    first = report("m1", "eth0 10.1.0.1/24", B1, ssh_address="10.1.0.1")
    second = report("m2", "eth0 10.2.0.1/24", B2, ssh_address="10.2.0.1")
    third = report("m3", "eth1 192.168.9.3/24", ssh_address="192.168.9.3")
    assert choose(first, second, third) == [
        ("192.168.9.1", "interface ib0, in 192.168.9.0/24 as all other hosts"),
        ("192.168.9.2", "interface ib0, in 192.168.9.0/24 as all other hosts"),
        ("192.168.9.3", "the address ssh reached"),
    ]


def test_network_of_most_choices_is_taken_if_several_are_common():
    first = report("m1", A1, B1, ssh_address="192.168.9.1")
    second = report("m2", B2, A2, ssh_address="10.0.0.2")
    third = report("m3", B3, A3, ssh_address="10.0.0.3")
    ips = [ip for ip, _ in choose(first, second, third)]
    assert ips == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_host_without_a_choice_joins_the_others():
    first = report("m1", A1, ssh_address="10.0.0.1")
    second = report("m2", B2, A2)
    assert choose(first, second)[1][0] == "10.0.0.2"


def test_networks_that_a_router_connects_stay():
    first = report("m1", "eth0 10.1.0.1/24", ssh_address="10.1.0.1")
    second = report("m2", "eth0 10.2.0.1/24", B2, ssh_address="10.2.0.1")
    assert [ip for ip, _ in choose(first, second)] == ["10.1.0.1", "10.2.0.1"]
    # Clouds give each host a network of its own, of one address.
    first = report("m1", "eth0 10.128.0.2/32", ssh_address="10.128.0.2")
    second = report("m2", "eth0 10.128.0.3/32", ssh_address="10.128.0.3")
    assert [ip for ip, _ in choose(first, second)] == ["10.128.0.2", "10.128.0.3"]


def test_address_that_another_machine_has_too_does_not_count():
    docker = "docker0 172.17.0.1/16"
    first, second = report("m1", docker, A1), report("m2", docker, A2)
    assert choose(first, second) == [
        ("10.0.0.1", "its only address"),
        ("10.0.0.2", "its only address"),
    ]
    text = refusal(report("m1", A1), report("m2", A1))
    assert "another host, a different machine, has too" in text
    assert "n1 has only addresses" in text and "eth0 10.0.0.1/24" in text
    # Two names of one machine beside another machine.
    found = choose(report("m1", A1), report("m1", A1), report("m2", A2))
    assert [ip for ip, _ in found] == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]


def test_link_local_address_counts_only_if_there_is_no_other():
    link = ["eth9 169.254.7.1/16", "eth9 169.254.7.2/16"]
    first, second = report("m1", link[0], A1), report("m2", link[1], A2)
    assert [ip for ip, _ in choose(first, second)] == ["10.0.0.1", "10.0.0.2"]
    first, second = report("m1", link[0]), report("m2", link[1])
    assert [ip for ip, _ in choose(first, second)] == ["169.254.7.1", "169.254.7.2"]


def test_interface_is_looked_for_on_every_host():
    first = report("m1", A1, B1, ssh_address="10.0.0.1")
    second = report("m2", A2, "ib0:1 192.168.9.2/24", ssh_address="10.0.0.2")
    assert choose(first, second, interface="ib0") == [
        ("192.168.9.1", "interface ib0"),
        ("192.168.9.2", "interface ib0"),
    ]
    second = report("m2", A2, down=[["ib0", "192.168.9.2", 24]])
    text = refusal(first, second, interface="ib0")
    assert text.startswith("--interface ib0: n2 has no such IPv4 address")
    assert "lo 127.0.0.1/8, eth0 10.0.0.2/24 (down: ib0 192.168.9.2/24)" in text
    assert "leave --interface out" in text


def test_interface_with_several_addresses_takes_the_common_network():
    first = report("m1", "eth0 10.1.0.1/24", "eth0 10.0.0.1/24", ssh_address="10.1.0.1")
    found = choose(first, report("m2", A2), interface="eth0")
    assert [ip for ip, _ in found] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize("wanted", ["10.0.0.0/33", "fd00::/8", "a/b"])
def test_interface_that_is_no_network_is_refused(wanted):
    text = refusal(report("m1", A1), report("m2", A2), interface=wanted)
    assert repr(wanted) in text and "10.0.0.0/24" in text


def test_several_addresses_and_no_hint_are_refused():
    text = refusal(report("m1", A1, B1), report("m2", "eth0 10.7.0.2/24"))
    assert text.startswith("n1 has several addresses (eth0 10.0.0.1/24, ib0 192.168.9.")
    assert "--interface" in text and "host file" in text


@pytest.mark.parametrize(
    "text, ports",
    [
        ("20000-20010", (20000, 20010)),
        (" 1024 - 65535 ", (1024, 65535)),
        ("5000-5000", (5000, 5000)),
    ],
)
def test_port_range_has_two_ends(text, ports):
    assert parse_port_range(text) == ports


@pytest.mark.parametrize(
    "text",
    ["", "20000", "20010-20000", "1023-2000", "1-70000", "a-b", "20000-", "1-2-3"],
)
def test_port_range_of_another_form_is_refused(text):
    with pytest.raises(LaunchError, match="1024 <= A <= B <= 65535, such as") as caught:
        parse_port_range(text)
    assert repr(text) in str(caught.value)


def places_of(text, num_workers, num_servers):
    found = seats(parse_hosts(text, "hosts"), num_workers, num_servers)
    return [(seat.kind[0], seat.host) for seat in found]


def test_seats_go_round_hosts_and_slots():
    assert places_of("a slots=2\nb slots=4", 6, 3) == [
        ("s", 0),
        *[("s", 0), ("s", 1), ("s", 0)],
        *[("w", 0), ("w", 0), ("w", 1), ("w", 1), ("w", 1), ("w", 1)],
    ]
    # Without slots= the round starts again.
    assert places_of("a\na\nb", 7, 1)[2:] == [("w", i) for i in (0, 0, 1, 0, 0, 1, 0)]


def test_seats_are_limited_by_slots():
    with pytest.raises(LaunchError) as caught:
        places_of("a slots=2\nme@b", 4, 1)
    assert str(caught.value) == (
        "-n/--num-workers is 4, and the host file has 3 slots (a 2, me@b 1); raise "
        "slots=N there, or use fewer workers"
    )


def test_ranks_follow_addresses_as_strings_and_ports_as_numbers():
    seats = [Seat("scheduler", 0)]
    seats += [Seat("server", 0), Seat("server", 1), Seat("server", 2)]
    seats += [Seat("worker", i) for i in (0, 0, 1, 2)]
    addresses = [Address(f"10.0.0.{i}", "") for i in (10, 9, 1)]
    ports = [[9000, 10000, 999, 9500], [7, 8], [8, 7]]
    # '10.0.0.9' > '10.0.0.10' > '10.0.0.1'; the first host's ports are 999 for the
    # scheduler, 9000 for its server, and 9500 and 10000 for its workers.
    assert number(seats, addresses, ports) == [
        Place("scheduler", 0, 0, "10.0.0.10", 999, 0, 0),
        Place("server", 0, 1, "10.0.0.9", 7, 0, 0),
        Place("server", 1, 0, "10.0.0.10", 9000, 0, 0),
        Place("server", 2, 2, "10.0.0.1", 7, 0, 0),
        Place("worker", 0, 1, "10.0.0.9", 8, 0, 1),
        Place("worker", 1, 0, "10.0.0.10", 9500, 0, 2),
        Place("worker", 2, 0, "10.0.0.10", 10000, 1, 2),
        Place("worker", 3, 2, "10.0.0.1", 8, 0, 1),
    ]


def test_hosts_with_one_address_share_their_ports():
    """Several ranks of MPI on one machine may have found the same free ports."""
    seats = [Seat("scheduler", 0), Seat("server", 1), Seat("worker", 2)]
    seats.append(Seat("worker", 3))
    ports = [[5, 6, 7], [5, 6, 8], [6], [7]]
    assert number(seats, [ONE_MACHINE] * 4, ports) == [
        Place("scheduler", 0, 0, "127.0.0.1", 5, 0, 0),
        Place("server", 0, 1, "127.0.0.1", 6, 0, 0),
        Place("worker", 0, 2, "127.0.0.1", 7, 0, 2),
        Place("worker", 1, 3, "127.0.0.1", 8, 1, 2),
    ]


def test_too_few_ports_are_refused():
    seats = [Seat("scheduler", 0), Seat("server", 0), Seat("worker", 0)]
    with pytest.raises(
        LaunchError, match="127.0.0.1 has 2 free .* need 3; .*--port-ra"
    ):
        number(seats, [ONE_MACHINE], [[1, 2]])
