"""One worker of benchmark_overlap.py: trains an emulated network and reports."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from emulated import EmulatedNet, find_network
from systems import SYSTEMS, WARMUP_STEPS, Step

PREFIX = "overlap-report "


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker does.

    Parameters
    ----------
    system, network : str
        A name in `SYSTEMS`, and one for `find_network`.
    compute_ms : float
        Of a forward and a backward pass.
    num_untimed_iters, num_timed_iters, num_compute_iters : int
        Steps of training before the measurement (not counting the algorithm's own
        warm-up), in it, and passes without communication after it.
    """

    system: str
    network: str
    compute_ms: float
    num_untimed_iters: int
    num_timed_iters: int
    num_compute_iters: int


def report(event: str, **values: Any) -> None:
    """Tell the parent."""
    print(PREFIX + json.dumps({"event": event, **values}), flush=True)


def run_worker(settings: WorkerSettings) -> None:
    """Train, then compute without training, and report the times of both."""
    # Before MXNet: prepares NumPy for it, and makes the new types known.
    from odsgd_kvstore.errors import NotSupportedYet

    net = EmulatedNet(find_network(settings.network), settings.compute_ms)
    try:
        start = time.perf_counter()
        step = SYSTEMS[settings.system].make_step(net.params)
        iterate(net, step, WARMUP_STEPS)
    except (NotSupportedYet, ImportError) as error:
        report("unavailable", reason=str(error))
        return
    start_s = time.perf_counter() - start
    iterate(net, step, settings.num_untimed_iters)
    report("begin")
    first = len(net.ends_s)
    host_s = iterate(net, step, settings.num_timed_iters + 1)
    report("end")
    step_ms = [net.mean_ms(i, i + 1) for i in range(first, len(net.ends_s) - 1)]
    report(
        "result",
        step_ms=statistics.mean(step_ms),
        step_ms_each=[round(ms, 3) for ms in step_ms],
        compute_ms=measure_compute(net, settings.num_compute_iters),
        host_step_ms=1000 * statistics.median(host_s),
        start_s=start_s,
    )


def iterate(net: EmulatedNet, step: Step, count: int) -> list[float]:
    """Train for `count` steps; the host's seconds inside each step.

    Returns when the last backward pass has ended, with its communication under way.
    """
    host_s = []
    for _ in range(count):
        net.forward_backward()
        start = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - start)
        net.wait_for_earlier()
    net.wait_for_newest()
    return host_s


def measure_compute(net: EmulatedNet, count: int) -> float:
    """Milliseconds of a forward and a backward pass without communication."""
    import mxnet as mx

    mx.nd.waitall()
    first = len(net.ends_s)
    iterate(net, lambda: None, count + 1)
    return net.mean_ms(first, first + count)


if __name__ == "__main__":
    run_worker(WorkerSettings(**json.loads(sys.argv[1])))
