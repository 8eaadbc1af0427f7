"""Jobs whose processes mpirun or srun starts: rank 0 controls, the others are agents.

Each rank takes one role: 0 the scheduler, then the servers, then the workers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import click

from odsgd_kvstore.errors import ConfigError, LaunchError
from odsgd_kvstore.launch.addresses import Seat
from odsgd_kvstore.launch.agent import Agent
from odsgd_kvstore.launch.cluster import HEAR_S, Machine, close_all, in_parallel
from odsgd_kvstore.launch.commands import Job, with_package
from odsgd_kvstore.launch.local import usable_cores
from odsgd_kvstore.launch.mpi import (
    ByBroadcast,
    find_mpirun,
    mpirun_argv,
    needs_oversubscribe,
)
from odsgd_kvstore.launch.options import Options
from odsgd_kvstore.launch.ranks import (
    Rank,
    Way,
    check_size,
    meet_as_agent,
    meet_as_controller,
    of_environment,
    parent_watch,
)
from odsgd_kvstore.launch.remote import RemoteAgent
from odsgd_kvstore.launch.signals import Stopped, StopSignals
from odsgd_kvstore.launch.slurm import ByNodeList, srun_argv
from odsgd_kvstore.launch.start import (
    SILENCE_S,
    run_on,
    settings,
    stopped,
    with_program,
)
from odsgd_kvstore.launch.variables import KEY_VARIABLES, forwarded

PATIENCE_S, LINGER_S = 10, 20.0
_WAYS = {"mpi": ByBroadcast, "slurm": ByNodeList}


def run_ranks(
    job: Job,
    launcher: str,
    options: Options,
    argv: Sequence[str],
    hostfile: str | None = None,
    is_dry: bool = False,
) -> int:
    """Take this process's part of a job, or call mpirun or srun for all of them.

    Parameters
    ----------
    launcher : str
        'mpi' or 'slurm'.
    argv : sequence of str
        The arguments that this launcher was called with.
    hostfile : str, optional
        For mpirun, in its own form.
    is_dry : bool
        Only show what would be started.

    Returns
    -------
    int
        The exit code of the job, on every rank; 255 if rank 0 was lost. It does not
        return where it becomes mpirun or srun.

    Raises
    ------
    LaunchError
        The ranks are not as many as the roles, or do not meet, or a host's preflight
        failed.
    """
    argv = list(argv)
    if is_dry:
        argv.remove("--dry-run")
    me = [sys.executable, "-m", "odsgd_kvstore.launch", *argv]
    rank = of_environment(launcher, os.environ)
    if rank is None:
        return _call(job, launcher, _without_hostfile(me), hostfile, is_dry)
    if hostfile is not None and rank.rank == 0:
        options.say(f"-H {hostfile} is not used: mpirun has started the ranks already")
    check_size(rank, job.num_workers, job.num_servers, me)
    if is_dry:
        if rank.rank == 0:
            click.echo("\n".join(f"rank {i}: {n}" for i, n in enumerate(job.names)))
        return 0
    try:
        way = _WAYS[launcher](rank, os.environ, options.port_range)
        if rank.rank > 0:
            return _serve(rank, way)
        return _control(with_program(job), rank, way, options)
    except ConfigError as error:
        raise LaunchError(str(error)) from error


def _control(job: Job, rank: Rank, way: Way, options: Options) -> int:
    """Rank 0's part."""
    with StopSignals() as stop, contextlib.ExitStack() as stack:
        parent_watch(lambda: stop.ask(signal.SIGTERM))
        try:
            guests = meet_as_controller(
                rank, way, on_wait=_say_waiting, check=stop.check
            )
            agents = [RemoteAgent(rank.node, *_agent_here(), SILENCE_S)]
            for guest in guests:
                ends = guest.connection, guest.connection
                agents.append(RemoteAgent(guest.node, *ends, SILENCE_S))
            stack.callback(close_all, agents)
            machines = _by_machine(agents, stop)
            hosts = {
                agent: index
                for index, machine in enumerate(machines)
                for agent in machine.agents
            }
            seats = [Seat(k, hosts[agent]) for k, agent in zip(job.kinds, agents)]
            return run_on(job, machines, seats, settings(options), options, stop)
        except Stopped:
            return stopped(stop)


