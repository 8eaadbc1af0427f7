"""The command line of the launcher."""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import shlex
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import JobResult
from odsgd_kvstore.launch.commands import (
    LocalJob,
    Role,
    describe,
    parse_env,
    parse_pairs,
    show_command,
)
from odsgd_kvstore.launch.local import new_job
from odsgd_kvstore.launch.processes import EXIT_BROKEN_PIPE, run_roles

LAUNCHERS = ("local", "ssh", "mpi", "slurm", "kubernetes")
NOT_SUPPORTED_YET = {
    "hostfile": "-H/--hostfile",
    "sync_dst_dir": "--sync-dst-dir",
    "interface": "--interface",
    "port_range": "--port-range",
    "max_restarts": "--max-restarts",
    "log_dir": "--log-dir",
}
INTRODUCTION = (
    "Workers run the command, servers hold the weights and update them, and the "
    "scheduler introduces them to each other:"
)


class StopSignals:
    """Context manager: INT, TERM and HUP become requests to end a job.

    The handlers raise nothing, so a signal can't lose a process between its start
    and its registration. One object serves one `run_roles`. In another thread than
    the main one it changes nothing, as Python allows no handlers there.
    """

    def __init__(self) -> None:
        # A SimpleQueue may be written to by a handler that interrupts its reader.
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if not (ignored and number == signal.SIGHUP):  # As nohup wants it.
                self._previous[number] = signal.signal(number, self._handle)
        # Where the parent ignores this one, no exit code is ever known.
        previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._previous[signal.SIGCHLD] = previous
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        self.requested = True
        self.events.put(("signal", number))


def _version() -> str:
    """The installed version, without importing the package's own modules."""
    try:
        return version("odsgd-kvstore")
    except PackageNotFoundError:
        return "not installed (running from source)"


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,
    }
)
@click.option("-n", "--num-workers", type=int, required=True, help="Workers.")
@click.option("-s", "--num-servers", type=int, help="Servers.  [default: as workers]")
@click.option(
    "--launcher",
    metavar="|".join(LAUNCHERS),
    help="Where to start.  [default: local; ssh with -H]",
)
@click.option("-H", "--hostfile", metavar="FILE", help="Hosts, one a line.")
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Variable for all roles; without a value, the current one. Repeatable.",
)
@click.option(
    "--env-server",
    multiple=True,
    metavar="NAME:VALUE",
    help="Variable for servers and the scheduler. Repeatable.",
)
@click.option(
    "--env-worker",
    multiple=True,
    metavar="NAME:VALUE",
    help="Variable for workers. Repeatable.",
)
@click.option("--sync-dst-dir", metavar="DIR", help="Copy this folder to the hosts.")
@click.option("--interface", metavar="NAME", help="Network interface to use.")
@click.option("--port-range", metavar="A-B", help="TCP ports to use.")
@click.option(
    "--timeout", type=float, metavar="S", help="Seconds after which the job is ended."
)
@click.option("--max-restarts", metavar="K", help="Restarts of a failed job.")
@click.option("--log-dir", metavar="DIR", help="A log file for each role.")
@click.option(
    "--emulate-bandwidth",
    metavar="RATE",
    help="Limit each role's network in each direction, such as 400mbit. Roles then "
    "reach each other and nothing else. Linux only.",
)
@click.option(
    "--stock-servers", is_flag=True, help="Run MXNet's own servers, for baselines."
)
@click.option("--p3", is_flag=True, hidden=True)
@click.option("--dry-run", is_flag=True, help="Print what would be started, and end.")
@click.version_option(_version(), prog_name="odsgd-launch")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def launch(context: click.Context, command: tuple[str, ...], **options: Any) -> None:
    """Run COMMAND as the workers of a distributed MXNet job on this machine.

    Options for odsgd-launch come before COMMAND; what follows belongs to COMMAND:

        odsgd-launch -n 2 -s 1 python train.py --epochs 3
    """
    _refuse_unsupported(options)
    try:
        job = _job(command, options)
        timeout = _seconds(options["timeout"])
        roles, sockets = new_job(job, os.environ)
    except LaunchError as error:
        raise click.UsageError(str(error), context) from error
    if options["dry_run"]:
        click.echo(explain(roles, os.environ))
        return
    _check_mxnet()
    context.exit(_run(roles, timeout, sockets))


