"""How long imports take, in fresh interpreters."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Any

PROGRAMS = {"mxnet": "import mxnet", "odsgd_kvstore": "import odsgd_kvstore, mxnet"}
TIMED = """
import time, warnings
warnings.simplefilter("ignore")
start, cpu = time.perf_counter(), time.process_time()
{}
print(time.perf_counter() - start, time.process_time() - cpu)
"""
JOB_PREFIXES = ("DMLC_", "ODSGD_")
LIMIT_S = 120


def measure_imports(repetitions: int) -> dict[str, Any]:
    """Time `import odsgd_kvstore, mxnet` and `import mxnet` in turn.

    Returns
    -------
    dict
        seconds and cpu_s: of both, by name and repetition; added_s and added_cpu_s:
        difference of the medians. Empty where MXNet cannot be imported alone (on
        Python 3.12, which needs this package's alias).
    """
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    cpu_s: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for repetition in range(repetitions + 1):
        for name in list(PROGRAMS)[:: -1 if repetition % 2 else 1]:
            try:
                wall, cpu = _timed(PROGRAMS[name])
            except subprocess.CalledProcessError:
                return {}
            if repetition:  # The first brings the files into the cache.
                seconds[name].append(wall)
                cpu_s[name].append(cpu)
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "added_s": _added(seconds),
        "added_cpu_s": _added(cpu_s),
    }


def _timed(program: str) -> tuple[float, float]:
    """Wall and processor seconds of a program in a fresh interpreter."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(JOB_PREFIXES)}
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(program)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
        env=env,
    )
    wall, cpu = map(float, done.stdout.split()[-2:])
    return wall, cpu


def _added(seconds: dict[str, list[float]]) -> float:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return medians["odsgd_kvstore"] - medians["mxnet"]
