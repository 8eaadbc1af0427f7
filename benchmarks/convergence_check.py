"""Refuses runs of benchmark_convergence.py that cannot be made, before any starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import datasets
import mxnet as mx
import networks
from convergence_run import METHODS, Run
from convergence_store import Result

from odsgd_kvstore import local_update
from odsgd_kvstore.errors import ConfigError

SIZES = "partition", "batch_size", "num_workers", "max_train", "max_test"


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
        the learning rate would only rise; dist_odsgd would only warm up.
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
        _check_steps([run for run in chosen if run.dataset == name], folder)


def check_same_data(
    runs: Iterable[Run], results: Collection[Result], data: Path | None, output: Path
) -> None:
    """Refuse data other than those of the results that they would be compared with.

    Parameters
    ----------
    runs : iterable of Run
        All that are asked for, also those that are stored.
    results : collection of Result
        The stored ones; those that do not know their data are accepted.
    data : Path, optional
        Folder of the data set.
    output : Path
        Folder of the results and of the decoded data.

    Raises
    ------
    DataError
        The data are missing or damaged.
    RunError
        A result of the same data set is of other data.
    """
    for name in sorted({run.dataset for run in runs}):
        known = {r.data for r in results if r.run.dataset == name} - {None}
        if not known:
            continue
        folder = datasets.prepare(name, data, output / datasets.CACHE)
        if known != {datasets.digest(folder)}:
            raise RunError(
                f"results in {output} are of other {name} data; give another --output "
                "or the same --data."
            )


def _check_steps(runs: Iterable[Run], folder: Path) -> None:
    """Runs of one data set: are there enough images, and does the warm-up end?"""
    per_epoch: dict[tuple, int] = {}
    for run in runs:
        key = tuple(getattr(run, name) for name in SIZES)
        if key not in per_epoch:
            batches = datasets.open_dataset(run, folder, rank=0)
            per_epoch[key] = batches.steps_per_epoch
        _check_warmup(run, run.epochs * per_epoch[key])


def _check_warmup(run: Run, num_steps: int) -> None:
    is_stock = METHODS[run.method].has_stock_servers
    if not is_stock and run.warmup_steps >= num_steps:
        raise RunError(
            f"method {run.method!r} would be dist_sync throughout: warmup_steps is "
            f"{run.warmup_steps}, and each of the {run.num_workers} workers makes "
            f"{num_steps} steps. Give a --warmup-steps below {num_steps}, or more "
            "--epochs."
        )


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
