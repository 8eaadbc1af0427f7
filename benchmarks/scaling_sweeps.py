"""What benchmark_scaling.py measures: sweeps over the number of workers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from emulated import NETWORKS
from measure import Launch, link_ms
from systems import BASELINE, OURS

SATURATING, FREE = "saturating", "free"


@dataclass(frozen=True)
class Sweep:
    """The same computation on a growing number of workers.

    Parameters
    ----------
    name : str
        `SATURATING`: the servers' links are busy all the time from some number of
        workers on. `FREE`: they never are.
    rate : str
        Of each role's link in each direction.
    compute_ms : float
        Of a worker's forward and backward pass.
    num_workers : tuple of int
        The points.
    repetitions, baseline_repetitions : int
        Launches of ours, and of dist_sync, at each point.
    """

    name: str
    rate: str
    compute_ms: float
    num_workers: tuple[int, ...] = (1, 2, 4, 8)
    repetitions: int = 1
    baseline_repetitions: int = 1
    network: str = "mlp8"
    num_servers: int = 2
    num_untimed_iters: int = 3
    num_timed_iters: int = 10
    num_compute_iters: int = 4

    def link_ms(self, num_workers: int) -> float:
        """How long a step's payload takes on the busiest link."""
        network = NETWORKS[self.network]
        return link_ms(network, num_workers, self.num_servers, self.rate)

    def is_saturated(self, num_workers: int) -> bool:
        """Whether the busiest link takes longer than the computation."""
        return self.link_ms(num_workers) > self.compute_ms

    @property
    def counts(self) -> list[tuple[str, int]]:
        """What is launched, such as '4 dist_sync', and how often."""
        systems = (OURS, self.repetitions), (BASELINE, self.baseline_repetitions)
        return [(f"{n} {name}", c) for n in self.num_workers for name, c in systems]

    def launch(self, what: str, repetition: int) -> Launch:
        """One of the launches; `what` is as in `counts`."""
        num_workers, _, system = what.partition(" ")
        names = {field.name for field in dataclasses.fields(Launch)}
        own = {name: value for name, value in vars(self).items() if name in names}
        own.update(num_workers=int(num_workers), repetition=repetition)
        return Launch(system, **own)

    def to_json(self) -> dict[str, Any]:
        """All of it, and the time of the busiest link at each point."""
        links = {str(count): self.link_ms(count) for count in self.num_workers}
        return {**dataclasses.asdict(self), "link_ms": links}


def _presets() -> dict[str, tuple[Sweep, ...]]:
    """8 workers need 1.6 times, 4 workers 0.8 times the computation at 200 Mbit/s."""
    compute_ms = 224.0  # T_link of mlp8, 2.1 MB, is 89 ms up to 2 workers, then 45 N ms
    saturating = Sweep(SATURATING, "200mbit", compute_ms, (1, 2, 4, 6, 8), 2)
    free = Sweep(FREE, "800mbit", compute_ms, repetitions=2)
    longer = {"repetitions": 5, "baseline_repetitions": 3, "num_timed_iters": 30}
    few = {"num_untimed_iters": 1, "num_timed_iters": 4, "num_compute_iters": 2}
    return {
        "smoke": (
            Sweep(SATURATING, "200mbit", 100.0, (1, 2, 4), **few),
            Sweep(FREE, "800mbit", 100.0, (1, 2), 1, 0, **few),
        ),
        "goals": (saturating, free),
        "full": tuple(
            dataclasses.replace(sweep, num_workers=tuple(range(1, 9)), **longer)
            for sweep in (saturating, free)
        ),
    }


PRESETS = _presets()
