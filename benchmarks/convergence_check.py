"""Refuses runs of benchmark_convergence.py that cannot be made, before any starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import datasets
import mxnet as mx
import networks
from convergence_run import METHODS, Run

from odsgd_kvstore import local_update
from odsgd_kvstore.errors import ConfigError


class RunError(ValueError):
    """A run asks for what does not exist, or for what does not go together."""


def check_runs(runs: Iterable[Run], data: Path | None, cache: Path) -> None:
    """Decode the data, and check everything that is given by name.

    Parameters
    ----------
    runs : iterable of Run
        Those that are to be made.
    data : Path, optional
        Folder of the data set.
    cache : Path
        Where decoded data are kept.

    Raises
    ------
    DataError
        The data are missing, damaged or too few.
    RunError
        A network, an optimizer or a local update rule does not exist or does not fit;
        the learning rate would only rise.
    """
    chosen = list(runs)
    for run in _first_with_new(chosen, "epochs", "lr_warmup_epochs"):
        _check_lr_warmup(run)
    for run in _first_with_new(chosen, "optimizer", "method"):
        _check_optimizer(run)
    for run in _first_with_new(chosen, "dataset", "network"):
        _check_network(run)
    for name in sorted({run.dataset for run in chosen}):
        folder = datasets.prepare(name, data, cache)
        sizes = "partition", "batch_size", "num_workers", "max_train", "max_test"
        for run in _first_with_new(chosen, "dataset", *sizes):
            if run.dataset == name:
                datasets.open_dataset(run, folder, rank=0)


def _first_with_new(runs: Iterable[Run], *names: str) -> list[Run]:
    """One run for each combination of these fields."""
    found: dict[tuple, Run] = {}
    for run in runs:
        found.setdefault(tuple(getattr(run, name) for name in names), run)
    return list(found.values())


def _check_lr_warmup(run: Run) -> None:
    if 0 < run.lr_warmup_epochs >= run.epochs:
        raise RunError(
            f"lr_warmup_epochs is {run.lr_warmup_epochs:g} and epochs is {run.epochs}: "
            "the learning rate would rise until the end. Give a --lr-warmup-epochs "
            "below --epochs, such as 0."
        )


def _check_optimizer(run: Run) -> None:
    known = sorted(mx.optimizer.Optimizer.opt_registry)
    if run.optimizer.lower() not in known:
        raise RunError(
            f"the optimizer is {run.optimizer!r}; allowed are {', '.join(known)}."
        )
    method = METHODS[run.method]
    if not method.has_stock_servers:
        optimizer = mx.optimizer.create(run.optimizer)
        try:
            local_update.create(method.rule, method.rule_params, optimizer, 1.0)
        except ConfigError as error:
            raise RunError(f"method {run.method!r}: {error}") from error


def _check_network(run: Run) -> None:
    dataset = datasets.find(run.dataset)
    try:
        networks.build(run.network, dataset.shape, dataset.num_classes, run.seed)
    except (ImportError, ValueError) as error:
        raise RunError(str(error)) from error
