"""Jobs on this machine: roles with ports, key and threads of their own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.bandwidth import (
    FIRST_TCP_PORT,
    Link,
    link_addresses,
    parse_rate,
)
from odsgd_kvstore.launch.commands import Job, Role, plan_local

# MXNet 1.9.1 was seen to accept any int32 here; over 100,000,000 no file that
# people name by a port or a process number is in the way.
FIRST_SOCKET, LAST_SOCKET = 100_000_000, 2_000_000_000


def new_job(job: Job, base_env: Mapping[str, str]) -> tuple[list[Role], list[str]]:
    """Return a job's roles, for `run_roles`, and the sockets that they will make.

    Parameters
    ----------
    job : Job
        The user's settings.
    base_env : mapping of str to str
        The environment that the roles inherit.

    Returns
    -------
    roles : list of Role
        Ports, key and name are drawn anew at each call.
    sockets : list of str
        Files to remove at the job's end; none with `bandwidth`, which takes TCP.
    """
    key, job_id = secrets.token_hex(32), secrets.token_hex(4)
    if job.bandwidth is not None:  # Networks of its own: all ports are free.
        ports = list(range(FIRST_TCP_PORT, FIRST_TCP_PORT + job.num_roles))
        roles = plan_local(job, base_env, ports, key, job_id, usable_cores())
        return on_links(roles, job.bandwidth), []
    ports = choose_ports(job.num_roles)
    roles = plan_local(job, base_env, ports, key, job_id, usable_cores())
    return roles, [socket_path(port) for port in ports]


def on_links(roles: Sequence[Role], rate: str) -> list[Role]:
    """Return the roles with a link of `rate` each, and TCP in place of ipc.

    Parameters
    ----------
    roles : sequence of Role
        Of any kind. Where one is a scheduler, all are told its address and theirs
        (`DMLC_PS_ROOT_URI`, `DMLC_NODE_HOST`); ps-lite then numbers the workers,
        and the servers, in the order of this sequence.
    rate : str
        As `bandwidth.parse_rate` takes it, such as '200mbit'.

    Raises
    ------
    LaunchError
        The rate is wrong, or there are too many roles.

    Notes
    -----
    `run_roles` makes the links: pass it all roles that have to reach each other.
    A role reaches these and itself, and nothing else: no machine outside and no
    service of this one. Its interface is `bandwidth.INTERFACE`, its address is
    ``role.link.address``, and that is its host name, too.
    """
    bits = parse_rate(rate)
    links = [Link(address, bits) for address in link_addresses(len(roles))]
    hosts = [k.address for role, k in zip(roles, links) if role.kind == "scheduler"]
    return [
        replace(role, link=link, env=_with_addresses(role.env, link, hosts))
        for role, link in zip(roles, links)
    ]


def _with_addresses(
    env: Mapping[str, str], link: Link, schedulers: Sequence[str]
) -> Mapping[str, str]:
    """The environment with the addresses of a ps-lite job, if it is one."""
    if not schedulers:
        return env
    left_out = ("DMLC_LOCAL", "DMLC_INTERFACE")
    env = {name: value for name, value in env.items() if name not in left_out}
    env.update(DMLC_PS_ROOT_URI=schedulers[0], DMLC_NODE_HOST=link.address)
    return env


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def socket_path(port: int) -> str:
    """Where ps-lite puts the socket of a local role: fixed, `TMPDIR` is not read."""
    return f"/tmp/{port}"


def choose_ports(
    count: int, exists: Callable[[str], bool] = os.path.exists
) -> list[int]:
    """Return `count` ascending numbers for ps-lite's ipc sockets, none in use.

    Nothing is reserved, so the start is random in a range so large that two jobs
    do not meet.
    """
    for _ in range(100):
        first = FIRST_SOCKET + secrets.randbelow(LAST_SOCKET - FIRST_SOCKET - count)
        ports = list(range(first, first + count))
        if not any(exists(socket_path(port)) for port in ports):
            return ports
    raise LaunchError(
        f"found no {count} free socket names /tmp/NUMBER in 100 attempts; remove old "
        "files with a number as their name from /tmp"
    )
