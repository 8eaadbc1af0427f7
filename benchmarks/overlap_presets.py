"""What benchmark_overlap.py compares: its settings, and the presets made of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from emulated import find_network
from measure import Launch, link_ms
from systems import BASELINE, OURS, PEERS, SYSTEMS

FP16, TWO_BIT = "dist_odsgd-fp16", "dist_odsgd-2bit"


@dataclass(frozen=True)
class Setting:
    """Systems that are compared, and in what.

    Parameters
    ----------
    network : str
        A name for `find_network`.
    rate : str
        Of each role's link in each direction; '' for no limit.
    ratio : float
        T_link over T_compute; sets the time of the computation.
    systems : tuple of str
        Names in `SYSTEMS`; each is launched `repetitions` times, but peers other than
        dist_sync `peer_repetitions` times if given.
    num_untimed_iters : int
        Steps before the measurement, beside the algorithm's own warm-up.
    num_compute_iters : int
        Passes without communication, to measure T_compute.
    """

    network: str
    num_workers: int
    rate: str
    ratio: float
    systems: tuple[str, ...]
    repetitions: int = 3
    peer_repetitions: int | None = None
    num_servers: int = 2
    num_untimed_iters: int = 3
    num_timed_iters: int = 30
    num_compute_iters: int = 10
    unlimited_compute_ms: float = 50.0

    @property
    def name(self) -> str:
        """'mlp8-2w-r1'."""
        servers = "" if self.num_servers == 2 else f"-{self.num_servers}s"
        ratio = f"r{self.ratio:g}" if self.rate else "unlimited"
        return f"{self.network}-{self.num_workers}w{servers}-{ratio}"

    @property
    def compute_ms(self) -> float:
        """T_compute that gives the ratio."""
        counts = self.num_workers, self.num_servers
        link = link_ms(find_network(self.network), *counts, self.rate)
        return link / self.ratio or self.unlimited_compute_ms

    def to_json(self) -> dict[str, Any]:
        """All of it, and what follows from it."""
        payload_bytes = find_network(self.network).payload_bytes
        own = dataclasses.asdict(self)
        return {**own, "compute_ms": self.compute_ms, "payload_bytes": payload_bytes}

    def count(self, system: str) -> int:
        """How often a system is launched."""
        if system in PEERS and system != BASELINE and self.peer_repetitions:
            return min(self.repetitions, self.peer_repetitions)
        return self.repetitions

    def launch(self, system: str, repetition: int) -> Launch:
        """One of the launches."""
        names = {field.name for field in dataclasses.fields(Launch)}
        own = {k: v for k, v in vars(self).items() if k in names}
        return Launch(system, compute_ms=self.compute_ms, repetition=repetition, **own)


def presets() -> dict[str, tuple[Setting, ...]]:
    """The settings of each preset, by its name."""
    pair, everything = (OURS, BASELINE), tuple(SYSTEMS)
    peers, nearest = (OURS, *PEERS), (*pair, "horovod")
    few = {"num_untimed_iters": 2, "num_timed_iters": 6, "num_compute_iters": 3}
    # The same computation as in the first of the goals, at a tenth of the rate.
    slow = Setting("mlp8", 2, "20mbit", 10, (OURS,), num_timed_iters=8)
    goals = (
        Setting("mlp8", 2, "200mbit", 1, peers),
        Setting("mlp8", 4, "200mbit", 1, nearest),
        Setting("mlp8", 8, "400mbit", 1, nearest, num_timed_iters=20),
        Setting("mlp2", 2, "200mbit", 1, pair),
        Setting("resnet50", 2, "500mbit", 1, peers, 3, 1, **few),
        Setting("mlp8", 2, "200mbit", 0.3, pair, num_timed_iters=20),
        Setting("mlp8", 2, "200mbit", 2, (*nearest, FP16, TWO_BIT)),
        slow,
    )
    full = tuple(dataclasses.replace(s, systems=everything) for s in goals[:-1])
    full += (
        Setting("mlp2", 2, "200mbit", 0.3, everything, num_timed_iters=20),
        Setting("mlp2", 2, "200mbit", 2, everything),
        Setting("mlp8", 2, "200mbit", 1, everything, num_servers=1),
        slow,
    )
    smoke = Setting("mlp8", 2, "200mbit", 1, pair, 1, num_timed_iters=10)
    return {"smoke": (smoke,), "goals": goals, "full": full}
