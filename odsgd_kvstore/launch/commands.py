"""Which processes a job has, with which environment and argument list.

Pure functions: nothing is started here, and no environment is changed.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.addresses import Address, Place, Seat, number
from odsgd_kvstore.launch.bandwidth import Link, link_addresses, parse_rate
from odsgd_kvstore.launch.variables import KEY_VARIABLES, STALE_VARIABLES

LOCAL_ADDRESS = "127.0.0.1"
STOCK_SERVER = "import numpy; numpy.bool = bool; import mxnet"  # serves at import


@dataclass(frozen=True)
class Role:
    """One process of a job.

    Parameters
    ----------
    kind : str
        'scheduler', 'server' or 'worker'.
    rank : int
        Index among the roles of this kind, from 0.
    env : mapping of str to str
        The whole environment; on another host, what is added to the one there. Not
        in the ``repr``: it holds the job's key.
    argv : tuple of str
        Program and arguments.
    link : Link or None
        Its own network of a given rate, see `local.on_links`; None: the
        machine's.
    host : str
        Label of the host that it runs on; '' for the launcher's own child.
    cwd : str or None
        Its working folder; None: the launcher's.
    """

    kind: str
    rank: int
    env: Mapping[str, str] = field(repr=False)
    argv: tuple[str, ...]
    link: Link | None = None
    host: str = ""
    cwd: str | None = None

    @property
    def name(self) -> str:
        """'scheduler', 'server 0', 'worker 1'."""
        return self.kind if self.kind == "scheduler" else f"{self.kind} {self.rank}"


@dataclass(frozen=True)
class Job:
    """The user's settings of a job.

    Parameters
    ----------
    num_workers, num_servers : int
        At least 1 each.
    command : tuple of str
        What every worker runs.
    stock_servers : bool
        Run MXNet's own server loop instead of this package's, for baselines.
    env, env_server, env_worker : mapping of str to str
        Variables for all roles; for servers and the scheduler; for workers. The
        last two win over the first.
    bandwidth : str or None
        Rate of each role's network in each direction, such as '200mbit'; None: no
        limit.

    Raises
    ------
    LaunchError
        A setting is out of range.
    """

    num_workers: int
    num_servers: int
    command: tuple[str, ...]
    stock_servers: bool = False
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    env_server: Mapping[str, str] = field(default_factory=dict, repr=False)
    env_worker: Mapping[str, str] = field(default_factory=dict, repr=False)
    bandwidth: str | None = None

    def __post_init__(self) -> None:
        _check_count("-n/--num-workers", self.num_workers)
        _check_count("-s/--num-servers", self.num_servers)
        if isinstance(self.command, str):
            raise LaunchError(
                f"the command is one string, {self.command!r}; give a sequence of "
                "arguments, such as ('python', 'train.py')"
            )
        if not self.command or not self.command[0]:
            raise LaunchError(
                "no command was given for the workers; put it after the options, "
                "for example: odsgd-launch -n 2 python train.py"
            )
        if self.bandwidth is not None:
            parse_rate(self.bandwidth)
            link_addresses(self.num_roles)

    @property
    def num_roles(self) -> int:
        """Workers, servers and the scheduler."""
        return self.num_workers + self.num_servers + 1

    @property
    def kinds(self) -> list[str]:
        """The kind of each role: scheduler, servers, workers."""
        return [
            "scheduler",
            *["server"] * self.num_servers,
            *["worker"] * self.num_workers,
        ]

    @property
    def names(self) -> list[str]:
        """The name of each role, in the order of `kinds`; see `Role.name`."""
        servers = [f"server {rank}" for rank in range(self.num_servers)]
        workers = [f"worker {rank}" for rank in range(self.num_workers)]
        return ["scheduler", *servers, *workers]


def _check_count(option: str, value: int) -> None:
    """Refuse a count that is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LaunchError(f"{option} is {value!r}; give an integer of at least 1")


def plan_local(
    job: Job,
    base_env: Mapping[str, str],
    ports: Sequence[int],
    key: str,
    job_id: str,
    cores: int,
) -> list[Role]:
    """Return the roles of a job on this machine: scheduler, servers, workers.

    Parameters
    ----------
    base_env : mapping of str to str
        The environment to start from; not changed.
    ports : sequence of int
        ``job.num_roles`` different numbers, see `local.choose_ports`; the scheduler
        gets the lowest.
    key : str
        Seals the messages to the servers; the user's own `ODSGD_KEY` or
        `ODSGD_KEY_FILE` wins.
    cores : int
        Cores to share out.
    """
    if len(set(ports)) != len(ports) or len(ports) != job.num_roles:
        raise LaunchError(
            f"the ports are {list(ports)}; the job needs {job.num_roles} different ones"
        )
    here = [Seat(kind, 0) for kind in job.kinds]
    address = Address(LOCAL_ADDRESS, "this machine")
    places = number(here, [address], [ports])
    common = {**_common_env(job, places[0], job_id), "DMLC_LOCAL": "1"}
    kept = {k: v for k, v in base_env.items() if k not in STALE_VARIABLES}
    threads = _threads(places, [cores])[0]
    return [
        Role(p.kind, p.rank, _env(job, kept, p, common, threads, key), _argv(job, p))
        for p in places
    ]