def _agent_here() -> tuple[Connection, Connection]:
    """Rank 0's own agent, in a thread; both ends of the connection to it."""
    ours, theirs = Pipe()
    # The roles that an agent starts end with its thread: this one stays.
    agent = Agent(theirs, theirs, SILENCE_S)
    threading.Thread(target=agent.serve, daemon=True).start()
    return ours, ours


def _say_waiting(text: str) -> None:
    click.echo(f"Waiting: {text}", err=True)


def _by_machine(agents: Sequence[RemoteAgent], stop: StopSignals) -> list[Machine]:
    """The machines that the agents are on; two may have the same name."""

    def place(agent: RemoteAgent) -> str:
        agent.greet(HEAR_S, stop)
        return agent.ask("place", HEAR_S, stop=stop)["machine"]

    found: dict[tuple[str, str], list[RemoteAgent]] = {}
    for agent, machine in zip(agents, in_parallel(place, agents, stop)):
        found.setdefault((agent.label, machine), []).append(agent)
    count = Counter(name for name, _ in found)
    labels = [
        name if count[name] == 1 else f"{name} ({number})"
        for number, (name, _) in enumerate(found)
    ]
    return [
        Machine(label, name, tuple(group))
        for label, ((name, _), group) in zip(labels, found.items())
    ]


def _without_hostfile(argv: Sequence[str]) -> list[str]:
    """A command without -H: mpirun has it, and the ranks need it no more."""
    for index, word in enumerate(argv):
        if word in ("-H", "--hostfile"):
            return [*argv[:index], *argv[index + 2 :]]
        if word.startswith(("-H", "--hostfile=")):
            return [*argv[:index], *argv[index + 1 :]]
    return list(argv)


def _serve(rank: Rank, way: Way) -> int:
    """Another rank's part: its role, as rank 0 says."""
    # mpirun and srun signal every rank. Rank 0 ends the job in an orderly way; this
    # one waits for it, but not for long.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.alarm(PATIENCE_S))
    parent_watch(lambda: os._exit(128 + signal.SIGTERM))
    connection = meet_as_agent(rank, way)
    # With the job's own status, as some mpiruns take that of the last rank to end; and
    # after rank 0, as others kill it when any rank ends with an error.
    return Agent(connection, connection, SILENCE_S, LINGER_S).serve()


def _call(
    job: Job, launcher: str, me: Sequence[str], hostfile: str | None, is_dry: bool
) -> int:
    """Become mpirun or srun, with this launcher as each rank."""
    env = dict(os.environ)
    if not any(env.get(name) for name in KEY_VARIABLES):
        env["ODSGD_KEY"] = secrets.token_hex(32)
    # The interpreter of the ranks finds this package as this one does.
    path = with_package(env.get("PYTHONPATH", ""))
    if path:
        env["PYTHONPATH"] = path
    if launcher == "slurm":
        if not env.get("SLURM_JOB_ID"):
            raise LaunchError(
                "--launcher slurm runs inside an allocation: call it in a script for "
                "sbatch or in a shell of salloc, or with "
                f"'srun --ntasks={job.num_roles} odsgd-launch --launcher slurm ...'"
            )
        command = srun_argv(job.num_roles, me, env)
    else:
        program, kind = find_mpirun(env)
        wide = needs_oversubscribe(job.num_roles, hostfile, env, usable_cores())
        names = [*forwarded(env), *(n for n in KEY_VARIABLES if env.get(n)), *job.env]
        command = mpirun_argv(
            program, kind, job.num_roles, me,
            names=sorted({*names, "PATH"}), hostfile=hostfile, oversubscribe=wide,
        )  # fmt: skip
    if is_dry:
        click.echo(shlex.join(command))
        return 0
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}") from error
