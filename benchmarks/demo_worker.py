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
from typing import Any

import digits
import numpy as np
from mxnet import gluon

import odsgd_kvstore

PREFIX = "demo-report "


@dataclass(frozen=True)
class Settings:
    """What both jobs have in common, and the KVStore type, in which they differ."""

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
        Takes step, steps, loss, speed (samples/s) and staleness by keyword.
    """
    images, labels, *test = digits.load_data(settings.seed)
    net = digits.build_net("conv", settings.seed)
    trainer = make_trainer(settings, net.collect_params())
    workers, batch_size = settings.num_workers, settings.batch_size
    per_epoch = digits.count_batches(len(labels), batch_size, workers)
    step, steps, start = 0, settings.epochs * per_epoch, time.perf_counter()
    for epoch in range(settings.epochs):
        seed = settings.seed + 1 + epoch
        for data, label in digits.batches(
            images, labels, batch_size, rank, workers, seed
        ):
            loss = digits.train_batch(net, trainer, data, label, batch_size * workers)
            step += 1
            if step % settings.report_every == 0 or step == steps:
                loss = float(loss.mean().asscalar())
                speed = step * batch_size / (time.perf_counter() - start)
                stale = staleness(trainer)
                report(step=step, steps=steps, loss=loss, speed=speed, staleness=stale)
    return at_global_weights(trainer, net, test)


def staleness(trainer: gluon.Trainer) -> int:
    """Return the age, in steps, of the weights beneath the newest gradient."""
    return trainer.stats()["staleness"] if hasattr(trainer, "stats") else 0


def at_global_weights(
    trainer: gluon.Trainer, net: gluon.Block, test: list[np.ndarray]
) -> tuple[float, np.ndarray]:
    """Return the test accuracy at the global weights, and these as one vector."""
    is_delayed = hasattr(trainer, "global_weights")
    with trainer.global_weights() if is_delayed else contextlib.nullcontext():
        arrays = [param.data().asnumpy() for param in net.collect_params().values()]
        vector = np.concatenate([array.ravel() for array in arrays])
        return digits.accuracy(net, *test), vector


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
