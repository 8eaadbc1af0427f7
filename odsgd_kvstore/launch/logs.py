"""A file for each role's output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.commands import Role


class Logs:
    """Context manager: writes each role's lines to a file of its own as well.

    Parameters
    ----------
    folder : str
        Is made if it is not there. What an earlier job wrote there is kept: lines are
        appended.
    roles : sequence of Role
        Their files are 'scheduler.log', 'server-0.log', 'worker-1.log'.
    on_line : callable
        Takes the lines, too.

    Raises
    ------
    LaunchError
        A file cannot be written.
    """

    def __init__(
        self, folder: str, roles: Sequence[Role], on_line: Callable[[Role, str], None]
    ) -> None:
        self._on_line = on_line
        self.paths = {
            role.name: os.path.join(folder, role.name.replace(" ", "-") + ".log")
            for role in roles
        }
        self._files = {}
        try:
            os.makedirs(folder, exist_ok=True)
            for name, path in self.paths.items():
                self._files[name] = open(  # noqa: SIM115, closed in __exit__
                    path, "a", buffering=1, encoding="utf-8", errors="backslashreplace"
                )
        except OSError as error:
            self.__exit__()
            raise LaunchError(
                f"--log-dir {folder}: {error}; give a folder that you can write to"
            ) from error

    def write(self, role: Role, text: str) -> None:
        """Write a line of a role; see `run_roles`."""
        self._files[role.name].write(text + "\n")
        self._on_line(role, text)

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # What it is about was raised already.
                file.close()
