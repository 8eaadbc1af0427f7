"""One worker of benchmark_convergence.py: trains, evaluates, reports to the parent."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
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
from demo_worker import Stopwatch
from mxnet import autograd, gluon
from mxnet.gluon import nn

import odsgd_kvstore

NUM_POINTS, FIRST_POINTS = 40, (5, 10, 20)
NUM_STATISTICS = 1024  # images
WITH_MOMENTUM = ("sgd", "nag", "signum")
QUEUED_STEPS = 2


def make_trainer(
    run: Run, params: Any, num_steps: int, steps_per_epoch: int
) -> gluon.Trainer:
    """The trainer of a method, with its optimizer and schedule.

    Parameters
    ----------
    run : Run
    params : ParameterDict
        Initialised.
    num_steps, steps_per_epoch : int
        Of each worker.
    """
    method = METHODS[run.method]
    settings = optimizer_params(run, num_steps, steps_per_epoch)
    if method.has_stock_servers:
        store = mx.kv.create(method.kvstore)
        return gluon.Trainer(params, run.optimizer, settings, kvstore=store)
    return odsgd_kvstore.Trainer(
        params,
        run.optimizer,
        settings,
        kvstore=method.kvstore,
        local_optimizer=method.rule,
        local_optimizer_params=dict(method.rule_params) or None,
        warmup_steps=run.warmup_steps,
    )


def optimizer_params(run: Run, num_steps: int, steps_per_epoch: int) -> dict[str, Any]:
    """Settings of the global optimizer; its schedule counts the servers' updates."""
    method, rate = METHODS[run.method], run.learning_rate
    # Each push is an update of its own with dist_async.
    updates = run.num_workers if method.kvstore == "dist_async" else 1
    if method.scales_rate:
        rate /= run.num_workers
    settings: dict[str, Any] = {"learning_rate": rate, "wd": run.wd}
    if run.optimizer in WITH_MOMENTUM:
        settings["momentum"] = run.momentum
    warmup = round(run.lr_warmup_epochs * steps_per_epoch) * updates
    schedule = make_schedule(run.schedule, rate, num_steps * updates, warmup)
    return settings if schedule is None else {**settings, "lr_scheduler": schedule}


def make_schedule(
    name: str, rate: float, num_updates: int, warmup: int
) -> mx.lr_scheduler.LRScheduler | None:
    """A schedule over all updates; None for a constant rate."""
    shared = {"base_lr": rate, "warmup_steps": warmup}
    if name == "cosine":
        return mx.lr_scheduler.CosineScheduler(num_updates, final_lr=0, **shared)
    if name == "step":
        drop = max(1, num_updates * 3 // 4)
        return mx.lr_scheduler.MultiFactorScheduler([drop], factor=0.1, **shared)
    if name != "constant":
        raise ValueError(
            f"schedule is {name!r}; allowed are 'constant', 'step' and 'cosine'."
        )
    if not warmup:
        return None
    return mx.lr_scheduler.MultiFactorScheduler([num_updates], factor=1, **shared)


def barrier(trainer: gluon.Trainer) -> None:
    """Wait until all that was asked for is done, on every rank."""
    mx.nd.waitall()
    trainer._kvstore._barrier()


@contextlib.contextmanager
def global_weights(run: Run, trainer: gluon.Trainer) -> Iterator[None]:
    """Parameters hold the global weights, after as many steps on every rank.

    Collective: no rank trains before all have left.
    """
    kvstore = METHODS[run.method].kvstore
    if kvstore == "dist_odsgd":
        with trainer.global_weights():
            yield
    else:
        if kvstore == "dist_async":
            barrier(trainer)  # every push is in
            for key, param in enumerate(trainer._params):
                if param.grad_req != "null":
                    trainer._kvstore.pull(key, param.list_data())
        yield
    barrier(trainer)


@contextlib.contextmanager
def population_statistics(net: gluon.HybridBlock, images: Iterable[Any]) -> Iterator:
    """BatchNorm's running statistics are those of `images` at the weights there are.

    A worker's running statistics are means over its latest batches at the weights it
    had then: its own data, and weights of the past or (with dist_odsgd) local ones. So
    the accuracy would differ between ranks, and a method's delay would show in it twice.
    Estimated anew, from the same images on each rank, they are a function of the
    weights alone. Training goes on with the old ones.

    Parameters
    ----------
    net : HybridBlock
    images : iterable of NDArray
        Batches of equal size, as large as in training; not read without BatchNorm.
    """
    norms = find_norms(net)
    old = [[s.data().copy() for s in statistics(norm)] for norm in norms]
    for norm, moments in zip(norms, mean_moments(net, norms, images)):
        for statistic, moment in zip(statistics(norm), moments):
            statistic.data()[:] = moment
    try:
        yield
    finally:
        for norm, kept in zip(norms, old):
            for statistic, values in zip(statistics(norm), kept):
                statistic.data()[:] = values


def find_norms(net: gluon.Block) -> list[nn.BatchNorm]:
    """The layers of a network that have running statistics."""
    found: list[nn.BatchNorm] = []
    net.apply(lambda block: found.append(block) if is_norm(block) else None)
    return found


def is_norm(block: gluon.Block) -> bool:
    """Whether a layer normalises by the batch in training."""
    return isinstance(block, nn.BatchNorm) and not block._kwargs["use_global_stats"]


def statistics(norm: nn.BatchNorm) -> list[gluon.Parameter]:
    """Running mean and variance."""
    return [norm.running_mean, norm.running_var]


def mean_moments(
    net: gluon.HybridBlock, norms: list[nn.BatchNorm], images: Iterable[Any]
) -> list[list[mx.nd.NDArray]]:
    """Mean and variance of what goes into each layer, averaged over the batches."""
    if not norms:
        return []
    sums = {norm: [s.data().zeros_like() for s in statistics(norm)] for norm in norms}

    def add(norm: nn.BatchNorm, inputs: tuple) -> None:
        axis = norm._kwargs["axis"] % inputs[0].ndim
        others = tuple(i for i in range(inputs[0].ndim) if i != axis)
        for total, moment in zip(sums[norm], mx.nd.moments(inputs[0], axes=others)):
            total += moment

    # MXNet updates running statistics in the backward pass, which would cost twice the
    # forward pass. What is compiled calls no hooks.
    net.hybridize(False)
    hooks = [norm.register_forward_pre_hook(add) for norm in norms]
    with autograd.train_mode():  # normalise by the batch
        for count, batch in enumerate(images, 1):
            net(batch)
    for hook in hooks:
        hook.detach()
    networks.compile_block(net)
    return [[total / count for total in sums[norm]] for norm in norms]


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
    """Forward and backward pass, with an accelerator's time emulated between them."""

    def __init__(self, run: Run, net: gluon.Block) -> None:
        self._net, self._measure = net, gluon.loss.SoftmaxCrossEntropyLoss()
        networks.compile_block(self._measure)
        self._head = mx.nd.ones(run.batch_size)
        self._device = None
        if run.compute_ms:
            from emulated import EmulatedDevice

            self._device = EmulatedDevice()
            self._sleep = self._device.operation(run.compute_ms / 1000)

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
        self.run, self.rank = run, rank
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
        self.device = Device(run, self.net)
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
        is_straggler = run.straggler_ms and self.rank == run.num_workers - 1
        for epoch in range(run.epochs):
            for batch in self.data.epoch(epoch):
                losses = self.device.forward_backward(*batch)
                if is_straggler:
                    time.sleep(run.straggler_ms / 1000)
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
