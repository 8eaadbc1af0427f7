"""One worker of benchmark_step_cost.py: trains without computing, and reports."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulated import BYTES_PER_NUMBER, NETWORKS, EmulatedNet, Network
from systems import BASELINE, OURS, SGD, WARMUP_STEPS

PREFIX = "step-cost-report "
GLUON = "dist_odsgd-gluon"  # MXNet's Trainer on our store
SYSTEMS = (OURS, GLUON, BASELINE)
OPTIMIZERS = {"sgd": SGD, "adam": {"learning_rate": 0.001}}
READY, BEGIN, END = "ready", "begin", "end"


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker does.

    Parameters
    ----------
    system : str
        One of `SYSTEMS`.
    network : str
        As `network_of` takes it.
    optimizer : str
        A name in `OPTIMIZERS`.
    num_untimed_iters, num_timed_iters : int
        Steps before the measurement (not counting the algorithm's own warm-up), and
        in it.
    """

    system: str
    network: str
    optimizer: str
    num_untimed_iters: int
    num_timed_iters: int


def network_of(name: str) -> Network:
    """A network by its name in `NETWORKS`, or '160x256': 160 arrays of 256 numbers."""
    count, times, size = name.partition("x")
    if times and count.isdecimal() and size.isdecimal():
        return Network(name, (((int(size),),) * int(count),))
    return NETWORKS[name]


def report(event: str, **values: Any) -> None:
    """Tell the parent."""
    print(PREFIX + json.dumps({"event": event, **values}), flush=True)


def wait_at(gate: str, folder: Path) -> None:
    """Wait until all workers are at this gate, with no work under way."""
    import mxnet as mx

    mx.nd.waitall()
    report("gate", name=gate)
    with Path(folder, os.environ["DMLC_WORKER_ID"]).open("rb", buffering=0) as fifo:
        fifo.read(1)


def run_worker(settings: WorkerSettings, folder: Path) -> None:
    """Start, train, and report what both took this worker.

    Parameters
    ----------
    settings : WorkerSettings
    folder : Path
        Has a FIFO per rank, from which a byte is read at each gate.
    """
    # Before MXNet: prepares NumPy for it, and makes the new types known.
    import odsgd_kvstore  # noqa: F401

    net = EmulatedNet(network_of(settings.network), compute_ms=0)
    trainer = make_trainer(settings, net.params)
    wait_at(READY, folder)
    handshake_s = timed(trainer._init_kvstore)
    broadcast_s = timed(trainer._init_params)
    first_step_s = timed(lambda: iterate(trainer, net.params, 1))
    untimed = WARMUP_STEPS - 1 + settings.num_untimed_iters
    iterate(trainer, net.params, untimed)
    wait_at(BEGIN, folder)
    times = iterate(trainer, net.params, settings.num_timed_iters)
    wait_at(END, folder)
    cpu_s, wall_s, whole_s = zip(*times)
    report(
        "result",
        host_ms=1000 * statistics.median(cpu_s),
        host_wall_ms=1000 * statistics.median(wall_s),
        step_ms=1000 * statistics.median(whole_s),
        handshake_s=handshake_s,
        broadcast_s=broadcast_s,
        first_step_s=first_step_s,
        layout_bytes=None if settings.system == BASELINE else layout_bytes(trainer),
    )


def make_trainer(settings: WorkerSettings, params: list[Any]) -> Any:
    """The system's Trainer; it makes its store when it is asked to."""
    from mxnet import gluon

    import odsgd_kvstore

    arguments = params, settings.optimizer, OPTIMIZERS[settings.optimizer]
    if settings.system == OURS:
        return odsgd_kvstore.Trainer(*arguments, warmup_steps=WARMUP_STEPS)
    kvstore = OURS if settings.system == GLUON else settings.system
    return gluon.Trainer(*arguments, kvstore=kvstore)


def timed(function: Any) -> float:
    """Seconds until the function and all that it queued are done."""
    import mxnet as mx

    start = time.perf_counter()
    function()
    mx.nd.waitall()
    return time.perf_counter() - start


def iterate(
    trainer: Any, params: list[Any], count: int
) -> list[tuple[float, float, float]]:
    """Make steps one after the other.

    Returns
    -------
    list of (float, float, float)
        Of each step in seconds: the main thread's processor time inside its call, the
        time inside its call, and the time until all that it queued is done.
    """
    import mxnet as mx

    times = []
    for _ in range(count):
        for param in params:
            param.list_data()[0]._fresh_grad = True  # as a backward pass does
        start, cpu = time.perf_counter(), time.thread_time()
        trainer.step(1)
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - start
        mx.nd.waitall()
        times.append((cpu, wall, time.perf_counter() - start))
    return times


def layout_bytes(trainer: Any) -> list[int]:
    """What our store pushes to each server in a step, by its own plan."""
    from odsgd_kvstore.keys import server_of

    records = trainer._kvstore.pipeline.records
    blocks = {record.block for record in records}
    loads = [0] * int(os.environ["DMLC_NUM_SERVER"])
    for native, size in (key for block in blocks for key in block.keys()):
        loads[server_of(native, len(loads))] += size * BYTES_PER_NUMBER
    return loads


if __name__ == "__main__":
    run_worker(WorkerSettings(**json.loads(sys.argv[1])), Path(sys.argv[2]))
