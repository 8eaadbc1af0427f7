"""What the user said of a run, beside the job itself."""

from __future__ import annotations

from dataclasses import dataclass

import click

from odsgd_kvstore.launch.addresses import FIRST_PORT, LAST_PORT


@dataclass(frozen=True)
class Options:
    """What the user said of the run, beside the job itself.

    Parameters
    ----------
    timeout : float or None
        Seconds for the whole job.
    log_dir : str or None
        Folder for a log file of each role.
    is_quiet : bool
        Whether only failures are shown.
    interface : str or None
        Network interface to use on every host.
    port_range : tuple of int
        First and last TCP port.
    ssh_options : tuple of str
        Further arguments of ssh.
    sync_dst_dir : str or None
        Where every host gets a copy of the current folder.
    """

    timeout: float | None = None
    log_dir: str | None = None
    is_quiet: bool = False
    interface: str | None = None
    port_range: tuple[int, int] = (FIRST_PORT, LAST_PORT)
    ssh_options: tuple[str, ...] = ()
    sync_dst_dir: str | None = None

    def say(self, text: str) -> None:
        """Show a line that is not a failure."""
        if not self.is_quiet:
            click.echo(text)
