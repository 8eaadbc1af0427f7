"""One worker of timeline.py: trains an emulated network under MXNet's profiler."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Iterator

from emulated import NETWORKS, EmulatedNet
from overlap_worker import iterate, report
from systems import SYSTEMS, WARMUP_STEPS

# Calls of MXNet's API and memory are left out: they would slow the job down.
PROFILED = {"profile_symbolic": True, "profile_imperative": True}


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker does.

    Parameters
    ----------
    system, network : str
        Names in `SYSTEMS` and `NETWORKS`.
    compute_ms : float
        Of a forward and a backward pass.
    num_untimed_iters, num_steps : int
        Steps before the profile (not counting the algorithm's own warm-up), and in it.
    """

    system: str
    network: str
    compute_ms: float
    num_untimed_iters: int
    num_steps: int


def worker_file(rank: int) -> str:
    """The profile of a worker."""
    return f"worker{rank}.json"


def server_file(rank: int) -> str:
    """The profile of a server; MXNet puts the first part before the name we give."""
    return f"rank{rank}_server.json"


def run_worker(settings: WorkerSettings) -> None:
    """Train; profile the steady state of this worker, and rank 0 that of servers."""
    # Before MXNet: prepares NumPy for it, and makes the new types known.
    import odsgd_kvstore  # noqa: F401

    rank = int(os.environ["ODSGD_LOCAL_RANK"])
    net = EmulatedNet(NETWORKS[settings.network], settings.compute_ms)
    step = SYSTEMS[settings.system].make_step(net.params)
    iterate(net, step, WARMUP_STEPS + settings.num_untimed_iters)
    wait_for_all()
    with contextlib.ExitStack() as profiles:
        if rank == 0:
            profiles.enter_context(profile("server", "server.json"))
        profiles.enter_context(profile("worker", worker_file(rank)))
        report("begin", clock_us=1e6 * time.time())
        iterate(net, step, settings.num_steps)
        wait_for_all()
        report("end", clock_us=1e6 * time.time())


@contextlib.contextmanager
def profile(process: str, file: str) -> Iterator[None]:
    """Profile this worker, or through its store all servers.

    Parameters
    ----------
    process : str
        'worker' or 'server'.
    file : str
        Without a folder: servers put 'rankN_' before it.
    """
    from mxnet import profiler

    profiler.set_config(filename=file, profile_process=process, **PROFILED)
    profiler.set_state("run", profile_process=process)
    yield
    profiler.set_state("stop", profile_process=process)
    profiler.dump(profile_process=process)


def wait_for_all() -> None:
    """Until nothing is under way, so that a profile has both ends of each operation."""
    import mxnet as mx

    mx.nd.waitall()


if __name__ == "__main__":
    run_worker(WorkerSettings(**json.loads(sys.argv[1])))
