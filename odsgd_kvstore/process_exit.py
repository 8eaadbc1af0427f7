"""Ends a failed worker at once.

MXNet's store waits in its destructor for all other workers, so a worker that ends
with an exception or `sys.exit(3)` would hang there, and the job with it.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any, NoReturn

_installed: ExitHooks | None = None


class ExitHooks:
    """Remembers how this process is about to end.

    Attributes
    ----------
    code : int
        The status that a `sys.exit` which nobody caught ends the process with.
    """

    def __init__(self) -> None:
        self.code = 0
        self._excepthook = sys.excepthook

    def on_exception(self, kind: type, error: BaseException, trace: Any) -> None:
        """Print the exception as ever, then end; replaces `sys.excepthook`."""
        self._excepthook(kind, error, trace)
        end_now(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def on_exit(self, status: Any = None) -> NoReturn:
        """Raise a SystemExit that notes its status at the end; replaces `sys.exit`."""
        hooks = self

        class Exit(SystemExit):
            """Known for the process's end when the interpreter itself asks for it."""

            @property
            def code(self) -> Any:
                try:
                    sys._getframe(1)
                except ValueError:  # no Python code called: this is the end
                    hooks.code = status_of(status)
                return status

            def __reduce__(self) -> Any:
                return SystemExit, (status,)

        Exit.__name__ = Exit.__qualname__ = "SystemExit"
        raise Exit(status)


def install() -> ExitHooks:
    """Watch this process's end; once, and not in an interactive interpreter."""
    global _installed
    if _installed is None:
        _installed = ExitHooks()
        if not (hasattr(sys, "ps1") or sys.flags.interactive):
            sys.excepthook = _installed.on_exception
            sys.exit = _installed.on_exit
            for name in ("exit", "quit"):  # of the site module
                if hasattr(builtins, name):
                    setattr(builtins, name, _installed.on_exit)
    return _installed


def status_of(code: Any) -> int:
    """The exit status, 0 to 255, of `sys.exit(code)`."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    return 1


def end_now(code: int) -> NoReturn:
    """Flush what was printed and end this process without any destructor."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    os._exit(code)
