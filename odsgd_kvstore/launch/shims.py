"""Small programs that the launcher runs: around each role, and after its own death."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Runs in the child in place of `preexec_fn`, which is not safe beside threads. The
# kernel ends the role with the launcher; the second look at the parent covers a
# launcher that died before the request.
_SHIM = """
import ctypes, os, signal, sys
parent, argv = int(sys.argv[1]), sys.argv[2:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != parent:
    os._exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    os.execvp(argv[0], argv)
except OSError as error:
    sys.stderr.write(f"odsgd-launch: cannot start {argv[0]!r}: {error.strerror}\\n")
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    sys.exit(127 if missing else 126)
"""

# Outlives a launcher that was ended by SIGKILL, and then ends what the kernel does
# not: the children of the roles. Reads process groups until the launcher's end.
_GUARD = """
import os, signal, sys
def attempt(function, *args):
    try:
        function(*args)
    except OSError:
        pass
for group in sys.stdin.buffer.read().split():
    attempt(os.killpg, int(group), signal.SIGKILL)
for path in sys.argv[1:]:
    attempt(os.unlink, path)
"""


def shim_argv(parent: int, argv: Sequence[str]) -> list[str]:
    """What starts `argv` so that it does not outlive the process `parent`."""
    return [sys.executable, "-I", "-S", "-c", _SHIM, str(parent), *argv]


def guard_argv(sockets: Sequence[str]) -> list[str]:
    """The process that cleans up after a launcher that was ended by SIGKILL."""
    return [sys.executable, "-I", "-S", "-c", _GUARD, *sockets]
