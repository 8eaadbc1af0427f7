"""Where and how figures were measured; tables of text; a result's JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

PACKAGES = ("odsgd-kvstore", "mxnet", "numpy", "horovod")
DEFAULT_FOLDER = Path("benchmark-results")


def provenance() -> dict[str, Any]:
    """Command, commit, versions and machine.

    Returns
    -------
    dict
        commit is None outside a clone, and ends in '-dirty' in a changed one; a
        package that is not installed is left out of versions; load is the average of
        the last minute.
    """
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
        },
    }


def warn_if_busy() -> None:
    """Say so if other programs take the cores that the benchmark needs."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        print(
            f"The machine is busy (load {load:.1f}, {cores} cores): times will be too "
            "long and spread wide. Wait until nothing else runs.",
            flush=True,
        )


def commit() -> str | None:
    """The commit of the clone that this file is in."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "odsgd-kvstore" not in found:  # used from a clone
        from odsgd_kvstore._version import __version__

        found["odsgd-kvstore"] = __version__
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1
) -> str:
    """Align texts in columns: the first `num_left` to the left, others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    texts = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths)]
        for i in range(num_left, len(line)):
            cells[i] = line[i].rjust(widths[i])
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def number(value: float | None, form: str = ".1f") -> str:
    """A figure as text, '-' if there is none."""
    return "-" if value is None else format(value, form)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result, readable and with a newline at its end."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
