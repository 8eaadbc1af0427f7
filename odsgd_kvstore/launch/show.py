"""What a job would start, for ``--dry-run``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence

from odsgd_kvstore.launch import ssh
from odsgd_kvstore.launch.addresses import seats
from odsgd_kvstore.launch.commands import Job, Role, show_command
from odsgd_kvstore.launch.hosts import HostFile
from odsgd_kvstore.launch.options import Options
from odsgd_kvstore.launch.start import working_folder


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


def over_ssh(job: Job, file: HostFile, options: Options) -> str:
    """What `start.run_over_ssh` would do, as far as that is known without the hosts."""
    placed: dict[int, list[str]] = {}
    for seat, name in zip(seats(file, job.num_workers, job.num_servers), job.names):
        placed.setdefault(seat.host, []).append(name)
    lines = []
    for index, host in enumerate(file.hosts):
        if index not in placed:
            lines.append(f"{host.label}: not needed")
            continue
        lines.append(f"{host.label}: {', '.join(placed[index])}")
        argv = ssh.ssh_argv(host, options.ssh_options, sys.executable)
        lines.append(f"  {shlex.join(argv)}")
        if options.sync_dst_dir is not None:
            target = working_folder(), options.sync_dst_dir
            argv = ssh.rsync_argv(host, options.ssh_options, *target)
            lines.append(f"  {shlex.join(argv)}")
    lines.append(f"workers: {shlex.join(job.command)}")
    lines.append("Ranks follow from the addresses, which the hosts tell at the start.")
    return "\n".join(lines)
