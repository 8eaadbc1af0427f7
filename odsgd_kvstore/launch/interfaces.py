"""Which addresses of a host can serve a job, and what to say if none can."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network

from odsgd_kvstore.errors import LaunchError


def usable_addresses(
    reports: Sequence[Mapping], name: str, index: int, wanted: str | None
) -> dict[str, tuple[str, IPv4Network]]:
    """Return the addresses of a host that other hosts may reach.

    Parameters
    ----------
    reports : sequence of mapping
        What `probe.report` gives, of all hosts.
    name : str
        Of this host, for messages.
    index : int
        Of this host.
    wanted : str or None
        What ``--interface`` asks for: a name, or a network such as '10.0.0.0/24'.

    Returns
    -------
    dict
        By address, the interface and the network. 127.* only if all hosts are one
        machine. Never one that another machine has, too, as all have Docker's
        172.17.0.1. 169.254.* only if there is no other.

    Raises
    ------
    LaunchError
        There is none.
    """
    report = reports[index]
    has = {ip: (label, _network(ip, bits)) for label, ip, bits in report["interfaces"]}
    several = len({other["machine"] for other in reports}) > 1
    others = {
        ip
        for other in reports
        if other["machine"] != report["machine"]
        for _, ip, _ in other["interfaces"]
    }
    found = {
        ip: (label, network)
        for ip, (label, network) in has.items()
        if ip not in others
        and (wanted is None or _matches(label, ip, wanted))
        and not (several and IPv4Address(ip).is_loopback)
    }
    if not found:
        raise LaunchError(_nothing(name, report, has, others, wanted))
    far = {ip: of for ip, of in found.items() if not IPv4Address(ip).is_link_local}
    return far or found


def show(interfaces: Mapping[str, tuple[str, IPv4Network]]) -> str:
    """Return 'eth0 10.0.0.1/24, lo 127.0.0.1/8'."""
    texts = [f"{n} {ip}/{net.prefixlen}" for ip, (n, net) in interfaces.items()]
    return ", ".join(texts) or "none"


def _network(ip: str, bits: int) -> IPv4Network:
    """The network of an address with its prefix length."""
    return ipaddress.ip_interface(f"{ip}/{bits}").network


def _matches(label: str, ip: str, wanted: str) -> bool:
    """Whether an address is of the interface, or in the network, asked for."""
    if "/" not in wanted:
        return wanted in (label, label.partition(":")[0])  # eth0:1 is an alias.
    try:
        return IPv4Address(ip) in IPv4Network(wanted, strict=False)
    except ValueError:
        raise LaunchError(
            f"--interface is {wanted!r}, which is not an IPv4 network; give the name of "
            "an interface, such as eth0, or a network, such as 10.0.0.0/24"
        ) from None


def _nothing(
    name: str, report: Mapping, has: Mapping, others: set[str], wanted: str | None
) -> str:
    """Why no address of a host counts, and what to do."""
    down = [f"{label} {ip}/{bits}" for label, ip, bits in report.get("down", ())]
    shown = show(has) + (f" (down: {', '.join(down)})" if down else "")
    if wanted is not None:
        return (
            f"--interface {wanted}: {name} has no such IPv4 address that other hosts "
            f"reach; it has {shown}. Give an interface, or a network such as "
            "10.0.0.0/24, that every host has, or leave --interface out"
        )
    if any(ip in others and not IPv4Address(ip).is_loopback for ip in has):
        return (
            f"{name} has only addresses that another host, a different machine, has "
            f"too; it has {shown}. Give each host an address of its own"
        )
    return (
        f"{name} has no IPv4 address that other hosts reach; it has {shown}. ps-lite "
        "has no IPv6: give every host an IPv4 address"
    )
