"""What decides the numbers of one training of benchmark_convergence.py."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Mapping


@dataclass(frozen=True)
class Method:
    """A way to train.

    Parameters
    ----------
    kvstore : str
        The KVStore type.
    rule, rule_params : str, mapping
        Local optimizer of dist_odsgd; '' for the others.
    scales_rate : bool
        Whether the learning rate is divided by the number of workers: with dist_async
        each worker's push is an update of its own.
    """

    kvstore: str
    rule: str = ""
    rule_params: Mapping[str, Any] = field(default_factory=dict)
    scales_rate: bool = False

    @property
    def has_stock_servers(self) -> bool:
        """Whether MXNet's own servers serve it."""
        return self.kvstore != "dist_odsgd"


METHODS = {
    "dist_sync": Method("dist_sync"),
    "dist_async": Method("dist_async"),
    "dist_async scaled": Method("dist_async", scales_rate=True),
    "none": Method("dist_odsgd", "none"),
    "sgd": Method("dist_odsgd", "sgd"),
    "dcsgd": Method("dist_odsgd", "dcsgd"),
    "dcsgd adaptive": Method("dist_odsgd", "dcsgd", {"adaptive": True}),
    "mirror": Method("dist_odsgd", "mirror"),
    "replica": Method("dist_odsgd", "replica"),
}


@dataclass(frozen=True)
class Run:
    """One training; two equal ones give the same curve, but for rounding and time.

    Parameters
    ----------
    dataset, network, method, optimizer : str
        Names: of `datasets.DATASETS`, of `networks.build`, of `METHODS`, of MXNet.
    batch_size : int
        Samples of one worker's step.
    learning_rate : float
        Of a step on all workers' samples.
    schedule : str
        'constant', 'step' (a tenth for the last quarter) or 'cosine' (to 0).
    lr_warmup_epochs : float
        Epochs in which the learning rate rises from 0.
    warmup_steps : int
        Synchronous steps at the start of dist_odsgd.
    partition : str
        'iid' (one shuffle, dealt out) or 'classes' (each worker has some classes only).
    straggler_ms : float
        By how much longer the last rank sleeps in each step; see compute_ms.
    compute_ms : float
        Sleep in each step, between forward and backward pass, that stands for an
        accelerator's computation.
    rate : str
        Of each role's link in each direction; '' for no network in between.
    num_evaluations : int
        How often the global weights are evaluated, evenly over the steps.
    max_train, max_test : int, optional
        Only so many of the samples; None for all.
    """

    dataset: str
    network: str
    method: str
    num_workers: int = 2
    num_servers: int = 1
    seed: int = 1
    epochs: int = 1
    batch_size: int = 32
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    wd: float = 1e-4
    schedule: str = "constant"
    lr_warmup_epochs: float = 0.0
    warmup_steps: int = 50
    partition: str = "iid"
    straggler_ms: float = 0.0
    compute_ms: float = 0.0
    rate: str = ""
    num_evaluations: int = 10
    max_train: int | None = None
    max_test: int | None = None

    @property
    def name(self) -> str:
        """Of the file with its result: readable, and different for different runs."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        method = self.method.replace(" ", "-")
        return (
            f"{self.dataset}-{self.network}-{self.optimizer}-lr{self.learning_rate:g}"
            f"-w{self.num_workers}-{method}-seed{self.seed}-{digest}"
        )

    def setting(self) -> dict[str, Any]:
        """All but method and seed: runs of equal settings are compared."""
        values = dataclasses.asdict(self)
        return {k: v for k, v in values.items() if k not in ("method", "seed")}
