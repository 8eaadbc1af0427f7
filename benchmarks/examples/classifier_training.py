"""The training of one worker: epochs of steps, evaluation, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any

import classifier_checkpoint
import classifier_data
import classifier_model
import mxnet as mx
import numpy as np
from classifier_flags import is_odsgd
from classifier_job import (
    check_same_start,
    devices,
    expected_workers,
    logger,
    make_store,
    set_up_log,
)
from classifier_labels import Targets
from classifier_schedule import PlannedRate, make_optimizer, make_schedule
from mxnet import autograd, gluon

import odsgd_kvstore


class Training:
    """One worker's part of a training.

    Parameters
    ----------
    args : argparse.Namespace
        Of `classifier_flags.parse`.

    Attributes
    ----------
    net : gluon.HybridBlock
        Between steps its parameters hold what the store leaves there: with dist_odsgd
        this worker's local weights.
    trainer : gluon.Trainer
    rank, num_workers : int
    num_batches : int
        Steps of an epoch, the same on every rank.
    start : classifier_checkpoint.Start
        Where it begins.

    Raises
    ------
    Refused
        Something does not fit; before the job is joined.

    Notes
    -----
    Waits, with a distributed store, until all roles of the job are there.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        num_workers = expected_workers(args.kvstore)
        self._contexts = devices(args.num_gpus)
        self._batch_size = args.batch_size * len(self._contexts)
        num_records = classifier_data.count_records(args.rec_train_idx)
        self.num_batches = classifier_data.count_batches(
            num_records, num_workers, self._batch_size
        )
        self._num_validation = classifier_data.count_records(args.rec_val_idx)
        self.start = classifier_checkpoint.find(args)
        classifier_checkpoint.prepare(args)
        is_new = self.start.params is None
        self.net = classifier_model.build(args, self._contexts, is_new)
        classifier_checkpoint.load(self.net, self.start, self._contexts)
        self._update = self.start.epoch * self.num_batches
        schedule = make_schedule(args, self.num_batches)
        self._planned = PlannedRate(schedule)
        self._store = make_store(args)
        self.rank, self.num_workers = self._store.rank, self._store.num_workers
        if self.num_workers > 1:
            check_same_start(self._store, self.start.epoch)
        self.trainer = self._make_trainer(schedule)
        self._loss: gluon.loss.Loss | None = None  # of the epoch
        set_up_log(args, self.rank)

    @property
    def _global_batch_size(self) -> int:
        """Images of a step, of all workers: the sum of gradients is divided by it."""
        return self._batch_size * self.num_workers

    def run(self) -> None:
        """Train the epochs that are not done yet; rank 0 evaluates and saves."""
        self._log_start()
        for epoch in range(self.start.epoch, self._args.num_epochs):
            self._train_epoch(epoch)
            if self.rank == 0:
                self._finish_epoch(epoch + 1)
        if self.start.epoch >= self._args.num_epochs and self.rank == 0:
            logger.info("Nothing is left to train.")
            self._finish_epoch(self.start.epoch, is_new=False)
        # A process that ends drops what its engine has not done yet, with MXNet's own
        # stores also the last push, for which the other ranks would wait for ever.
        mx.nd.waitall()

    def at_global_weights(self) -> Any:
        """A context in which the parameters hold the global weights."""
        if is_odsgd(self._args.kvstore):
            return odsgd_kvstore.global_weights(self.trainer)
        return contextlib.nullcontext()

    def evaluate(self) -> tuple[float, float]:
        """Top-1 and top-5 error on all validation images, of the weights as they are.

        BatchNorm uses this worker's own running statistics.
        """
        batches = classifier_data.validation_batches(
            self._args, self._batch_size, self._num_validation
        )
        better = []
        for data, label in batches:
            for images, labels in zip(*self._split(data, label)):
                better.append(classes_before(self.net(images), labels))
        places = np.concatenate(better)
        return float((places >= 1).mean()), float((places >= 5).mean())

    def _make_trainer(self, schedule: mx.lr_scheduler.LRScheduler) -> gluon.Trainer:
        named = self.net.collect_params()
        params = [named[name] for name in sorted(named.keys())]
        optimizer = make_optimizer(self._args, params, schedule, self._update)
        kind = odsgd_kvstore.Trainer if is_odsgd(self._args.kvstore) else gluon.Trainer
        return kind(params, optimizer, kvstore=self._store)

    def _train_epoch(self, epoch: int) -> None:
        args, begin = self._args, time.perf_counter()
        # Dropout differs between ranks, and goes on the same way after a stop.
        mx.random.seed(classifier_data.derived_seed(args.seed, epoch, self.rank))
        targets = Targets(args, epoch, self.rank)
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss(
            sparse_label=not targets.are_shares
        )
        metric = mx.metric.RMSE() if args.mixup else mx.metric.Accuracy()
        batches = classifier_data.training_batches(
            *(args, epoch, self.rank, self.num_workers),
            *(self._batch_size, self.num_batches),
        )
        since = begin
        for step, (data, label) in enumerate(batches, 1):
            self._step(targets, metric, *self._split(data, label))
            if args.log_interval and step % args.log_interval == 0:
                now = time.perf_counter()
                self._log_step(epoch, step, now - since, metric)
                since = now
        self._log_epoch(epoch, time.perf_counter() - begin, metric)

    def _step(
        self,
        targets: Targets,
        metric: mx.metric.EvalMetric,
        images: list[mx.nd.NDArray],
        labels: list[mx.nd.NDArray],
    ) -> None:
        """One step; returns when the forward pass is done, the rest is under way."""
        images, wanted = targets(images, labels)
        with autograd.record():
            outputs = [self.net(image) for image in images]
            losses = [self._loss(out, y) for out, y in zip(outputs, wanted)]
        autograd.backward(losses)
        self.trainer.step(self._global_batch_size)
        self._update += 1
        if self._args.mixup:
            metric.update(wanted, [out.softmax() for out in outputs])
        else:
            metric.update(labels, outputs)

    def _split(
        self, data: mx.nd.NDArray, label: mx.nd.NDArray
    ) -> tuple[list[mx.nd.NDArray], list[mx.nd.NDArray]]:
        """A batch, a part for each device; images in the network's type."""
        data = data.astype(self._args.dtype, copy=False)
        return tuple(
            gluon.utils.split_and_load(array, self._contexts, even_split=False)
            for array in (data, label)
        )

    def _finish_epoch(self, epoch: int, is_new: bool = True) -> None:
        """Evaluate the global weights, and save them if it is time; of rank 0."""
        args = self._args
        is_due = args.save_frequency and (
            epoch % args.save_frequency == 0 or epoch == args.num_epochs
        )
        with self.at_global_weights():
            top1, top5 = self.evaluate()
            logger.info(
                "epoch %d validation: top-1 error %.6f, top-5 error %.6f",
                *(epoch, top1, top5),
            )
            if is_new and is_due:
                facts = {
                    "updates": self._update,
                    "num_workers": self.num_workers,
                    "global_batch_size": self._global_batch_size,
                    "top1_error": top1,
                    "top5_error": top5,
                }
                path = classifier_checkpoint.save(self.net, args, epoch, facts)
                logger.info("epoch %d saved: %s", epoch, path)

    def _log_start(self) -> None:
        args, start = self._args, self.start
        logger.info("flags: %s", json.dumps(vars(args), sort_keys=True))
        logger.info(
            "%d worker(s) of %d x %d images: a step is over %d images, an epoch has %d "
            "steps, --lr %g is the rate of such a step.",
            *(self.num_workers, len(self._contexts), args.batch_size),
            *(self._global_batch_size, self.num_batches, args.lr),
        )
        if args.data_dir:
            logger.info("--data-dir is not used: images come from %s.", args.rec_train)
        if start.params is None:
            return
        logger.info(
            "Resumed from %s: %d epochs are done, update %d is next. The optimizer's "
            "momentum is not saved and starts at 0%s.",
            *(start.params, start.epoch, self._update + 1),
            "; the synchronous warm-up of dist_odsgd runs again"
            if is_odsgd(args.kvstore)
            else "",
        )
        for text in classifier_checkpoint.changed_flags(args, start):
            logger.warning("Not as in the checkpoint: %s.", text)
        then = (start.record or {}).get("updates", self._update)
        if then != self._update:
            logger.warning(
                "The checkpoint had made %d updates in its %d epochs; with the batches "
                "of now these are %d, and the learning rate goes on from there.",
                *(then, start.epoch, self._update),
            )

    def _log_step(
        self, epoch: int, step: int, seconds: float, metric: mx.metric.EvalMetric
    ) -> None:
        images = self._global_batch_size * self._args.log_interval
        logger.info(
            "epoch %d step %d/%d: %.1f samples/s, %s %.6f, lr %.8g",
            *(epoch + 1, step, self.num_batches, images / seconds, *metric.get()),
            self._planned(self._update),
        )

    def _log_epoch(
        self, epoch: int, seconds: float, metric: mx.metric.EvalMetric
    ) -> None:
        images = self._global_batch_size * self.num_batches
        logger.info(
            "epoch %d training: %s %.6f, %.1f samples/s, %.1f s",
            *(epoch + 1, *metric.get(), images / seconds, seconds),
        )


def classes_before(scores: mx.nd.NDArray, labels: mx.nd.NDArray) -> np.ndarray:
    """How many classes score no lower than the right one, by image.

    An image whose scores are not numbers is wrong, also in the top-5 error of fewer
    classes than five; MXNet's metrics need five.
    """
    scores, index = scores.asnumpy(), labels.asnumpy().astype(int)
    own = scores[np.arange(len(index)), index]
    before = (~(scores < own[:, np.newaxis])).sum(axis=1) - 1
    wrong = max(5, scores.shape[1])
    return np.where(np.isnan(scores).any(axis=1), wrong, before)
