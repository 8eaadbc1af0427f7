"""Runs a job with the launcher that the user chose, from its settings to its end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import click

from odsgd_kvstore.config import job_key
from odsgd_kvstore.errors import ConfigError, LaunchError
from odsgd_kvstore.launch import JobResult, ssh
from odsgd_kvstore.launch.addresses import Seat, seats
from odsgd_kvstore.launch.cluster import (
    HEAR_S,
    Machine,
    Settings,
    close_all,
    in_parallel,
    prepare,
)
from odsgd_kvstore.launch.commands import Job, Role, describe, with_package
from odsgd_kvstore.launch.hosts import HostFile
from odsgd_kvstore.launch.local import new_job
from odsgd_kvstore.launch.logs import Logs
from odsgd_kvstore.launch.options import Options
from odsgd_kvstore.launch.output import print_line
from odsgd_kvstore.launch.processes import EXIT_BROKEN_PIPE, run_roles
from odsgd_kvstore.launch.remote import RemoteAgent
from odsgd_kvstore.launch.signals import Stopped, StopSignals
from odsgd_kvstore.launch.variables import forwarded

INTRODUCTION = (
    "Workers run the command, servers hold the weights and update them, and the "
    "scheduler introduces them to each other:"
)
SILENCE_S = 30.0  # Without a word, after which host and launcher count as lost.


def run_here(job: Job, options: Options) -> int:
    """Run a job on this machine; return its exit code when it has ended."""
    _check_mxnet()
    roles, sockets = new_job(job, os.environ)
    with StopSignals() as stop:
        return _run(roles, options, stop, sockets=sockets)


def run_over_ssh(job: Job, file: HostFile, options: Options) -> int:
    """Run a job on the hosts of a host file; return its exit code when it has ended.

    Nothing of it is left on a host then.
    """
    taken = seats(file, job.num_workers, job.num_servers)
    used = sorted({seat.host for seat in taken})
    taken = [replace(seat, host=used.index(seat.host)) for seat in taken]
    hosts = [file.hosts[index] for index in used]
    common = settings(options)
    with StopSignals() as stop, contextlib.ExitStack() as stack:
        try:
            paths = _python_paths(common.env)
            agents: list[RemoteAgent] = []
            stack.callback(close_all, agents)
            for host in hosts:
                agent = ssh.connect(host, options.ssh_options, paths, SILENCE_S)
                agents.append(agent)
            machines = [
                Machine(host.label, host.name, (agent,))
                for host, agent in zip(hosts, agents)
            ]
            if options.sync_dst_dir is not None:
                in_parallel(lambda agent: agent.greet(HEAR_S, stop), agents, stop)
                options.say(
                    f"Copying this folder to {common.cwd} on {len(hosts)} hosts"
                )
                folders = working_folder(), common.cwd
                ssh.copy_folder(hosts, options.ssh_options, *folders, stop)
            return run_on(job, machines, taken, common, options, stop)
        except Stopped:
            return stopped(stop)


def stopped(stop: StopSignals) -> int:
    """Say that a signal came before the roles, and return the exit code."""
    name = signal.Signals(stop.number).name
    click.echo(f"odsgd-launch: ended by {name} before any role was started", err=True)
    return 128 + stop.number


def working_folder() -> str:
    """This folder, by the path that the user sees: other hosts may have only that."""
    try:
        here, shown = os.getcwd(), os.environ.get("PWD", "")
    except OSError as error:
        raise LaunchError(
            f"the working folder is gone: {error}; change to one that exists"
        ) from error
    is_same = (
        os.path.isabs(shown) and os.path.isdir(shown) and os.path.samefile(shown, here)
    )
    return shown if is_same else here


def run_on(
    job: Job,
    machines: Sequence[Machine],
    taken: Sequence[Seat],
    common: Settings,
    options: Options,
    stop: StopSignals,
) -> int:
    """Run a job on machines whose agents run; return its exit code."""
    roles = prepare(job, machines, taken, common, options.say, stop)
    hosts = {machine.label: machine.agents for machine in machines}
    return _run(roles, options, stop, hosts=hosts)


def settings(options: Options) -> Settings:
    """What the roles on all hosts have in common, from this process."""
    try:
        key = job_key(os.environ).decode()
    except UnicodeError as error:
        raise LaunchError(
            f"ODSGD_KEY, or the content of ODSGD_KEY_FILE, is no UTF-8 text: {error}; "
            "give letters and digits"
        ) from error
    except ConfigError as error:
        raise LaunchError(str(error)) from error
    return Settings(
        env=forwarded(os.environ),
        python=sys.executable,
        cwd=options.sync_dst_dir or working_folder(),
        key=key or secrets.token_hex(32),
        interface=options.interface,
        port_range=options.port_range,
    )


def _python_paths(env: Mapping[str, str]) -> list[str]:
    """Where this package is looked for on other hosts, before Python's own places."""
    path = with_package(env.get("PYTHONPATH", ""))
    return [folder for folder in path.split(os.pathsep) if folder]


def with_program(job: Job) -> Job:
    """The job with its program as found here, so that it is the same on every host."""
    program, *arguments = job.command
    found = None if os.sep in program else shutil.which(program)
    return replace(job, command=(found or program, *arguments))


def _check_mxnet() -> None:
    """The servers run in this Python; say early that they can't."""
    if importlib.util.find_spec("mxnet") is None:
        raise click.ClickException(
            f"MXNet is not installed in {sys.executable}; install it with "
            "'pip install odsgd-kvstore[cpu]', or a CUDA build of MXNet 1.9.1"
        )


def _run(
    roles: Sequence[Role],
    options: Options,
    stop: StopSignals,
    sockets: Sequence[str] = (),
    hosts: Mapping[str, Sequence[RemoteAgent]] | None = None,
) -> int:
    """Run the roles, with a table before and a report after; return the exit code."""
    on_line = _hide if options.is_quiet else print_line
    try:
        with contextlib.ExitStack() as stack:
            logs: Mapping[str, str] = {}
            if options.log_dir is not None:
                files = stack.enter_context(Logs(options.log_dir, roles, on_line))
                on_line, logs = files.write, files.paths

            def show_table(pids: Mapping[str, int]) -> None:
                options.say(f"{INTRODUCTION}\n{describe(roles, pids, logs)}")
                if roles[0].link is not None:
                    options.say(f"Network of each role: {roles[0].link.limits}")

            result = run_roles(
                roles,
                on_line=on_line,
                timeout=options.timeout,
                sockets=sockets,
                on_started=show_table,
                stop=stop,
                hosts=hosts,
            )
        _report(result, options)
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except OSError as error:
        raise LaunchError(f"what the roles wrote cannot be written: {error}") from error
    return result.exit_code


def _hide(_role: Role, _text: str) -> None:
    """Show no line."""


def _report(result: JobResult, options: Options) -> None:
    """One closing line, or what went wrong."""
    if result.exit_code:
        click.echo(f"odsgd-launch: {result.message}", err=True)
    else:
        options.say(f"odsgd-launch: done in {result.seconds:.1f} s")
