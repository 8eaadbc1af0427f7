"""One worker of the demo: trains a small net and reports to demo.py."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import digits
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

import odsgd_kvstore

PREFIX = "demo-report "


@dataclass(frozen=True)
class Settings:
    """What both jobs have in common, and the KVStore type, in which they differ.

    Parameters
    ----------
    network : str
        Rate of each role's link in each direction; '' for no network in between.
        With one the net is wider, so that its weights take about as long on a link of
        200mbit as its computation.
    evaluate_every : int
        Steps, with a network.
    """

    kvstore: str = "dist_odsgd"
    num_workers: int = 2
    num_servers: int = 1
    warmup_steps: int = 20
    epochs: int = 20
    batch_size: int = 32  # of one worker
    learning_rate: float = 0.05
    momentum: float = 0.9
    wd: float = 1e-4
    seed: int = 2
    report_every: int = 5  # steps
    network: str = ""
    evaluate_every: int = 10


class Stopwatch:
    """Seconds of training, without those of start-up and evaluation.

    An evaluation needs weights that are here, so `stop` waits for the communication,
    and that counts: nothing travels while the watch stands.
    """

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Up to now, while it runs."""
        return self._seconds + time.perf_counter() - self._since

    def stop(self) -> float:
        """Wait for all that is under way, then stop; return the seconds."""
        mx.nd.waitall()
        self._seconds = self.seconds
        return self._seconds

    def go_on(self) -> None:
        """Run again."""
        self._since = time.perf_counter()


def build_net(settings: Settings) -> gluon.Block:
    """The net of `digits.py`; with a network, one with 4 times as many weights."""
    if not settings.network:
        return digits.build_net("conv", settings.seed)
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(64, 3, padding=1, activation="relu", in_channels=1),
        nn.Conv2D(64, 3, padding=1, activation="relu", in_channels=64),
        nn.MaxPool2D(),
        nn.Dense(128, activation="relu", in_units=64 * 4 * 4),
        nn.Dense(10, in_units=128),
    )
    mx.random.seed(settings.seed)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def make_trainer(settings: Settings, params: Any) -> gluon.Trainer:
    """Return the trainer of a worker: the one line in which the jobs differ."""
    names = ("learning_rate", "momentum", "wd")
    sgd = {name: getattr(settings, name) for name in names}
    if settings.kvstore == "dist_sync":
        return gluon.Trainer(params, "sgd", sgd, kvstore="dist_sync")
    return odsgd_kvstore.Trainer(
        params, "sgd", sgd, kvstore=settings.kvstore, warmup_steps=settings.warmup_steps
    )


def train(
    settings: Settings, rank: int, report: Callable[..., None]
) -> tuple[float, np.ndarray]:
    """Train as worker `rank`; return the accuracy at the global weights, and these.

    Parameters
    ----------
    settings : Settings
        The same on every rank.
    rank : int
        Which share of each epoch to take.
    report : callable
        Takes step, steps, loss, speed (samples/s) and staleness by keyword; with a
        network also seconds and accuracy.
    """
    *data, images, labels = digits.load_data(settings.seed)
    net = build_net(settings)
    trainer = make_trainer(settings, net.collect_params())
    losses = train_steps(settings, rank, net, trainer, data)
    watch, steps = Stopwatch(), settings.epochs * count_batches(settings, data)
    evaluate_every = settings.evaluate_every if settings.network else steps
    for step, loss in enumerate(losses, 1):
        if step == 1 and settings.network:
            mx.nd.waitall()  # the first step waits until the roles have met
            watch = Stopwatch()
        values = {}
        if is_due(step, steps, evaluate_every):
            seconds = watch.stop()
            found = at_global_weights(trainer, net, [images, labels])
            if settings.network:
                values = {"seconds": seconds, "accuracy": found[0]}
            watch.go_on()
        if values or is_due(step, steps, settings.report_every):
            values["loss"] = float(loss.mean().asscalar())
            values["speed"] = step * settings.batch_size / watch.seconds
            report(step=step, steps=steps, staleness=staleness(trainer), **values)
    return found


def train_steps(
    settings: Settings, rank: int, net: gluon.Block, trainer: gluon.Trainer, data: Any
) -> Iterator[mx.nd.NDArray]:
    """Make all steps; yield the losses of each, which may still be computed."""
    workers, batch_size = settings.num_workers, settings.batch_size
    for epoch in range(settings.epochs):
        seed = settings.seed + 1 + epoch
        for batch in digits.batches(*data, batch_size, rank, workers, seed):
            yield digits.train_batch(net, trainer, *batch, batch_size * workers)


def count_batches(settings: Settings, data: list[np.ndarray]) -> int:
    """How many steps an epoch has."""
    sizes = settings.batch_size, settings.num_workers
    return digits.count_batches(len(data[1]), *sizes)


def is_due(step: int, steps: int, every: int) -> bool:
    """Whether something is done after this step: every so many, and at the end."""
    return step % every == 0 or step == steps


def staleness(trainer: gluon.Trainer) -> int:
    """Return the age, in steps, of the weights beneath the newest gradient."""
    return trainer.stats()["staleness"] if hasattr(trainer, "stats") else 0


def at_global_weights(
    trainer: gluon.Trainer, net: gluon.Block, test: list[np.ndarray]
) -> tuple[float, np.ndarray]:
    """Return the test accuracy at the global weights, and these as one vector."""
    is_delayed = hasattr(trainer, "global_weights")
    with trainer.global_weights() if is_delayed else contextlib.nullcontext():
        weights = [param.data().asnumpy() for param in net.collect_params().values()]
        accuracy = digits.accuracy(net, *test)
    return accuracy, np.concatenate([weight.ravel() for weight in weights])


def run_worker(settings: Settings, folder: Path) -> None:
    """Be one worker of a job: report lines to the parent, leave weights in `folder`."""
    rank = int(os.environ["ODSGD_LOCAL_RANK"])

    def report(**values: Any) -> None:
        print(PREFIX + json.dumps(values), flush=True)

    start = time.perf_counter()
    accuracy, weights = train(settings, rank, report)
    seconds = time.perf_counter() - start
    np.save(folder / f"{rank}.npy", weights)
    report(accuracy=accuracy, seconds=seconds)


if __name__ == "__main__":
    run_worker(Settings(**json.loads(sys.argv[2])), Path(sys.argv[1]))
