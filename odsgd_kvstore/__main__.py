"""`python -m odsgd_kvstore SCRIPT ARGS`: run an unchanged script with our types.

The import of the package has registered `dist_odsgd` by now; in a server's or
scheduler's role it has served, and never comes here.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn

from .process_exit import end_now, status_of

_USAGE = (
    "usage: python -m odsgd_kvstore SCRIPT [ARGS...]\n\n"
    "Runs SCRIPT with the KVStore types dist_odsgd and dist_device_odsgd known to\n"
    "MXNet. Under odsgd-launch (or any launcher that sets DMLC_*) it is the command\n"
    "of every role."
)


def main() -> None:
    """Run the script named on the command line as `__main__`."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(_USAGE)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    if not os.path.exists(script):
        print(
            f"odsgd_kvstore: the script {os.path.abspath(script)} does not exist. "
            f"\n{_USAGE}",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        _leave(end)


def _leave(end: SystemExit) -> NoReturn:
    """End with a script's status; a failure ends at once (see `process_exit`)."""
    if status_of(end.code) == 0:
        raise end
    if not isinstance(end.code, int):
        print(end.code, file=sys.stderr)
    end_now(status_of(end.code))


if __name__ == "__main__":
    main()
