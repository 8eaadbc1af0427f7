"""The command line of train_classifier.py: GluonCV's flags, and a few of ours."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Sequence

KVSTORES = (
    "device",
    "local",
    "dist_sync",
    "dist_device_sync",
    "dist_odsgd",
    "dist_device_odsgd",
)
RECORDS = Path("~/.mxnet/datasets/imagenet/rec")
RECORD_MAGIC = bytes.fromhex("0a23d7ce")
EPILOG = """
The learning rate is that of a step over the global batch: --batch-size times devices
times workers. Gradients are summed over workers and divided by that number, so four
workers at the same --lr make a step as long as one worker's, on four times the
images; the usual rule is to raise --lr in proportion to the global batch.

A checkpoint holds the global weights, the epoch and the flags. The optimizer's
momentum is not saved yet: after a resume it starts at 0, and with dist_odsgd the
synchronous --warmup-steps run again. BatchNorm's running statistics are each worker's
own, as in GluonCV's script; rank 0's are evaluated and saved.
"""


class Refused(Exception):
    """What was asked for cannot be done; the message says what can."""


class _Formatter(
    argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
    """Shows defaults that say something, and leaves the epilog's lines as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == "":
            return action.help
        return super()._get_help_string(action)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings, checked as far as they can be without MXNet.

    Parameters
    ----------
    argv : sequence of str, optional
        The words of the command line; `sys.argv` when left out.

    Raises
    ------
    Refused
        A value is not allowed, a file is missing, or a flag is not supported.
    """
    parser = argparse.ArgumentParser(
        description="Train an image classification network of GluonCV from RecordIO.",
        epilog=EPILOG,
        formatter_class=_Formatter,
    )
    for group, add_flags in _GROUPS:
        add_flags(parser.add_argument_group(group).add_argument)
    args = parser.parse_args(argv)
    _refuse_unsupported(args)
    _check_numbers(args)
    _find_records(args)
    return args


def _add_data(add: Any) -> None:
    add("--rec-train", default=str(RECORDS / "train.rec"), help="training images")
    add("--rec-train-idx", default="", help="their index; default: train .rec as .idx")
    add("--rec-val", default=str(RECORDS / "val.rec"), help="validation images")
    add("--rec-val-idx", default="", help="their index; default: val .rec as .idx")
    add("--use-rec", action="store_true", help="no effect: it is always RecordIO")
    add("--data-dir", default="", help="no effect: image folders are not read")
    add("--num-classes", type=_positive, default=1000, help="labels are 0 to one less")
    add("--input-size", type=_positive, default=224, help="pixels of a side")
    add("--crop-ratio", type=float, default=0.875, help="validation: crop / resize")
    add("-j", "--num-data-workers", type=_positive, default=4, help="decoding threads")
    add("--batch-size", type=_positive, default=32, help="images of one device's step")
    add("--num-gpus", type=_count, default=0, help="of this worker; 0: the CPU")
    add("--seed", type=int, default=0, help="of weights, data order and augmentation")


def _add_network(add: Any) -> None:
    add("--model", required=True, help="such as resnet50_v1b or mobilenet1.0")
    modes = ["hybrid", "symbolic", "imperative"]
    add("--mode", choices=modes, default="hybrid", help="symbolic is hybrid")
    add("--dtype", default="float32", help="float16: with a GPU, not with dist_odsgd")
    add("--use-pretrained", action="store_true", help="download and start at these")
    add("--use_se", action="store_true", help="squeeze-and-excitation, of a resnext")
    add("--batch-norm", action="store_true", help="of a vgg")
    add("--last-gamma", action="store_true", help="0 in each block's last BatchNorm")
    add("--use-gn", action="store_true", help="GroupNorm in place of BatchNorm")


def _add_optimizer(add: Any) -> None:
    add("--optimizer", choices=["nag", "sgd"], default="nag", help="with momentum")
    add("--num-epochs", type=_count, default=3, help="passes over the training images")
    add("--lr", type=float, default=0.1, help="learning rate of a global step")
    add("--momentum", type=float, default=0.9, help="of the optimizer")
    add("--wd", type=float, default=1e-4, help="weight decay")
    add("--no-wd", action="store_true", help="none for biases, gammas and betas")
    modes = ["step", "poly", "cosine", "constant"]
    add("--lr-mode", choices=modes, default="step", help="how it falls")
    add("--lr-decay", type=float, default=0.1, help="factor, of step")
    add("--lr-decay-period", type=_count, default=0, help="epochs; 0: --lr-decay-epoch")
    add("--lr-decay-epoch", default="40,60", help="epochs before it falls, of step")
    add("--warmup-lr", type=float, default=0.0, help="learning rate that it rises from")
    add("--warmup-epochs", type=_count, default=0, help="epochs in which it rises")
    add("--label-smoothing", action="store_true", help="by 0.1")
    add("--mixup", action="store_true", help="mix pairs of images and labels")
    add("--mixup-alpha", type=float, default=0.2, help="of the beta distribution")
    add("--mixup-off-epoch", type=_count, default=0, help="last epochs without mixup")


def _add_job(add: Any) -> None:
    add("--kvstore", choices=KVSTORES, default="device", help="KVStore type")
    text = "of dist_odsgd: synchronous steps at first (default: 200)"
    add("--warmup-steps", type=_count, help=text)
    text = "of dist_odsgd: rule of the local update (default: auto)"
    add("--local-optimizer", help=text)


def _add_output(add: Any) -> None:
    add("--log-interval", type=_count, default=50, help="steps; 0: epochs only")
    add("--log-all", action="store_true", help="from every rank, not only rank 0")
    add("--logging-file", default="", help="rank 0 appends its log to it as well")
    add("--save-dir", default="params", help="folder of the checkpoints")
    add("--save-frequency", type=_count, default=10, help="epochs; 0: none")
    text = "auto: go on from the newest checkpoint in --save-dir, if there is one"
    add("--resume", choices=["auto"], help=text)
    add("--resume-epoch", type=_count, default=0, help="epochs that are done")
    add("--resume-params", default="", help="weights to start at")


def _add_refused(add: Any) -> None:
    add("--resume-states", default="", help="the optimizer's state is not saved yet")
    add("--teacher", default=None, help="distillation is not supported")
    add("--temperature", default=None, help=argparse.SUPPRESS)
    add("--hard-weight", default=None, help=argparse.SUPPRESS)


_GROUPS = (
    ("data", _add_data),
    ("network", _add_network),
    ("optimizer", _add_optimizer),
    ("job", _add_job),
    ("log and checkpoints (every rank reads --save-dir, rank 0 writes)", _add_output),
    ("refused", _add_refused),
)


def _positive(text: str) -> int:
    value = _count(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0")
    return int(text)


def is_odsgd(kvstore: str) -> bool:
    """Whether a KVStore type is ours."""
    return "odsgd" in kvstore


def _refuse_unsupported(args: argparse.Namespace) -> None:
    if args.teacher or args.temperature or args.hard_weight:
        raise Refused("--teacher: distillation is not supported. Leave it out.")
    if args.resume_states:
        raise Refused(
            "--resume-states is not supported yet: with a distributed store the "
            "optimizer's state is on the servers, and is not saved. Resume with "
            "--resume auto: weights, epoch and learning rate go on, momentum begins "
            "at 0."
        )
    if args.dtype not in ("float32", "float16"):
        raise Refused(f"--dtype {args.dtype}; allowed are float32 and float16.")
    if args.dtype == "float16" and is_odsgd(args.kvstore):
        raise Refused(
            f"--dtype float16 is not supported yet with --kvstore {args.kvstore}, which "
            "has float32 parameters only. Use float32, or dist_sync."
        )
    if args.dtype == "float16" and args.num_gpus == 0:
        raise Refused("--dtype float16 needs a GPU: give --num-gpus, or use float32.")
    if args.resume and (args.resume_epoch or args.resume_params):
        raise Refused(
            "--resume auto came with --resume-epoch or --resume-params. Give one way."
        )
    _check_job(args)


def _check_job(args: argparse.Namespace) -> None:
    """Flags of dist_odsgd go with it, and a stock store needs a launcher."""
    ours = [args.warmup_steps is not None, args.local_optimizer is not None]
    if any(ours) and not is_odsgd(args.kvstore):
        raise Refused(
            "--warmup-steps and --local-optimizer are of dist_odsgd; --kvstore is "
            f"{args.kvstore}. Leave them out."
        )
    is_stock = args.kvstore.startswith("dist") and not is_odsgd(args.kvstore)
    if is_stock and not os.environ.get("DMLC_ROLE"):
        raise Refused(
            f"--kvstore {args.kvstore} needs servers and a scheduler, and this process "
            "was not started by a launcher (DMLC_ROLE is not set). Run: odsgd-launch "
            "--stock-servers -n WORKERS -s SERVERS -- python -m odsgd_kvstore "
            f"train_classifier.py ... --kvstore {args.kvstore}; or use --kvstore "
            "device for this process alone."
        )


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("lr", "warmup_lr", "wd", "momentum", "mixup_alpha"):
        value = getattr(args, name)
        if not 0 <= value < float("inf"):
            raise Refused(f"{flag(name)} is {value}; allowed are numbers from 0.")
    if args.lr == 0 or args.warmup_lr > args.lr:
        raise Refused(
            f"--lr is {args.lr} and --warmup-lr {args.warmup_lr}; --lr is above 0, and "
            "--warmup-lr, from which it rises, not above --lr."
        )
    if not 0 < args.crop_ratio <= 1:
        raise Refused(
            f"--crop-ratio is {args.crop_ratio}; allowed is above 0, up to 1."
        )
    if not 0 < args.lr_decay <= 1:
        raise Refused(f"--lr-decay is {args.lr_decay}; allowed is above 0, up to 1.")
    if args.mixup and args.mixup_alpha == 0:
        raise Refused("--mixup-alpha is 0; with --mixup it is above 0.")
    if args.warmup_epochs and args.warmup_epochs >= args.num_epochs:
        raise Refused(
            f"--warmup-epochs is {args.warmup_epochs} and --num-epochs "
            f"{args.num_epochs}; the learning rate must be up before the last epoch."
        )
    if args.momentum >= 1:
        raise Refused(
            f"--momentum is {args.momentum}; allowed are numbers from 0, below 1."
        )
    folder = Path(args.logging_file).parent
    if not folder.is_dir():
        raise Refused(f"--logging-file: the folder {folder} does not exist.")
    args.decay_epochs = decay_epochs(args)


def decay_epochs(args: argparse.Namespace) -> list[int]:
    """The epochs that are done when the learning rate falls, for --lr-mode step."""
    if args.lr_decay_period:
        period = args.lr_decay_period
        return list(range(period, args.num_epochs, period))
    words = [word.strip() for word in args.lr_decay_epoch.split(",") if word.strip()]
    numbers = [int(word) for word in words if word.isdigit()]
    is_rising = all(a < b for a, b in zip([0, *numbers], numbers))
    if len(numbers) < len(words) or not is_rising:
        raise Refused(
            f"--lr-decay-epoch is {args.lr_decay_epoch!r}; allowed are rising numbers "
            "of epochs from 1, such as 40,60."
        )
    return numbers


def _find_records(args: argparse.Namespace) -> None:
    """Expand the files' names; all must be there."""
    for name in ("rec_train", "rec_val"):
        path = Path(getattr(args, name)).expanduser()
        given = getattr(args, f"{name}_idx")
        index = Path(given).expanduser() if given else path.with_suffix(".idx")
        for key, file in ((name, path), (f"{name}_idx", index)):
            if not file.is_file():
                raise Refused(
                    f"{flag(key)}: the file {file} does not exist. Pack images with "
                    "MXNet's tools/im2rec.py, shuffled; it writes a .rec and an .idx "
                    "(tools/rec2idx.py makes an .idx of a .rec)."
                )
            setattr(args, key, str(file))
        with open(path, "rb") as file:
            start = file.read(len(RECORD_MAGIC))
        if start != RECORD_MAGIC:
            raise Refused(
                f"{flag(name)}: {path} is no RecordIO file: it begins with "
                f"{start.hex() or 'nothing'}, not {RECORD_MAGIC.hex()}. Pack images "
                "with MXNet's tools/im2rec.py."
            )


def flag(name: str) -> str:
    """As it is typed."""
    return "--" + (name if name == "use_se" else name.replace("_", "-"))
