"""Checkpoints: the global weights, and beside them where the training stood.

MODEL-EPOCH.params and MODEL-EPOCH.json, EPOCH being the epochs that are done. The
JSON is written last: a checkpoint without it was interrupted, and does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import mxnet as mx
from classifier_flags import Refused, flag
from mxnet import gluon

# May differ between the two parts of a training without changing it.
_FREE = {
    "decay_epochs",  # follow from flags
    "resume",
    "resume_epoch",
    "resume_params",
    "save_dir",
    "save_frequency",
    "log_interval",
    "log_all",
    "logging_file",
    "num_data_workers",
    "use_rec",
    "data_dir",
    "rec_train",
    "rec_train_idx",
    "rec_val",
    "rec_val_idx",
}


@dataclass(frozen=True)
class Start:
    """Where a training begins.

    Attributes
    ----------
    epoch : int
        Epochs that are done.
    params : Path or None
        The weights; None for new ones.
    record : dict
        The checkpoint's JSON; empty if there is none.
    before : Path or None
        With --resume auto: the weights of the checkpoint before, if there is one.
    """

    epoch: int = 0
    params: Path | None = None
    record: dict[str, Any] | None = None
    before: Path | None = None


def prepare(args: argparse.Namespace) -> None:
    """Make --save-dir, if anything will be saved there.

    Raises
    ------
    Refused
        It cannot be made or written to.
    """
    if not args.save_frequency:
        return
    folder = Path(args.save_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--save-dir {folder} cannot be made: {error}") from None
    if not os.access(folder, os.W_OK):
        raise Refused(f"--save-dir {folder} cannot be written to.")


def save(
    net: gluon.Block, args: argparse.Namespace, epoch: int, facts: dict[str, Any]
) -> Path:
    """Write a checkpoint, whole or not at all; return the path of its weights.

    Removes what an earlier training left that was killed while it saved.

    Parameters
    ----------
    net : gluon.Block
        Its parameters hold the global weights now.
    args : argparse.Namespace
        save_dir (see `prepare`), model, and all flags for the record.
    epoch : int
        Epochs that are done.
    facts : dict
        More for the record, such as updates.
    """
    path = _path(args, epoch)
    record = {"epoch": epoch, **facts, "flags": vars(args)}
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    _remove_partial(args)
    _write(path, lambda partial: net.save_parameters(str(partial)))
    _write(path.with_suffix(".json"), lambda partial: partial.write_text(text))
    return path


def find(args: argparse.Namespace) -> Start:
    """Where to begin, by the flags --resume, --resume-epoch and --resume-params.

    Raises
    ------
    Refused
        The weights that were asked for are not there.
    """
    if args.resume == "auto":
        epochs = _whole(args)
        if not epochs:
            return Start()
        before = _path(args, epochs[-2]) if epochs[1:] else None
        return dataclasses.replace(_at(args, epochs[-1]), before=before)
    if args.resume_params:
        path = Path(args.resume_params).expanduser()
        if not path.is_file():
            raise Refused(f"--resume-params: the file {path} does not exist.")
        return Start(args.resume_epoch, path, _record(path))
    if not args.resume_epoch:
        return Start()
    start = _at(args, args.resume_epoch)
    if not start.params.is_file():
        raise Refused(
            f"--resume-epoch {args.resume_epoch}: {start.params} does not exist. Give "
            "--resume-params, another --save-dir, or --resume auto."
        )
    return start


def load(net: gluon.Block, start: Start, contexts: list[mx.Context]) -> None:
    """Give the network the weights that the training begins with, if there are any.

    Raises
    ------
    Refused
        They are not of this network.
    """
    if start.params is None:
        return
    try:
        net.load_parameters(str(start.params), ctx=contexts)
    except (AssertionError, ValueError, mx.MXNetError) as error:
        lines = str(error).strip().splitlines() or ["no reason is known"]
        # MXNet's own begin with a trace of its C++ code.
        reason = lines[-1 if lines[0].startswith("Traceback") else 0]
        advice = ""
        if start.before is not None:
            advice = f" To go on from {start.before}, move this file away."
        raise Refused(
            f"{start.params} does not hold the weights of this network: {reason} Is it "
            "of another --model, --num-classes or --input-size, or truncated?" + advice
        ) from None


def changed_flags(args: argparse.Namespace, start: Start) -> list[str]:
    """Flags, '--name: then, now', whose other value makes it another training."""
    then = (start.record or {}).get("flags", {})
    return [
        f"{flag(name)}: {then[name]}, now {value}"
        for name, value in sorted(vars(args).items())
        if name not in _FREE and name in then and then[name] != value
    ]


def _whole(args: argparse.Namespace) -> list[int]:
    """Epochs done in each whole checkpoint of --save-dir, rising."""
    pattern = re.compile(re.escape(args.model) + r"-(\d{4,})\.json")
    folder = Path(args.save_dir)
    names = os.listdir(folder) if folder.is_dir() else []
    found = [int(m.group(1)) for m in map(pattern.fullmatch, names) if m]
    return sorted(e for e in found if e and _path(args, e).is_file())


def _at(args: argparse.Namespace, epoch: int) -> Start:
    path = _path(args, epoch)
    return Start(epoch, path, _record(path))


def _record(path: Path) -> dict[str, Any] | None:
    """The JSON beside weights, None if there is none."""
    try:
        return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Refused(
            f"{path.with_suffix('.json')} is not JSON ({error}). Remove it, or the "
            "whole checkpoint."
        ) from None


def _path(args: argparse.Namespace, epoch: int) -> Path:
    return Path(args.save_dir) / f"{args.model}-{epoch:04d}.params"


def _remove_partial(args: argparse.Namespace) -> None:
    """Remove files of `_write` that a killed process left: one rank saves, no other."""
    pattern = rf"\.{re.escape(args.model)}-\d{{4,}}\.(params|json)\.\d+\.partial"
    for path in Path(args.save_dir).iterdir():
        if re.fullmatch(pattern, path.name):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _write(path: Path, save: Callable[[Path], Any]) -> None:
    """Save beside `path`, then put in its place at once."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save(partial)
        os.replace(partial, path)
    finally:
        if partial.exists():
            partial.unlink()
