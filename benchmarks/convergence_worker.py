"""One worker of benchmark_convergence.py: trains, evaluates, reports to the parent."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lean_mxnet  # isort: skip  # noqa: F401  before all that imports MXNet

import datasets
import mxnet as mx
import networks
from convergence_job import PREFIX
from convergence_run import METHODS, Run
from convergence_trainer import barrier, global_weights, make_trainer
from demo_worker import Stopwatch
from mxnet import autograd, gluon
from population_statistics import population_statistics

NUM_POINTS, FIRST_POINTS = 40, (5, 10, 20)
NUM_STATISTICS = 1024  # images
QUEUED_STEPS = 2


def evaluate(net: gluon.Block, batches: Iterable[tuple]) -> tuple[int, float, int]:
    """Right answers among some batches, the sum of the losses, and how many images."""
    measure = gluon.loss.SoftmaxCrossEntropyLoss()
    right, total, count = mx.nd.zeros(1), mx.nd.zeros(1), 0
    for images, labels in batches:
        scores = net(images)
        right += (scores.argmax(axis=1) == labels).sum()
        total += measure(scores, labels).sum()
        count += len(labels)
    return int(right.asscalar()), total.asscalar().item(), count


class Device:
    """Forward and backward pass, with an accelerator's time emulated between them.

    Parameters
    ----------
    run : Run
    net : Block
    rank : int
        The last one is the straggler, if there is one.
    """

    def __init__(self, run: Run, net: gluon.Block, rank: int) -> None:
        self._net, self._measure = net, gluon.loss.SoftmaxCrossEntropyLoss()
        networks.compile_block(self._measure)
        self._head = mx.nd.ones(run.batch_size)
        self._device = None
        is_last = rank == run.num_workers - 1
        sleep_ms = run.compute_ms + (run.straggler_ms if is_last else 0)
        if sleep_ms:
            from emulated import EmulatedDevice

            self._device = EmulatedDevice()
            self._sleep = self._device.operation(sleep_ms / 1000)

    def forward_backward(self, images: Any, labels: Any) -> mx.nd.NDArray:
        """Queue both passes; the losses, which may still be computed."""
        with autograd.record():
            losses = self._measure(self._net(images), labels)
        if self._device is not None:
            # Sleeps when the losses are there; the backward pass waits for the head.
            self._device.run(self._sleep, [losses], [self._head])
        losses.backward(self._head)
        return losses


class Worker:
    """The training of one rank.

    Parameters
    ----------
    run : Run
    folder : Path
        From `datasets.prepare`.
    rank : int
    """

    def __init__(self, run: Run, folder: Path, rank: int) -> None:
        self.run = run
        self.data = datasets.open_dataset(run, folder, rank)
        dataset = datasets.find(run.dataset)
        self.net = networks.build(
            run.network, dataset.shape, dataset.num_classes, run.seed
        )
        per_epoch = self.data.steps_per_epoch
        self.num_steps = run.epochs * per_epoch
        self.trainer = make_trainer(
            run, self.net.collect_params(), self.num_steps, per_epoch
        )
        self.device = Device(run, self.net, rank)
        self.evaluations: list[tuple] = []
        self.losses: list[tuple] = []  # step, sum of a batch's losses, number of steps
        self.watch = Stopwatch()

    def train(self) -> dict[str, Any]:
        """Make all steps; what the parent needs to know of them."""
        run, points = self.run, loss_points(self.num_steps)
        evaluations = even_steps(self.num_steps, run.num_evaluations)
        total, first = mx.nd.zeros(run.batch_size), 0
        for step, losses in enumerate(self._steps(), 1):
            total += losses
            if step == 1:
                barrier(self.trainer)  # the first step waits until the roles have met
                self.watch = Stopwatch()
            if step in points:
                self.losses.append((step, total, step - first))
                total, first = mx.nd.zeros(run.batch_size), step
            if step in evaluations:
                self._evaluate(step)
        return self._report()

    def _steps(self) -> Iterator[mx.nd.NDArray]:
        """Make each step, and yield its losses."""
        run, queued = self.run, deque()
        is_async = METHODS[run.method].kvstore == "dist_async"
        samples = run.batch_size * (1 if is_async else run.num_workers)
        for epoch in range(run.epochs):
            for batch in self.data.epoch(epoch):
                losses = self.device.forward_backward(*batch)
                self.trainer.step(samples)
                queued.append(losses)
                yield losses
                if len(queued) > QUEUED_STEPS:
                    queued.popleft().wait_to_read()

    def _evaluate(self, step: int) -> None:
        """Note accuracy and loss at the global weights, while the watch stands."""
        seconds = self.watch.stop()
        images = self.data.fixed(NUM_STATISTICS)
        at_weights = global_weights(self.run, self.trainer)
        with at_weights, population_statistics(self.net, images):
            figures = evaluate(self.net, self.data.test())
        self.evaluations.append((step, seconds, *figures))
        self.watch.go_on()

    def _report(self) -> dict[str, Any]:
        """Everything, once."""
        is_ours = hasattr(self.trainer, "stats")
        size = self.run.batch_size
        return {
            "num_steps": self.num_steps,
            "num_parameters": networks.num_parameters(self.net),
            "losses": [
                (step, total.sum().asscalar().item() / (size * count))
                for step, total, count in self.losses
            ],
            "evaluations": self.evaluations,
            "max_staleness": self.trainer.stats()["max_staleness"] if is_ours else None,
        }


def even_steps(num_steps: int, count: int) -> list[int]:
    """`count` steps, evenly, of which the last is the last one."""
    return sorted({-(-num_steps * k // count) for k in range(1, count + 1)})


def loss_points(num_steps: int) -> set[int]:
    """The steps at which the mean loss is noted: more at the start."""
    return {n for n in FIRST_POINTS if n < num_steps} | set(
        even_steps(num_steps, NUM_POINTS)
    )


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    worker = Worker(
        Run(**settings["run"]),
        Path(settings["folder"]),
        int(os.environ["ODSGD_LOCAL_RANK"]),
    )
    print(PREFIX + json.dumps(worker.train()), flush=True)