def plan_cluster(
    job: Job,
    base_env: Mapping[str, str],
    places: Sequence[Place],
    labels: Sequence[str],
    cores: Sequence[int],
    key: str,
    job_id: str,
    cwd: str,
) -> list[Role]:
    """Return the roles of a job over several hosts: scheduler, servers, workers.

    Parameters
    ----------
    base_env : mapping of str to str
        What the launcher's own environment gives to roles on any host, see
        `variables.forwarded`; a host's own environment comes beneath it.
    places : sequence of Place
        See `addresses.number`.
    labels, cores : sequence of str, of int
        Of the hosts.
    key, job_id : str
        As for `plan_local`.
    cwd : str
        The folder that every role runs in.
    """
    common = _common_env(job, places[0], job_id)
    threads = _threads(places, cores)
    return [
        Role(
            place.kind,
            place.rank,
            _env(job, base_env, place, common, threads[place.host], key),
            _argv(job, place),
            host=labels[place.host],
            cwd=cwd,
        )
        for place in places
    ]


def _common_env(job: Job, scheduler: Place, job_id: str) -> dict[str, str]:
    """The variables that are the same for all roles of a job."""
    return {
        "DMLC_PS_ROOT_URI": scheduler.ip,
        "DMLC_PS_ROOT_PORT": str(scheduler.port),
        "DMLC_NUM_WORKER": str(job.num_workers),
        "DMLC_NUM_SERVER": str(job.num_servers),
        "ODSGD_JOB": job_id,
    }


def _threads(places: Sequence[Place], cores: Sequence[int]) -> list[int]:
    """Threads for each role of a host.

    Without a limit each role starts a thread per core, and the servers starve the
    workers beside them.
    """
    busy = [0] * len(cores)
    for place in places:
        busy[place.host] += place.kind != "scheduler"
    return [max(1, count // max(1, roles)) for count, roles in zip(cores, busy)]


def _env(
    job: Job,
    base_env: Mapping[str, str],
    place: Place,
    common: Mapping[str, str],
    threads: int,
    key: str,
) -> dict[str, str]:
    """The environment of a role."""
    env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    env.update(_user_env(job, base_env, place.kind))
    env.update(common, DMLC_ROLE=place.kind, DMLC_NODE_HOST=place.ip)
    if place.kind != "scheduler":
        env["PORT"] = str(place.port)
        env[f"DMLC_{place.kind.upper()}_ID"] = str(place.rank)
    if place.kind == "worker":
        env["ODSGD_LOCAL_RANK"] = str(place.local_rank)
        env["ODSGD_LOCAL_SIZE"] = str(place.local_size)
    if not any(env.get(name) for name in KEY_VARIABLES):
        env["ODSGD_KEY"] = key
    return env


def _user_env(job: Job, base_env: Mapping[str, str], kind: str) -> dict[str, str]:
    """The environment of a role as far as the user decides on it."""
    env = {**base_env, **job.env}
    if kind == "worker":
        env.update(job.env_worker)
        return env
    env["CUDA_VISIBLE_DEVICES"] = ""  # A server that takes a GPU starves a worker.
    env.update(job.env_server)
    if not job.stock_servers:
        env["PYTHONPATH"] = with_package(env.get("PYTHONPATH", ""))
        if not env["PYTHONPATH"]:
            del env["PYTHONPATH"]
    return env


def with_package(python_path: str) -> str:
    """`python_path` with the folder that holds this package in front."""
    root = str(Path(os.path.abspath(__file__)).parents[2])
    # An installed package is found anyway, and site-packages in PYTHONPATH would
    # come before the standard library.
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return python_path
    return os.pathsep.join([root, python_path] if python_path else [root])


def _argv(job: Job, place: Place) -> tuple[str, ...]:
    """Program and arguments of a role."""
    if place.kind == "worker":
        return tuple(job.command)
    if job.stock_servers:
        return (sys.executable, "-c", STOCK_SERVER)
    return (sys.executable, "-m", "odsgd_kvstore.server")


def show_command(role: Role) -> str:
    """The command of a role, on one line, as a shell takes it."""
    return shlex.join(role.argv).replace("\n", "\\n")


def describe(
    roles: Sequence[Role],
    pids: Mapping[str, int] | None = None,
    logs: Mapping[str, str] | None = None,
) -> str:
    """Return a table of roles: role, rank, host, pid and log (by name), command.

    Columns that say nothing are left out.
    """
    rows = [("role", "rank", "host", "pid", "log", "command")]
    for role in roles:
        pid = str((pids or {}).get(role.name, "-"))
        log = (logs or {}).get(role.name, "")
        command = show_command(role)
        rows.append((role.kind, str(role.rank), role.host, pid, log, command))
    columns = [column for column in zip(*rows) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in zip(*columns)
    )
