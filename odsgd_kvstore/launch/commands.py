"""Which processes a local job has, with which environment and argument list.

Pure functions: nothing is started here, and no environment is changed.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.bandwidth import Link, choose_addresses, parse_rate

LOCAL_ADDRESS = "127.0.0.1"
KEY_VARIABLES = ("ODSGD_KEY", "ODSGD_KEY_FILE")
# Left by an outer job, these would give a role the place of another one.
STALE_VARIABLES = {"DMLC_INTERFACE", "DMLC_RANK", "DMLC_TASK_ID", "DMLC_WORKER_ID"}
STALE_VARIABLES |= {"DMLC_SERVER_ID", "PORT", "ODSGD_LOCAL_RANK"}
# MXNet 1.9.1 was seen to accept any int32 here; over 100,000,000 no file that
# people name by a port or a process number is in the way.
FIRST_PORT, LAST_PORT = 100_000_000, 2_000_000_000
STOCK_SERVER = "import numpy; numpy.bool = bool; import mxnet"  # serves at import
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PAIR = re.compile(r"([^:=]*)([:=]?)(.*)\Z", re.DOTALL)


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
        The whole environment. Not in the ``repr``: it holds the job's key.
    argv : tuple of str
        Program and arguments.
    link : Link or None
        Its own network of a given rate, see `local.on_links`; None: the
        machine's.
    """

    kind: str
    rank: int
    env: Mapping[str, str] = field(repr=False)
    argv: tuple[str, ...]
    link: Link | None = None

    @property
    def name(self) -> str:
        """'scheduler', 'server 0', 'worker 1'."""
        return self.kind if self.kind == "scheduler" else f"{self.kind} {self.rank}"


@dataclass(frozen=True)
class LocalJob:
    """The user's settings of a job on this machine.

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
            choose_addresses(self.num_roles)

    @property
    def num_roles(self) -> int:
        """Workers, servers and the scheduler."""
        return self.num_workers + self.num_servers + 1


def _check_count(option: str, value: int) -> None:
    """Refuse a count that is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LaunchError(f"{option} is {value!r}; give an integer of at least 1")


