"""Jobs on this machine: roles with ports, key and threads of their own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from odsgd_kvstore.launch.bandwidth import (
    FIRST_TCP_PORT,
    Link,
    choose_addresses,
    parse_rate,
)
from odsgd_kvstore.launch.commands import (
    LocalJob,
    Role,
    choose_ports,
    plan_local,
    socket_path,
)


def new_job(job: LocalJob, base_env: Mapping[str, str]) -> tuple[list[Role], list[str]]:
    """Return a job's roles, for `run_roles`, and the sockets that they will make.

    Parameters
    ----------
    job : LocalJob
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
        roles = plan_local(job, base_env, ports, key, job_id, _cores())
        return on_links(roles, job.bandwidth), []
    ports = choose_ports(job.num_roles)
    roles = plan_local(job, base_env, ports, key, job_id, _cores())
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
    links = [Link(address, bits) for address in choose_addresses(len(roles))]
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


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
