"""Links of a given rate between roles: their addresses, and how they are made.

Pure functions: nothing is made here. Each role has a network of its own with one
interface, `INTERFACE`. Its other end is a port of a bridge, which stands for the
switch. A token bucket filter (tbf) at each end limits one direction: the role's end
what it sends, the bridge's end what it receives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from odsgd_kvstore.errors import LaunchError

INTERFACE = "eth0"
FIRST_TCP_PORT = 20_000  # Under the ports that the kernel gives to connections.
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
LEAST_RATE, MOST_RATE = 100 * UNITS["kbit"], 100 * UNITS["gbit"]
# ps-lite sorts by address as a string, descending: all have the same length.
NETWORK, FIRST_HOST, LAST_HOST = "198.18.0", 254, 100  # For benchmarks (RFC 2544).
# What passes at once after a pause. Less, and a busy machine, whose timers are late,
# loses rate; more, and small messages would not be slowed down at all.
BURST_S, LEAST_BURST_BYTES = 0.002, 12_000
# What may wait at a link. Less, and TCP loses packets when many send to one.
QUEUE_S, LEAST_QUEUE_BYTES = 0.1, 128 << 10
MOST_PACKET_BYTES = 65_536
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)\Z", re.ASCII)


@dataclass(frozen=True)
class Link:
    """What connects a role to the others.

    Parameters
    ----------
    address : str
        The role's own.
    rate : int
        Bits per second, in each direction, of whole Ethernet frames: TCP's payload
        is at most 95.6 % of it.
    """

    address: str
    rate: int

    def __str__(self) -> str:
        return f"{self.address}, {self.limits}"

    @property
    def limits(self) -> str:
        """'200 Mbit/s in each direction'."""
        return f"{self.rate / UNITS['mbit']:g} Mbit/s in each direction"

    @property
    def burst_bytes(self) -> int:
        """What passes at once after a pause."""
        return max(LEAST_BURST_BYTES, int(self.rate / 8 * BURST_S))

    @property
    def queue_bytes(self) -> int:
        """What may wait."""
        return max(LEAST_QUEUE_BYTES, int(self.rate / 8 * QUEUE_S))

    @property
    def packet_bytes(self) -> int:
        """What TCP hands over at once; the filter would cut up more than a burst.

        The filter adds the headers of each frame in it, 66 bytes of 1514.
        """
        return min(MOST_PACKET_BYTES, int(0.95 * self.burst_bytes))


def parse_rate(text: str) -> int:
    """Return the bits per second of a rate such as '200mbit'.

    Raises
    ------
    LaunchError
        It is not a number with 'kbit', 'mbit' or 'gbit', or out of range.
    """
    match = _RATE.match(text.strip().lower()) if isinstance(text, str) else None
    if match is None or match.group(2) not in UNITS:
        raise LaunchError(
            f"--emulate-bandwidth is {text!r}; give a number and one of the units "
            "kbit, mbit, gbit (per second), such as 200mbit or 1.5gbit"
        )
    rate = int(Fraction(match.group(1)) * UNITS[match.group(2)])
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise LaunchError(
            f"--emulate-bandwidth is {text}; give a rate from 100kbit to 100gbit"
        )
    return rate


def link_addresses(count: int) -> list[str]:
    """Return `count` addresses that ps-lite keeps in this order.

    Raises
    ------
    LaunchError
        There are not so many.
    """
    most = FIRST_HOST - LAST_HOST + 1
    if count > most:
        raise LaunchError(
            f"--emulate-bandwidth has addresses for {most} roles, and the job has "
            f"{count}; use fewer workers or servers"
        )
    return [f"{NETWORK}.{FIRST_HOST - i}" for i in range(count)]


def role_commands(link: Link) -> tuple[str, str]:
    """What ``ip -batch`` and ``tc -batch`` do inside a role's network."""
    ip = (
        "link set lo up",
        f"addr add {link.address}/24 dev {INTERFACE}",
        f"link set {INTERFACE} gso_max_size {link.packet_bytes} up",
    )
    return "\n".join(ip) + "\n", _limit(INTERFACE, link)


def switch_commands(links: Sequence[Link]) -> tuple[str, str]:
    """What they do in the network between the roles, first.

    '{0}' stands for the file of the first role's network.
    """
    ip = ["link add switch type bridge", "link set switch up"]
    tc = []
    for i, link in enumerate(links):
        ip.append(f"link add port{i} type veth peer name {INTERFACE} netns {{{i}}}")
        ip.append(f"link set port{i} gso_max_size {link.packet_bytes} master switch up")
        tc.append(_limit(f"port{i}", link))
    return "\n".join(ip) + "\n", "".join(tc)


def _limit(interface: str, link: Link) -> str:
    """The token bucket filter of one direction."""
    return (
        f"qdisc add dev {interface} root tbf rate {link.rate}bit "
        f"burst {link.burst_bytes}b limit {link.queue_bytes}b\n"
    )
