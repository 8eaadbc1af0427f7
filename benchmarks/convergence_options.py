"""The command line of benchmark_convergence.py."""

from __future__ import annotations

import argparse
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import datasets
import report
from batches import PARTITIONS
from convergence_presets import Preset, own_preset, presets
from convergence_run import METHODS, Run

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.bandwidth import parse_rate

SCHEDULES = ("constant", "step", "cosine")
NO_LIMIT = "none"
FOLDER = "convergence"  # inside the results' folder
EPILOG = """\
An option beside a preset changes all of its runs; --method, --num-workers,
--learning-rate, --seeds and --optimizer take the place of the preset's.
Without --preset, --dataset starts runs of your own.
"""


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Parameters
    ----------
    runs : tuple of Run
        Empty for a report of everything.
    data : Path, optional
        Folder of the data set.
    folder : Path
        Of the results.
    list_only, report_only : bool
        Only list the runs; only make the report.
    is_timed : bool
        Whether the machine must be idle.
    timeout_s : float
        Of one run.
    """

    runs: tuple[Run, ...]
    data: Path | None
    folder: Path
    list_only: bool
    report_only: bool
    is_timed: bool
    timeout_s: float


def parse(arguments: list[str] | None = None, about: str = "") -> Options:
    """Return what the command line asks for; end the program if that is wrong."""
    parser = _parser(about)
    given = vars(parser.parse_args(arguments))
    data, output = given.pop("data", None), given.pop("output")
    list_only, report_only = given.pop("list"), given.pop("report")
    name, timeout_s = given.pop("preset", None), given.pop("timeout", None)
    if list_only and report_only:
        parser.error("--list and --report are two different things: give one of them")
    if report_only and name is None and "dataset" not in given:
        if given:
            parser.error("--report without --preset takes all runs: no other options")
        return Options((), data, output / FOLDER, list_only, report_only, False, 0.0)
    preset = _preset(name, given)
    runs = tuple(preset.runs())
    if not (list_only or report_only):
        _check_data(parser, runs, data)
    return Options(
        runs,
        data,
        output / FOLDER,
        list_only,
        report_only,
        preset.is_timed,
        timeout_s or preset.timeout_s,
    )


def _preset(name: str | None, given: dict[str, Any]) -> Preset:
    """The preset with the user's changes."""
    if name is None and "dataset" in given:
        return own_preset(given["dataset"]).changed(given)
    return presets()[name or "smoke"].changed(given)


def _check_data(
    parser: argparse.ArgumentParser, runs: tuple[Run, ...], data: Path | None
) -> None:
    """Refuse runs whose data are not named."""
    for name in sorted({run.dataset for run in runs}):
        files = datasets.DATASETS[name].files
        if files and data is None:
            parser.error(
                f"{name} is read from files: add --data FOLDER with {', '.join(files)}"
            )


def _parser(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--preset NAME] [--data FOLDER] [OPTION ...]",
        description=about,
        epilog=EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    texts = [f"{name}: {preset.about}" for name, preset in presets().items()]
    add("--preset", choices=list(presets()), help=f"{'; '.join(texts)} (default smoke)")
    folder: dict[str, Any] = {"type": Path, "metavar": "FOLDER"}
    add("--data", **folder, help="with the files of the data set")
    text = f"for results, in its folder {FOLDER!r}; default {report.DEFAULT_FOLDER}"
    add("--output", **folder, default=report.DEFAULT_FOLDER, help=text)
    flag: dict[str, Any] = {"action": "store_true", "default": False}
    add("--report", **flag, help="run nothing; report what is stored")
    add("--list", **flag, help="run nothing; list the runs, and which are stored")
    add("--timeout", type=above_zero, metavar="S", help="seconds of one run at most")
    _add_several(parser)
    _add_fields(parser)
    return parser


def _add_several(parser: argparse.ArgumentParser) -> None:
    """Options of which each value makes runs of its own."""
    add = functools.partial(parser.add_argument, action="append")
    names = ", ".join(METHODS)
    text = f"{names}; with a hyphen for the space too; repeatable"
    add("--method", type=method, choices=list(METHODS), metavar="NAME", help=text)
    add("--num-workers", type=count, metavar="N", help="repeatable")
    add("--learning-rate", type=above_zero, metavar="LR", help="repeatable")
    parser.add_argument(
        "--seeds",
        dest="seed",
        type=seeds,
        metavar="SEEDS",
        help="how many, or which: 3 is 1,2,3",
    )


def _add_fields(parser: argparse.ArgumentParser) -> None:
    """Options that hold for all runs."""
    add = parser.add_argument
    add("--dataset", choices=list(datasets.DATASETS))
    add("--network", metavar="NAME", help="conv, mlp, lenet5, bn_cnn, or GluonCV's")
    add("--optimizer", metavar="NAME", help="on the servers: sgd, nag, adam, ...")
    add("--schedule", choices=SCHEDULES, help="of the learning rate")
    add("--partition", choices=PARTITIONS, help="how samples are dealt out")
    add("--rate", type=rate, help=f"of each link, such as 70mbit, or {NO_LIMIT!r}")
    counts = {
        "num-servers": "servers",
        "epochs": "passes over the data",
        "batch-size": "samples of a worker's step",
        "num-evaluations": "over the whole run",
        "max-train": "training samples at most",
        "max-test": "test samples at most",
    }
    for name, text in counts.items():
        add(f"--{name}", type=count, metavar="N", help=text)
    add("--warmup-steps", type=count_or_none, metavar="N", help="of dist_odsgd")
    numbers = {
        "momentum": "of sgd, nag and signum",
        "wd": "weight decay",
        "lr-warmup-epochs": "in which the learning rate rises from 0",
        "straggler-ms": "by which the last worker's step is slower",
        "compute-ms": "that each step sleeps in place of an accelerator",
    }
    for name, text in numbers.items():
        add(f"--{name}", type=not_negative, metavar="X", help=text)


def method(text: str) -> str:
    """'dist_async-scaled' for 'dist_async scaled'."""
    return text.replace("-", " ")


def seeds(text: str) -> tuple[int, ...]:
    """'3' for 1, 2, 3; '4,7' for these two; '4,' for one."""
    parts = [part for part in text.split(",") if part.strip()]
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or ("," not in text and numbers[0] < 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of seeds nor a list such as 1,2,3"
        )
    chosen = numbers if "," in text else range(1, numbers[0] + 1)
    return tuple(dict.fromkeys(chosen))


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def count_or_none(text: str) -> int:
    """An integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    return _number(text, lambda value: value >= 0, "of at least 0")


def above_zero(text: str) -> float:
    """A finite number above 0."""
    return _number(text, lambda value: value > 0, "above 0")


def _number(text: str, is_allowed: Callable[[float], bool], allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and is_allowed(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {allowed}")
    return value


def rate(text: str) -> str:
    """A rate, '' for no limit."""
    if text == NO_LIMIT:
        return ""
    try:
        parse_rate(text)
    except LaunchError as error:
        message = str(error).replace("--emulate-bandwidth", "--rate")
        raise argparse.ArgumentTypeError(message) from None
    return text