def _refuse_unsupported(options: Mapping[str, Any]) -> None:
    """Refuse, by name, the options that only other launchers have."""
    if options["p3"]:
        raise click.UsageError(
            "--p3 is not supported: the p3 store has no optimizer on its servers, "
            "and the global update needs one"
        )
    launcher = options["launcher"]
    if launcher not in (None, "local"):
        yet = " yet" if launcher in LAUNCHERS else ""
        raise click.UsageError(
            f"--launcher {launcher} is not supported{yet}; use --launcher local"
        )
    for name, flags in NOT_SUPPORTED_YET.items():
        if options[name] is not None:
            raise click.UsageError(f"{flags} is not supported yet; leave it out")


def _job(command: tuple[str, ...], options: Mapping[str, Any]) -> LocalJob:
    """The settings from the options."""
    num_servers = options["num_servers"]
    return LocalJob(
        num_workers=options["num_workers"],
        num_servers=options["num_workers"] if num_servers is None else num_servers,
        command=command,
        stock_servers=options["stock_servers"],
        env=parse_env(options["env"], os.environ),
        env_server=parse_pairs("--env-server", options["env_server"]),
        env_worker=parse_pairs("--env-worker", options["env_worker"]),
        bandwidth=options["emulate_bandwidth"],
    )


def _seconds(timeout: float | None) -> float | None:
    """Check the time limit."""
    if timeout is not None and not (0 < timeout < math.inf):
        raise LaunchError(f"--timeout is {timeout:g}; give a number of seconds over 0")
    return timeout


def _check_mxnet() -> None:
    """The servers run in this Python; say early that they can't."""
    if importlib.util.find_spec("mxnet") is None:
        raise click.ClickException(
            f"MXNet is not installed in {sys.executable}; install it with "
            "'pip install odsgd-kvstore[cpu]', or a CUDA build of MXNet 1.9.1"
        )


def explain(roles: Sequence[Role], base_env: Mapping[str, str]) -> str:
    """Return each role's command and the variables that the launcher sets for it.

    What comes unchanged from `base_env` is left out; the key is hidden.
    """
    lines = []
    for role in roles:
        lines.append(f"{role.name}: {show_command(role)}")
        if role.link is not None:
            lines.append(f"  network: {role.link}")
        for name in sorted(role.env):
            if role.env[name] != base_env.get(name):
                hidden = name == "ODSGD_KEY"
                value = "(hidden)" if hidden else shlex.quote(role.env[name])
                lines.append(f"  {name}={value}")
    return "\n".join(lines)


def _run(roles: Sequence[Role], timeout: float | None, sockets: Sequence[str]) -> int:
    """Run the job with signals, and report; return the exit code."""

    def show_table(pids: Mapping[str, int]) -> None:
        click.echo(f"{INTRODUCTION}\n{describe(roles, pids)}")
        if roles[0].link is not None:
            click.echo(f"Network of each role: {roles[0].link.limits}")

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with StopSignals() as stop:
            result = run_roles(
                roles,
                timeout=timeout,
                sockets=sockets,
                on_started=show_table,
                stop=stop,
            )
        _report(result)
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    return result.exit_code


def _report(result: JobResult) -> None:
    """One closing line, or what went wrong."""
    if result.exit_code:
        click.echo(f"odsgd-launch: {result.message}", err=True)
    else:
        click.echo(f"odsgd-launch: done in {result.seconds:.1f} s")


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of ``odsgd-launch``; ends with the exit code of the job."""
    try:
        code = launch.main(args, prog_name="odsgd-launch", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:  # An interrupt before any role was started.
        code = 128 + signal.SIGINT
    if threading.active_count() > 1:
        # A reader is stuck in an output that takes nothing: flushing it, as Python
        # does at exit, would wait for ever.
        os._exit(code)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