def plan_local(
    job: LocalJob,
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
        ``job.num_roles`` different numbers, see `choose_ports`. ps-lite gives
        ranks by ascending port, so the workers get theirs in ascending order,
        and so do the servers.
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
    servers = sorted(ports[1 : 1 + job.num_servers])
    workers = sorted(ports[1 + job.num_servers :])
    places = [("scheduler", 0, None)]
    places += [("server", rank, port) for rank, port in enumerate(servers)]
    places += [("worker", rank, port) for rank, port in enumerate(workers)]
    common = {
        "DMLC_PS_ROOT_URI": LOCAL_ADDRESS,
        "DMLC_PS_ROOT_PORT": str(ports[0]),
        "DMLC_NUM_WORKER": str(job.num_workers),
        "DMLC_NUM_SERVER": str(job.num_servers),
        "DMLC_NODE_HOST": LOCAL_ADDRESS,
        "DMLC_LOCAL": "1",
        "ODSGD_JOB": job_id,
    }
    # Without a limit each role starts a thread per core, and the servers starve
    # the workers beside them.
    threads = max(1, cores // (job.num_workers + job.num_servers))
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    roles = []
    for kind, rank, port in places:
        env = {**defaults, **_user_env(job, base_env, kind)}
        env.update(common, **_place_env(kind, rank, port))
        if not any(env.get(name) for name in KEY_VARIABLES):
            env["ODSGD_KEY"] = key
        roles.append(Role(kind, rank, env, _argv(job, kind)))
    return roles


def _user_env(job: LocalJob, base_env: Mapping[str, str], kind: str) -> dict[str, str]:
    """The environment of a role as far as the user decides on it."""
    env = {k: v for k, v in base_env.items() if k not in STALE_VARIABLES}
    env.update(job.env)
    if kind == "worker":
        env.update(job.env_worker)
        return env
    env["CUDA_VISIBLE_DEVICES"] = ""  # A server that takes a GPU starves a worker.
    env.update(job.env_server)
    if not job.stock_servers:
        env["PYTHONPATH"] = _with_package(env.get("PYTHONPATH", ""))
        if not env["PYTHONPATH"]:
            del env["PYTHONPATH"]
    return env


def _with_package(python_path: str) -> str:
    """`python_path` with the folder that holds this package in front."""
    root = str(Path(os.path.abspath(__file__)).parents[2])
    # An installed package is found anyway, and site-packages in PYTHONPATH would
    # come before the standard library.
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return python_path
    return os.pathsep.join([root, python_path] if python_path else [root])


def _place_env(kind: str, rank: int, port: int | None) -> dict[str, str]:
    """The variables that make a process this role of the job."""
    env = {"DMLC_ROLE": kind}
    if kind != "scheduler":
        env["PORT"] = str(port)
        env[f"DMLC_{kind.upper()}_ID"] = str(rank)
    if kind == "worker":
        env["ODSGD_LOCAL_RANK"] = str(rank)
    return env


def _argv(job: LocalJob, kind: str) -> tuple[str, ...]:
    """Program and arguments of a role."""
    if kind == "worker":
        return tuple(job.command)
    if job.stock_servers:
        return (sys.executable, "-c", STOCK_SERVER)
    return (sys.executable, "-m", "odsgd_kvstore.server")


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
        first = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT - count)
        ports = list(range(first, first + count))
        if not any(exists(socket_path(port)) for port in ports):
            return ports
    raise LaunchError(
        f"found no {count} free socket names /tmp/NUMBER in 100 attempts; remove old "
        "files with a number as their name from /tmp"
    )


def parse_env(texts: Sequence[str], current: Mapping[str, str]) -> dict[str, str]:
    """Parse ``--env NAME=VALUE`` and ``--env NAME`` (its value in `current`)."""
    env = {}
    for text in texts:
        name, equals, value = text.partition("=")
        _check_name("--env", name, "NAME=VALUE or NAME")
        if equals:
            _refuse_key("--env", name)
        elif name not in current:
            raise LaunchError(
                f"--env {name}: {name} is not set; set it first, or give a value as "
                f"--env {name}=VALUE"
            )
        env[name] = value if equals else current[name]
    return env


def parse_pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME:VALUE``, as MXNet's launcher has it, or ``NAME=VALUE``."""
    env = {}
    for text in texts:
        name, separator, value = _PAIR.match(text).groups()
        _check_name(option, name if separator else "", "NAME:VALUE")
        _refuse_key(option, name)
        env[name] = value
    return env


def _check_name(option: str, name: str, form: str) -> None:
    """Refuse what cannot be the name of a variable; never repeats a value."""
    if not _NAME.match(name):
        given = f"{name!r} as a name" if name else "no name or no value"
        raise LaunchError(
            f"{option} has {given}; give {form}, where NAME has letters, digits and _"
        )


def _refuse_key(option: str, name: str) -> None:
    """A command line can be read by every user of the machine; a key must not."""
    if name == "ODSGD_KEY":
        raise LaunchError(
            f"{option} has the value of ODSGD_KEY, and other users can read command "
            "lines; set it in the environment, or name a file in ODSGD_KEY_FILE"
        )


def show_command(role: Role) -> str:
    """The command of a role, on one line, as a shell takes it."""
    return shlex.join(role.argv).replace("\n", "\\n")


def describe(roles: Sequence[Role], pids: Mapping[str, int] | None = None) -> str:
    """Return a table of roles: role, rank, pid (by `Role.name`), command."""
    rows = [("role", "rank", "pid", "command")]
    for role in roles:
        pid = str((pids or {}).get(role.name, "-"))
        rows.append((role.kind, str(role.rank), pid, show_command(role)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = []
    for *cells, command in rows:
        columns = [cell.ljust(width) for cell, width in zip(cells, widths)]
        lines.append("  ".join([*columns, command]))
    return "\n".join(lines)
