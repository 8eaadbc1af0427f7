"""The command line of the launcher."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import ranked, show, start
from odsgd_kvstore.launch.addresses import parse_port_range
from odsgd_kvstore.launch.commands import Job
from odsgd_kvstore.launch.hosts import read_hosts
from odsgd_kvstore.launch.local import new_job
from odsgd_kvstore.launch.options import Options
from odsgd_kvstore.launch.variables import parse_env, parse_pairs

LAUNCHERS = ("local", "ssh", "mpi", "slurm", "kubernetes")
MOST_S = 100_000_000  # Three years.
NOT_SUPPORTED_YET = {"max_restarts": "--max-restarts"}
# Which launchers an option is for; any other refuses it.
ONLY_FOR = {
    "hostfile": ("ssh", "mpi"),
    "sync_dst_dir": ("ssh",),
    "ssh_opts": ("ssh",),
    "interface": ("ssh", "mpi", "slurm"),
    "port_range": ("ssh", "mpi", "slurm"),
    "log_dir": ("local", "ssh", "mpi", "slurm"),
    "emulate_bandwidth": ("local",),
    "quiet": ("local", "ssh", "mpi", "slurm"),
    "image": ("kubernetes",),
    "name": ("kubernetes",),
}


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
@click.option(
    "--sync-dst-dir",
    metavar="DIR",
    help="Copy the current folder to DIR on every host, and run there.  [ssh]",
)
@click.option("--ssh-opts", metavar="TEXT", help="Further options of ssh.  [ssh]")
@click.option(
    "--interface",
    metavar="NAME",
    help="Network interface to use on every host.  [ssh, mpi, slurm]",
)
@click.option(
    "--port-range",
    metavar="A-B",
    help="TCP ports to use.  [ssh, mpi, slurm; default: 20000-32767]",
)
@click.option(
    "--timeout", type=float, metavar="S", help="Seconds after which the job is ended."
)
@click.option("--max-restarts", metavar="K", help="Restarts of a failed job.")
@click.option("--log-dir", metavar="DIR", help="Write a log file for each role too.")
@click.option("-q", "--quiet", is_flag=True, help="Show failures only.")
@click.option("--image", metavar="IMAGE", help="Container image.  [kubernetes]")
@click.option("--name", metavar="NAME", help="Name of the job.  [kubernetes]")
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
    """Run COMMAND as the workers of a distributed MXNet job.

    Options for odsgd-launch come before COMMAND; what follows belongs to COMMAND:

        odsgd-launch -n 2 -s 1 python train.py --epochs 3
    """
    launcher = options["launcher"] or ("ssh" if options["hostfile"] else "local")
    _refuse_unsupported(launcher, options)
    try:
        job, run = _job(command, options), _options(options)
    except LaunchError as error:
        raise click.UsageError(str(error), context) from error
    try:
        code = _LAUNCH[launcher](job, run, options)
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    context.exit(code)


def _local(job: Job, run: Options, options: Mapping[str, Any]) -> int:
    if options["dry_run"]:
        click.echo(show.explain(new_job(job, os.environ)[0], os.environ))
        return 0
    return start.run_here(job, run)


def _ssh(job: Job, run: Options, options: Mapping[str, Any]) -> int:
    file, job = read_hosts(options["hostfile"]), start.with_program(job)
    if options["dry_run"]:
        click.echo(show.over_ssh(job, file, run))
        return 0
    return start.run_over_ssh(job, file, run)


def _kubernetes(job: Job, run: Options, options: Mapping[str, Any]) -> int:
    if not options["dry_run"]:
        raise LaunchError(
            "--launcher kubernetes prints a manifest and starts nothing: add --dry-run, "
            "and pass the output to 'kubectl apply -f -'"
        )
    from odsgd_kvstore.launch import kubernetes  # The one that needs PyYAML.

    given = {
        name: options[name] for name in ("image", "name") if options[name] is not None
    }
    click.echo(kubernetes.manifest(job, timeout=run.timeout, **given), nl=False)
    return 0


def _ranks(job: Job, run: Options, options: Mapping[str, Any]) -> int:
    argv = click.get_current_context().obj
    hostfile, is_dry = options["hostfile"], options["dry_run"]
    return ranked.run_ranks(job, options["launcher"], run, argv, hostfile, is_dry)


_LAUNCH = {
    "local": _local,
    "ssh": _ssh,
    "mpi": _ranks,
    "slurm": _ranks,
    "kubernetes": _kubernetes,
}


def _refuse_unsupported(launcher: str, options: Mapping[str, Any]) -> None:
    """Refuse, by name, options that nothing or only other launchers have."""
    if options["p3"]:
        raise click.UsageError(
            "--p3 is not supported: the p3 store has no optimizer on its servers, "
            "and the global update needs one"
        )
    if launcher not in LAUNCHERS:
        raise click.UsageError(
            f"--launcher {launcher} is not supported; use one of {', '.join(LAUNCHERS)}"
        )
    if launcher == "ssh" and options["hostfile"] is None:
        raise click.UsageError(
            "--launcher ssh needs a host file; give -H FILE, with a host on each line"
        )
    for name, flags in NOT_SUPPORTED_YET.items():
        if options[name] is not None:
            raise click.UsageError(f"{flags} is not supported yet; leave it out")
    for name, launchers in ONLY_FOR.items():
        if options[name] not in (None, False) and launcher not in launchers:
            flag = (
                "-H/--hostfile" if name == "hostfile" else f"--{name.replace('_', '-')}"
            )
            raise click.UsageError(
                f"{flag} is for --launcher {' or '.join(launchers)}, and this is "
                f"--launcher {launcher}; leave it out"
            )


def _options(options: Mapping[str, Any]) -> Options:
    """How the job is to be run."""
    given = {}
    if options["port_range"] is not None:
        given["port_range"] = parse_port_range(options["port_range"])
    return Options(
        timeout=_seconds(options["timeout"]),
        log_dir=options["log_dir"],
        is_quiet=options["quiet"],
        interface=options["interface"],
        ssh_options=_words("--ssh-opts", options["ssh_opts"] or ""),
        sync_dst_dir=options["sync_dst_dir"],
        **given,
    )


def _words(option: str, text: str) -> tuple[str, ...]:
    """Cut a text as a shell does."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(f"{option} is {text!r}: {error}; close the quotes") from error


def _job(command: tuple[str, ...], options: Mapping[str, Any]) -> Job:
    """The settings from the options."""
    num_servers = options["num_servers"]
    return Job(
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
    if timeout is not None and not (0 < timeout <= MOST_S):
        raise LaunchError(
            f"--timeout is {timeout:g}; give a number of seconds over 0, and at most "
            f"{MOST_S:,}"
        )
    return timeout


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of ``odsgd-launch``; ends with the exit code of the job."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # It was closed before.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        argv = list(sys.argv[1:] if args is None else args)
        code = launch.main(argv, "odsgd-launch", standalone_mode=False, obj=argv) or 0
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
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
