"""What benchmark_step_cost.py measures: its sections, and the presets made of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from step_cost_job import Job
from step_cost_worker import GLUON, network_of
from systems import BASELINE, OURS

LAYOUT, HOST, SERVERS, CONSTANT = "layout", "host", "servers", "constant"
SIZES, KEYS, IMPORT = "sizes", "keys", "import"
KINDS = (LAYOUT, HOST, SERVERS, CONSTANT, SIZES, KEYS, IMPORT)
SMALL, TINY = "160x256", "1x16"
LINK = "10gbit"  # so fast that it only counts bytes
PAIR = (OURS, BASELINE)


@dataclass(frozen=True)
class Section:
    """Systems that are compared in one kind of job.

    Parameters
    ----------
    kind : str
        layout: bytes of each server. host: the main thread's time in a step. servers:
        their processor time, with memory and start-up. constant: memory with next to
        no parameters. sizes, keys: a point of a sweep over the parameters, or keys.
    job : Job
        All of it but the system and the repetition.
    systems : tuple of str
    repetitions : int
        Of each system, interleaved.
    """

    kind: str
    job: Job
    systems: tuple[str, ...] = PAIR
    repetitions: int = 1

    @property
    def name(self) -> str:
        """'layout resnet50 3 servers'."""
        words = [self.kind, self.job.network]
        if self.kind == LAYOUT:
            words.append(f"{self.job.num_servers} servers")
        elif self.job.optimizer != "sgd":
            words.append(self.job.optimizer)
        return " ".join(words)

    def make(self, system: str, repetition: int) -> Job:
        """One of the jobs."""
        return dataclasses.replace(self.job, system=system, repetition=repetition)

    def to_json(self) -> dict[str, Any]:
        """All of it, and what follows from it."""
        network = network_of(self.job.network)
        sizes = {
            "num_keys": len(network.shapes),
            "num_numbers": network.num_numbers,
            "payload_bytes": network.payload_bytes,
        }
        return {**dataclasses.asdict(self), **sizes}


@dataclass(frozen=True)
class Settings:
    """A preset.

    Parameters
    ----------
    network : str
        Of the sections host and servers.
    num_steps : int
        Timed ones there; sections with small networks have several times as many.
    layout_networks, layout_servers : tuple
        Of the section layout: every network with every number of servers.
    sizes, keys : tuple of str
        The points of the sweeps.
    servers_networks, optimizers : tuple of str
        Of the section servers: further networks; and the optimizers of `network`, the
        first of which counts.
    host_systems, sweep_systems : tuple of str
    repetitions, host_repetitions, sweep_repetitions, import_repetitions : int
    """

    network: str = "resnet50"
    num_steps: int = 15
    layout_networks: tuple[str, ...] = ("resnet50", "lenet", "mlp12")
    layout_servers: tuple[int, ...] = (2, 3, 4)
    sizes: tuple[str, ...] = ("32x16384", "32x65536", "32x131072", "32x262144")
    keys: tuple[str, ...] = ("40x256", "160x256", "320x256", "640x256")
    servers_networks: tuple[str, ...] = (SMALL,)
    optimizers: tuple[str, ...] = ("sgd", "adam")
    host_systems: tuple[str, ...] = (OURS, GLUON, BASELINE)
    sweep_systems: tuple[str, ...] = (OURS,)
    repetitions: int = 3
    host_repetitions: int = 2
    sweep_repetitions: int = 1
    import_repetitions: int = 5

    def sections(self) -> list[Section]:
        """All sections in the order in which they are measured."""
        return [
            *self._layout(),
            Section(
                HOST,
                self._job(self.network, num_workers=1),
                self.host_systems,
                self.host_repetitions,
            ),
            *self._servers(),
            Section(CONSTANT, self._job(TINY), repetitions=self.sweep_repetitions),
            *self._sweep(SIZES, self.sizes, 2 * self.num_steps),
            *self._sweep(KEYS, self.keys, 6 * self.num_steps),
        ]

    def _job(self, network: str, **changes: Any) -> Job:
        return Job("", network, **{"num_timed_iters": self.num_steps, **changes})

    def _layout(self) -> list[Section]:
        few = {"num_untimed_iters": 1, "num_timed_iters": 3}
        return [
            Section(LAYOUT, Job("", network, "sgd", 1, count, LINK, **few))
            for network in self.layout_networks
            for count in self.layout_servers
        ]

    def _servers(self) -> list[Section]:
        """The first optimizer counts; others are for information, and measured once."""
        sections = [
            Section(
                SERVERS,
                self._job(self.network, optimizer=optimizer),
                repetitions=1 if number else self.repetitions,
            )
            for number, optimizer in enumerate(self.optimizers)
        ]
        return sections + [
            Section(
                SERVERS,
                self._job(network, num_timed_iters=6 * self.num_steps),
                repetitions=self.repetitions,
            )
            for network in self.servers_networks
        ]

    def _sweep(self, kind: str, points: tuple[str, ...], steps: int) -> list[Section]:
        job = {"num_workers": 1, "num_timed_iters": steps}
        compared = self.sweep_systems, self.sweep_repetitions
        return [Section(kind, self._job(point, **job), *compared) for point in points]


PRESETS = {
    "smoke": Settings(
        network="lenet",
        num_steps=10,
        layout_networks=("lenet",),
        layout_servers=(2,),
        sizes=("8x16384", "8x65536", "8x131072"),
        keys=(),
        servers_networks=(),
        optimizers=(),
        host_systems=PAIR,
        repetitions=1,
        host_repetitions=1,
        import_repetitions=1,
    ),
    "goals": Settings(),
    "full": Settings(
        num_steps=30,
        sizes=tuple(f"32x{2**n}" for n in range(13, 20)),
        keys=tuple(f"{40 * 2**n}x256" for n in range(7)),
        sweep_systems=PAIR,
        repetitions=5,
        host_repetitions=5,
        sweep_repetitions=3,
        import_repetitions=15,
    ),
}
