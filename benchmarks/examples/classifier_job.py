"""What a worker needs of its job and machine: other workers, devices, store, log."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import mxnet as mx
from classifier_flags import Refused, is_odsgd

import odsgd_kvstore
from odsgd_kvstore.config import Cluster, Config

_START_KEY = 200_000  # no parameter's number

logger = logging.getLogger("train_classifier")


def expected_workers(kvstore: str) -> int:
    """Workers of the job, known before it is joined.

    Raises
    ------
    Refused
        A worker of a job was to train alone.
    """
    cluster = Cluster.from_environment()
    if kvstore.startswith("dist"):
        return cluster.num_workers if cluster else 1
    if cluster:
        raise Refused(
            f"This is one of {cluster.num_workers} workers of a job, and --kvstore is "
            f"{kvstore}: each would train alone. Give --kvstore dist_odsgd, or "
            "dist_sync with odsgd-launch --stock-servers."
        )
    return 1


def devices(num_gpus: int) -> list[mx.Context]:
    """This worker's GPUs, apart from those of other workers here; else the CPU.

    Raises
    ------
    Refused
        There are too few.
    """
    if num_gpus == 0:
        return [mx.cpu()]
    first = num_gpus * int(os.environ.get("ODSGD_LOCAL_RANK") or 0)
    found = mx.context.num_gpus()
    if first + num_gpus > found:
        raise Refused(
            f"--num-gpus is {num_gpus}, and MXNet finds {found} GPU(s) here"
            + (f", of which the first {first} are other workers'." if first else ".")
            + " Give fewer, or 0 for the CPU (the CPU wheel finds none)."
        )
    return [mx.gpu(i) for i in range(first, first + num_gpus)]


def make_store(args: argparse.Namespace) -> Any:
    """Join the job."""
    if not is_odsgd(args.kvstore):
        return mx.kv.create(args.kvstore)
    config = Config.from_environment(
        warmup_steps=args.warmup_steps, local_optimizer=args.local_optimizer
    )
    return odsgd_kvstore.ODSGDStore(config, sum_on_device="device" in args.kvstore)


def check_same_start(store: Any, epoch: int) -> None:
    """Refuse to begin at another epoch than rank 0; collective.

    Raises
    ------
    Refused
        On the rank that differs.
    """
    # In a store of its own, where it can be: a key before the optimizer costs speed.
    is_ours = odsgd_kvstore.is_active(store)
    probe = odsgd_kvstore.ODSGDStore() if is_ours else store
    value = mx.nd.array([epoch])
    probe.init(_START_KEY, value)
    probe.pull(_START_KEY, out=value)
    if value.asscalar() != epoch:
        raise Refused(
            f"Rank {store.rank} finds {epoch} epochs done, and rank 0 "
            f"{value.asscalar():.0f}. Every rank must see the same files: put "
            "--save-dir (or --resume-params) on a file system that all hosts share."
        )


def set_up_log(args: argparse.Namespace, rank: int) -> None:
    """Lines of rank 0 to standard error and --logging-file; of others if asked."""
    handlers: list[logging.Handler] = []
    if rank == 0 or args.log_all:
        handlers.append(logging.StreamHandler())
    if rank == 0 and args.logging_file:
        handlers.append(logging.FileHandler(args.logging_file))
    form = f"[rank {rank}] %(message)s" if args.log_all else "%(message)s"
    for handler in handlers:
        handler.setFormatter(logging.Formatter(form))
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:] = handlers or [logging.NullHandler()]
    logger.setLevel(logging.INFO)
