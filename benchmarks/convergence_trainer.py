"""The trainer of each method of benchmark_convergence.py, and its global weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mxnet as mx
from convergence_run import METHODS, Run
from mxnet import gluon

import odsgd_kvstore

WITH_MOMENTUM = ("sgd", "nag", "signum")


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
