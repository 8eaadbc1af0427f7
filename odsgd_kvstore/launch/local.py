"""Jobs on this machine: roles with ports, key and threads of their own."""
from __future__ import annotations

import os
import secrets
from typing import Mapping

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
        Files to remove at the job's end.
    """
    ports = choose_ports(job.num_roles)
    key, job_id = secrets.token_hex(32), secrets.token_hex(4)
    roles = plan_local(job, base_env, ports, key, job_id, _cores())
    return roles, [socket_path(port) for port in ports]


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
