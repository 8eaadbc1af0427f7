"""Environment variables of roles: options that set them, and which go to other hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from odsgd_kvstore.errors import LaunchError

KEY_VARIABLES = ("ODSGD_KEY", "ODSGD_KEY_FILE")
# Left by an outer job, these would give a role the place of another one.
STALE_VARIABLES = {"DMLC_INTERFACE", "DMLC_RANK", "DMLC_TASK_ID", "DMLC_WORKER_ID"}
STALE_VARIABLES |= {"DMLC_SERVER_ID", "PORT", "ODSGD_LOCAL_RANK", "ODSGD_LOCAL_SIZE"}
# The same for a job over several machines, which says all of these itself.
STALE_ELSEWHERE = STALE_VARIABLES | {"DMLC_LOCAL", "DMLC_USE_KUBERNETES"}
_FORWARDED = ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_FORWARDED_PREFIXES = ("MXNET_", "DMLC_", "PS_", "OMP_", "KMP_", "ODSGD_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PAIR = re.compile(r"([^:=]*)([:=]?)(.*)\Z", re.DOTALL)


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what every role gets of the launcher's own environment, on any host.

    The key is left out: it goes its own way, see `launch.cluster`.
    """
    return {
        name: value
        for name, value in environ.items()
        if (name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES))
        and name not in STALE_ELSEWHERE
        and name not in KEY_VARIABLES
    }


def parse_env(texts: Sequence[str], current: Mapping[str, str]) -> dict[str, str]:
    """Parse ``--env NAME=VALUE`` and ``--env NAME`` (its value in `current`)."""
    env = {}
    for text in texts:
        name, equals, value = text.partition("=")
        _check_name("--env", name, "NAME=VALUE or NAME")
        if equals:
            _refuse_key("--env", name)
        elif name not in current:
            raise LaunchError(
                f"--env {name}: {name} is not set; set it first, or give a value as "
                f"--env {name}=VALUE"
            )
        env[name] = value if equals else current[name]
    return env


def parse_pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME:VALUE``, as MXNet's launcher has it, or ``NAME=VALUE``."""
    env = {}
    for text in texts:
        name, separator, value = _PAIR.match(text).groups()
        _check_name(option, name if separator else "", "NAME:VALUE")
        _refuse_key(option, name)
        env[name] = value
    return env


def _check_name(option: str, name: str, form: str) -> None:
    """Refuse what cannot be the name of a variable; never repeats a value."""
    if not _NAME.match(name):
        given = f"{name!r} as a name" if name else "no name or no value"
        raise LaunchError(
            f"{option} has {given}; give {form}, where NAME has letters, digits and _"
        )


def _refuse_key(option: str, name: str) -> None:
    """A command line can be read by every user of the machine; a key must not."""
    if name == "ODSGD_KEY":
        raise LaunchError(
            f"{option} has the value of ODSGD_KEY, and other users can read command "
            "lines; set it in the environment, or name a file in ODSGD_KEY_FILE"
        )
