"""The learning rate of each update, and the optimizer that has it.

MXNet's own schedules are used: with a distributed store the servers evaluate them, by
their count of updates, and rebuild them from class and attributes.
"""

from __future__ import annotations

import argparse
import copy
from typing import Sequence

import mxnet as mx
from mxnet import gluon, lr_scheduler


def make_schedule(
    args: argparse.Namespace, num_batches: int
) -> lr_scheduler.LRScheduler:
    """The learning rate by update number, from 1, of the whole training.

    Parameters
    ----------
    args : argparse.Namespace
        lr, lr_mode, lr_decay, decay_epochs, warmup_lr, warmup_epochs and num_epochs.
    num_batches : int
        Updates in an epoch.

    Notes
    -----
    Update 1 is a step above warmup_lr, the last update of the warm-up has lr itself.
    poly (power 2) and cosine reach 0 at the last update. step falls with the first
    update after so many epochs.
    """
    common = {
        "base_lr": args.lr,
        "warmup_steps": args.warmup_epochs * num_batches,
        "warmup_begin_lr": args.warmup_lr,
    }
    num_updates = max(args.num_epochs, 1) * num_batches
    if args.lr_mode == "poly":
        return lr_scheduler.PolyScheduler(num_updates, pwr=2, **common)
    if args.lr_mode == "cosine":
        return lr_scheduler.CosineScheduler(num_updates, **common)
    if args.lr_mode == "step" and args.decay_epochs:
        steps = [epoch * num_batches for epoch in args.decay_epochs]
        return lr_scheduler.MultiFactorScheduler(steps, args.lr_decay, **common)
    never = num_updates + 1
    return lr_scheduler.FactorScheduler(never, factor=1, **common)


class PlannedRate:
    """What a schedule will give, without changing the schedule.

    Parameters
    ----------
    schedule : LRScheduler
        Fresh: it changes itself when it is asked, so a copy is asked.
    """

    def __init__(self, schedule: lr_scheduler.LRScheduler) -> None:
        self._schedule = copy.deepcopy(schedule)

    def __call__(self, update: int) -> float:
        """The learning rate of an update; updates are asked for in order."""
        return self._schedule(update)


def make_optimizer(
    args: argparse.Namespace,
    params: Sequence[gluon.Parameter],
    schedule: lr_scheduler.LRScheduler,
    updates_done: int,
) -> mx.optimizer.Optimizer:
    """The optimizer, at the place of its schedule where the training stands.

    Parameters
    ----------
    args : argparse.Namespace
        optimizer, lr, momentum, wd, no_wd and dtype.
    params : sequence of gluon.Parameter
        In the order in which a Trainer gets them.
    schedule : LRScheduler
    updates_done : int
        Counting goes on from here, on the servers too.
    """
    optimizer = mx.optimizer.create(
        args.optimizer,
        learning_rate=args.lr,
        momentum=args.momentum,
        wd=args.wd,
        lr_scheduler=schedule,
        begin_num_update=updates_done,
        multi_precision=args.dtype == "float16",
    )
    if args.no_wd:
        free = [i for i, param in enumerate(params) if _has_no_decay(param.name)]
        for i in free:
            params[i].wd_mult = 0.0
        # MXNet's own servers get no Parameter, and look multipliers up by number.
        optimizer.set_wd_mult(dict.fromkeys(free, 0.0))
    return optimizer


def _has_no_decay(name: str) -> bool:
    return name.endswith(("beta", "gamma", "bias"))
