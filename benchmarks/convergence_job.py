"""Runs one training of benchmark_convergence.py as a job of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import datasets
from convergence_run import METHODS, Run
from convergence_store import finite

from odsgd_kvstore.launch import commands, local, processes

WORKER = Path(__file__).resolve().with_name("convergence_worker.py")
PREFIX = "convergence-report "  # of the line with a worker's result
# MXNet's own stores put whole arrays on one server below a million numbers; a lower
# bound cuts them over all servers, which is fair where links count.
STOCK_ENV = {"MXNET_KVSTORE_BIGARRAY_BOUND": "4096"}


def execute(
    run: Run, data: Path | None, cache: Path, timeout_s: float = 3600.0
) -> dict[str, Any]:
    """Train once, with a scheduler, servers and workers on this machine.

    Parameters
    ----------
    run : Run
    data : Path, optional
        Folder of the data set; None for the packaged digits.
    cache : Path
        Where decoded data are kept; nothing else is written.
    timeout_s : float
        For the whole job.

    Returns
    -------
    dict
        run; data: their digest; status: 'ok', also of a diverged training, or 'failed'
        with the launcher's message as reason; wall_s: of the whole job; if 'ok', all
        that `combine` finds.

    Raises
    ------
    DataError
        The data are not there, are damaged, or do not suffice.
    LaunchError
        The settings of the job are wrong, or its links could not be made.
    """
    folder = datasets.prepare(run.dataset, data, cache)
    datasets.open_dataset(run, folder, rank=0)  # are there enough?
    facts = {"run": dataclasses.asdict(run), "data": datasets.digest(folder)}
    start = time.perf_counter()
    reports, reason = run_job(plan(run, folder), timeout_s)
    wall_s = time.perf_counter() - start
    outcome = {**facts, "wall_s": wall_s, "reason": reason}
    if reason:
        return {**outcome, "status": "failed"}
    return {**outcome, "status": "ok", **combine(reports)}


def run_job(
    job: commands.Job, timeout_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Reports of the ranks, in their order, and why the job broke, '' if it did not."""
    reports: dict[int, dict[str, Any]] = {}

    def on_line(role: commands.Role, text: str) -> None:
        if text.startswith(PREFIX):
            reports[role.rank] = json.loads(text[len(PREFIX) :])

    roles, sockets = local.new_job(job, os.environ)
    result = processes.run_roles(
        roles, on_line=on_line, timeout=timeout_s, sockets=sockets
    )
    is_whole = not result.exit_code and len(reports) == job.num_workers
    reason = "" if is_whole else result.message or "a worker ended without a result"
    return [reports[rank] for rank in sorted(reports)], reason


def plan(run: Run, folder: Path) -> commands.Job:
    """The job of a run whose data are in `folder`."""
    settings = {"run": dataclasses.asdict(run), "folder": str(folder.resolve())}
    is_stock = METHODS[run.method].has_stock_servers
    return commands.Job(
        run.num_workers,
        run.num_servers,
        (sys.executable, str(WORKER), json.dumps(settings)),
        stock_servers=is_stock,
        env=STOCK_ENV if is_stock and run.rate else {},
        bandwidth=run.rate or None,
    )


def combine(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a job from those of its ranks.

    Parameters
    ----------
    reports : list of dict
        Of all ranks, in their order.

    Returns
    -------
    dict
        num_steps; num_parameters; losses: [step, mean loss since the point before,
        over all ranks]; evaluations: [step, seconds, accuracy from 0 to 1, test loss],
        at the global weights; accuracy: the last one; seconds: of the slowest rank's
        training, without start-up and evaluations; rank_seconds: of each rank's;
        max_staleness: of all ranks, None for MXNet's own stores. A loss that is not
        finite is None.
    """
    first = reports[0]
    staleness = [report["max_staleness"] for report in reports]
    known = [steps for steps in staleness if steps is not None]
    losses = [
        [points[0][0], finite(sum(loss for _, loss in points) / len(points))]
        for points in zip(*(r["losses"] for r in reports))
    ]
    evaluations = []
    for shares in zip(*(r["evaluations"] for r in reports)):
        steps, seconds, right, total, counts = zip(*shares)
        loss = finite(sum(total) / sum(counts))
        evaluations.append([steps[0], max(seconds), sum(right) / sum(counts), loss])
    return {
        "num_steps": first["num_steps"],
        "num_parameters": first["num_parameters"],
        "losses": losses,
        "evaluations": evaluations,
        "accuracy": evaluations[-1][2],
        "seconds": evaluations[-1][1],
        "rank_seconds": [report["evaluations"][-1][1] for report in reports],
        "max_staleness": max(known, default=None),
    }
