"""Which host, address and port each role gets, and with that its rank.

Pure functions: nothing is looked up here.

How the address of a host is chosen, when the hosts are more than one machine. An
address counts if it is not 127.*, its interface is up, and no other machine has it
too (as all have Docker's 172.17.0.1). The first of these that exists is taken:

1. ``--interface``: an address of that interface, or in that network;
2. the IPv4 address in the host file, or the one that the name there stands for;
3. the address that ssh reached;
4. the address on the route to the other hosts;
5. its only address.

If the addresses are then of several networks, and there is one that every host has an
address in, this one is taken in place of what 3 to 5 found. Without such a network,
they stay: a router may connect them, which `probe.reach` tries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.hosts import HostFile
from odsgd_kvstore.launch.interfaces import show, usable_addresses

LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 20_000, 32_767  # Under Linux's own choice for connections.
LEAST_PORT, MOST_PORT = 1_024, 65_535
_RANGE = re.compile(r"\s*([0-9]{1,5})\s*-\s*([0-9]{1,5})\s*\Z")


@dataclass(frozen=True)
class Seat:
    """A role's place before it has an address.

    Parameters
    ----------
    kind : str
        'scheduler', 'server' or 'worker'.
    host : int
        Index of the host.
    """

    kind: str
    host: int


@dataclass(frozen=True)
class Address:
    """What the roles of a host advertise.

    Parameters
    ----------
    ip : str
        IPv4.
    origin : str
        Where it comes from, for people: 'interface ib0', 'route to node2'.
    """

    ip: str
    origin: str


@dataclass(frozen=True)
class Place:
    """A role's place in the job.

    Parameters
    ----------
    kind : str
        As in `Seat`.
    rank : int
        As ps-lite will number it.
    host : int
        Index of the host.
    ip, port : str, int
        What it binds and advertises.
    local_rank, local_size : int
        Among the workers with the same address; 0 for other roles.
    """

    kind: str
    rank: int
    host: int
    ip: str
    port: int
    local_rank: int
    local_size: int


def parse_port_range(text: str) -> tuple[int, int]:
    """Return the first and last port of 'A-B'.

    Raises
    ------
    LaunchError
        It has another form, or is out of range.
    """
    match = _RANGE.match(text)
    first, last = (int(number) for number in match.groups()) if match else (0, 0)
    if not LEAST_PORT <= first <= last <= MOST_PORT:
        raise LaunchError(
            f"--port-range is {text!r}; give two ports A-B with {LEAST_PORT} <= A <= B "
            f"<= {MOST_PORT}, such as {FIRST_PORT}-{LAST_PORT}"
        )
    return first, last


def seats(hosts: HostFile, num_workers: int, num_servers: int) -> list[Seat]:
    """Share the roles out: scheduler, servers, workers.

    Parameters
    ----------
    hosts : HostFile
        The scheduler is on the first. Servers go round the hosts, workers round the
        slots: with ``a slots=2`` and ``b`` a, a, b, a, a, b and so on.
    num_workers, num_servers : int
        At least 1 each.

    Raises
    ------
    LaunchError
        The host file has ``slots=``, and fewer of them than workers.
    """
    slots = [i for i, host in enumerate(hosts.hosts) for _ in range(host.slots)]
    if hosts.is_limited and num_workers > len(slots):
        each = ", ".join(f"{host.label} {host.slots}" for host in hosts.hosts)
        raise LaunchError(
            f"-n/--num-workers is {num_workers}, and the host file has {len(slots)} "
            f"slots ({each}); raise slots=N there, or use fewer workers"
        )
    places = [Seat("scheduler", 0)]
    places += [Seat("server", i % len(hosts.hosts)) for i in range(num_servers)]
    return places + [Seat("worker", slots[i % len(slots)]) for i in range(num_workers)]


def number(
    seats: Sequence[Seat], addresses: Sequence[Address], ports: Sequence[Sequence[int]]
) -> list[Place]:
    """Give each role its port, and the rank that ps-lite will give it.

    Parameters
    ----------
    seats : sequence of Seat
        The ranks of roles with the same address follow this order.
    addresses, ports : sequence
        Of each host. Hosts with the same address are one machine, and share their
        ports. If each has as many as the job has roles, they are always enough.

    Returns
    -------
    list of Place
        Scheduler, servers by rank, workers by rank.

    Raises
    ------
    LaunchError
        There are fewer free ports than roles.

    Notes
    -----
    ps-lite sorts its nodes by address as a string, descending, then by port,
    ascending (`Van::ProcessAddNodeCommandAtScheduler`).
    """
    taken = list(zip(seats, _ports(seats, addresses, ports)))
    places = []
    for kind in ("scheduler", "server", "worker"):
        nodes = [
            (addresses[seat.host].ip, port, seat.host)
            for seat, port in taken
            if seat.kind == kind
        ]
        nodes.sort(key=lambda node: node[1])
        nodes.sort(key=lambda node: node[0], reverse=True)
        sizes, seen = Counter(ip for ip, _, _ in nodes), Counter()
        for rank, (ip, port, host) in enumerate(nodes):
            local = (seen[ip], sizes[ip]) if kind == "worker" else (0, 0)
            places.append(Place(kind, rank, host, ip, port, *local))
            seen[ip] += 1
    return places


def _ports(
    seats: Sequence[Seat], addresses: Sequence[Address], ports: Sequence[Sequence[int]]
) -> Iterator[int]:
    """The port of each seat, ascending among those with the same address."""
    pools: dict[str, set[int]] = {}
    for address, found in zip(addresses, ports):
        pools.setdefault(address.ip, set()).update(found)
    needed = Counter(addresses[seat.host].ip for seat in seats)
    for ip, count in needed.items():
        if len(pools[ip]) < count:
            raise LaunchError(
                f"{ip} has {len(pools[ip])} free ports, and its roles need {count}; "
                "give a wider --port-range"
            )
    left = {ip: iter(sorted(pool)) for ip, pool in pools.items()}
    return (next(left[addresses[seat.host].ip]) for seat in seats)


@dataclass(frozen=True)
class _Choice:
    """What one host has: addresses with interface and network, the best first."""

    name: str
    interfaces: Mapping[str, tuple[str, IPv4Network]]  # By address.
    origins: Mapping[str, str]  # By address, of those that something speaks for.
    is_fixed: bool  # The user chose the first.

    def network(self, ip: str) -> IPv4Network:
        """The network of an address."""
        return self.interfaces[ip][1]

    def ordered(self) -> list[str]:
        """All addresses, the best first."""
        return [
            *self.origins,
            *(ip for ip in self.interfaces if ip not in self.origins),
        ]

    def networks(self) -> list[IPv4Network]:
        """Those that may be used."""
        usable = self.ordered()[:1] if self.is_fixed else self.ordered()
        return [self.network(ip) for ip in usable]

    def best(self) -> Address:
        """The first, which has to have an origin."""
        for ip, origin in self.origins.items():
            return Address(ip, origin)
        raise LaunchError(
            f"{self.name} has several addresses ({show(self.interfaces)}), and nothing "
            "says which the other hosts reach; name one with --interface, or put its "
            "address into the host file"
        )


def choose_addresses(
    reports: Sequence[Mapping], names: Sequence[str], interface: str | None
) -> list[Address]:
    """Choose the address of each host; the rules are at the top of this module.

    Parameters
    ----------
    reports : sequence of mapping
        What `probe.report` gives.
    names : sequence of str
        The hosts as the host file names them, without user and port.
    interface : str or None
        Of ``--interface``: a name, or a network such as '10.0.0.0/24' where the names
        differ between the hosts.

    Raises
    ------
    LaunchError
        Names the host, the addresses that it has, and what to do.

    Notes
    -----
    Never 127.* if the hosts are more than one machine. If they are one, it is
    127.0.0.1, unless an interface was asked for.
    """
    if interface is None and len({report["machine"] for report in reports}) == 1:
        return [Address(LOOPBACK, "loopback, as all roles are on one machine")] * len(
            reports
        )
    choices = [_choice(reports, names, i, interface) for i in range(len(reports))]
    common = _common_network(choices)
    if common is None:
        return [choice.best() for choice in choices]
    return [_in_network(choice, common) for choice in choices]


def _choice(
    reports: Sequence[Mapping], names: Sequence[str], index: int, wanted: str | None
) -> _Choice:
    """Sort the addresses of a host."""
    usable = usable_addresses(reports, names[index], index, wanted)
    origins: dict[str, str] = {}
    is_fixed = False
    for ip, origin, is_wish in _candidates(reports, names[index], index):
        if ip in usable and ip not in origins:
            is_fixed |= is_wish
            origins[ip] = origin
    if len(usable) == 1 and not origins:
        origins = dict.fromkeys(usable, "its only address")
    if wanted is not None:
        text = f"{'network' if '/' in wanted else 'interface'} {wanted}"
        origins = dict.fromkeys([*origins, *usable], text)
    return _Choice(names[index], usable, origins, is_fixed)


def _candidates(
    reports: Sequence[Mapping], name: str, index: int
) -> Iterator[tuple[str, str, bool]]:
    """Addresses that something speaks for, wishes of the user first.

    Yields address, origin, and whether it is a wish.
    """
    report = reports[index]
    yield name, "host file", True
    for view in (report, *reports):
        if name in view["resolved"]:
            yield view["resolved"][name], f"what {name} stands for", True
    yield report["ssh_address"], "the address ssh reached", False
    for peer, ip in report["routes"].items():
        yield ip, f"route to {peer}", False


def _common_network(choices: Sequence[_Choice]) -> IPv4Network | None:
    """The network to take in place of several; None: leave the choice as it is."""
    firsts = [choice.network(ip) for choice in choices for ip in [*choice.origins][:1]]
    if len(firsts) == len(choices) and len(set(firsts)) == 1:
        return None
    common = [
        network
        for network in dict.fromkeys(choices[0].networks())
        if all(network in choice.networks() for choice in choices)
    ]
    return max(common, key=firsts.count, default=None)


def _in_network(choice: _Choice, network: IPv4Network) -> Address:
    """The best address of a host in a network."""
    ip = next(ip for ip in choice.ordered() if choice.network(ip) == network)
    label, _ = choice.interfaces[ip]
    origin = choice.origins.get(
        ip, f"interface {label}, in {network} as all other hosts"
    )
    return Address(ip, origin)
