"""Train on this machine with One-step Delay SGD, and with dist_sync beside it.

With --network RATE every role has a link of that rate, and accuracy is shown against
time.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_curves
import numpy as np
from demo_worker import PREFIX, Settings
from digits import positive

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import commands, local, processes
from odsgd_kvstore.launch.bandwidth import parse_rate

WORKER = Path(__file__).resolve().with_name("demo_worker.py")
LEAST_ACCURACY = 0.97
JOB_TIMEOUT_S = 150
BAR_WIDTH = 16  # so that the line fits into 80 columns
# With --network: a step's computation takes about as long as its communication.
ON_LINKS = {"num_servers": 2, "epochs": 14, "batch_size": 48}
# MXNet's own stores put whole arrays on one server below a million numbers, and all
# weights on the same one of two. The lower bound cuts them: fair to dist_sync.
STOCK_ENV = {"MXNET_KVSTORE_BIGARRAY_BOUND": "4096"}

ABOUT_SECONDS = """\
Accuracy: on test images, at the global weights. Within one machine there
is no slow network to hide, so the seconds say little; see README.md.
With --network 200mbit they do."""

NEXT = """\
Next:
  in your script      trainer = odsgd_kvstore.Trainer(params, 'sgd', {...}), or only
                      kvstore='dist_odsgd' where it has 'dist_sync' now
  start it            odsgd-launch -n 2 -s 1 -- python -m odsgd_kvstore train.py
  read on             README.md: how it works, options, clusters, limits"""


@dataclass(frozen=True)
class Outcome:
    """What a job came to; `difference` is between the ranks' global weights.

    `curve`: accuracy against seconds, with a network.
    """

    kvstore: str
    accuracy: float
    difference: float
    staleness: int
    steps: int
    seconds: float
    curve: demo_curves.Curve = ()


class Progress:
    """One line for the whole job, from the reports of all its ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.latest: dict[int, dict[str, Any]] = {}  # by rank
        self.curve: list[tuple[float, float]] = []  # rank 0's
        self.other_lines: list[str] = []
        self._is_terminal = sys.stdout.isatty()
        self._shown = -1

    def on_line(self, role: Any, text: str) -> None:
        """Take a line that a role wrote."""
        if not text.startswith(PREFIX):
            self.other_lines.append(f"[{role.name}] {text}")
            return
        report = json.loads(text[len(PREFIX) :])
        self.latest.setdefault(role.rank, {}).update(report)
        if role.rank == 0 and {"loss", "accuracy"} <= report.keys():
            self.curve.append((report["seconds"], report["accuracy"]))
        if "loss" in report and len(self.latest) == self.settings.num_workers:
            self.draw()

    def draw(self) -> None:
        """Draw the bar over the last one; without a terminal, write a line a tenth."""
        ranks = list(self.latest.values())
        step, steps = min(r["step"] for r in ranks), ranks[0]["steps"]
        width = BAR_WIDTH - 4 if self.settings.network else BAR_WIDTH
        bar = "#" * (width * step // steps)
        text = (
            f"{self.settings.kvstore:<10} [{bar:-<{width}}] "
            f"{step:>{len(str(steps))}}/{steps} steps  {self._state(ranks)}  "
            f"staleness {max(r['staleness'] for r in ranks)}"
        )
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + text[:width].ljust(width), end="", flush=True)
        elif 10 * step // steps > self._shown:
            self._shown = 10 * step // steps
            print(text, flush=True)

    def _state(self, ranks: list[dict[str, Any]]) -> str:
        """What the job has come to, in words."""
        if self.settings.network:
            if not self.curve:
                return f"{'':24}"
            seconds, accuracy = self.curve[-1]
            return f"{seconds:4.1f} s  accuracy {100 * accuracy:5.1f} %"
        loss = sum(r["loss"] for r in ranks) / len(ranks)
        speed = sum(r["speed"] for r in ranks)
        return f"loss {loss:.4f}  {speed:5.0f} samples/s"

    def close(self) -> None:
        """End the line."""
        if self._is_terminal and self.latest:
            print(flush=True)


def run_job(settings: Settings, folder: Path) -> Outcome:
    """Run a scheduler, servers and workers on this machine, and draw its progress."""
    text = json.dumps(dataclasses.asdict(settings))
    is_stock = settings.kvstore == "dist_sync"
    job = commands.Job(
        settings.num_workers,
        settings.num_servers,
        (sys.executable, str(WORKER), str(folder), text),
        stock_servers=is_stock,
        env=STOCK_ENV if is_stock and settings.network else {},
        bandwidth=settings.network or None,
    )
    roles, sockets = local.new_job(job, os.environ)
    progress = Progress(settings)
    result = processes.run_roles(
        roles,
        on_line=progress.on_line,
        timeout=JOB_TIMEOUT_S,
        sockets=sockets,
    )
    progress.close()
    if result.exit_code:
        failure = result.first_failure
        what = f"{failure.role} {failure.reason}" if failure else result.message
        raise SystemExit("\n".join([*progress.other_lines, f"demo: {what}"]))
    return summarise(settings, progress, folder)


def summarise(settings: Settings, progress: Progress, folder: Path) -> Outcome:
    """Compare what the ranks left."""
    ranks, curve = progress.latest, progress.curve
    weights = [np.load(folder / f"{rank}.npy") for rank in sorted(ranks)]
    difference = max(float(np.abs(w - weights[0]).max()) for w in weights)
    if len({hashlib.sha256(w.tobytes()).hexdigest() for w in weights}) > 1:
        difference = max(difference, np.finfo("float32").tiny)  # -0.0, NaN
    return Outcome(
        settings.kvstore,
        accuracy=min(r["accuracy"] for r in ranks.values()),
        difference=difference,
        staleness=max(r["staleness"] for r in ranks.values()),
        steps=min(r["step"] for r in ranks.values()),
        seconds=curve[-1][0] if curve else max(r["seconds"] for r in ranks.values()),
        curve=curve,
    )


def show(outcomes: list[Outcome]) -> None:
    """Print the table of the jobs."""
    print("\nkvstore      accuracy   ranks differ by   staleness   steps   seconds")
    for o in outcomes:
        print(
            f"{o.kvstore:<10} {100 * o.accuracy:8.2f} %   {o.difference:15g}   "
            f"{o.staleness:9}   {o.steps:5}   {o.seconds:7.1f}"
        )
    curves = {outcome.kvstore: outcome.curve for outcome in outcomes}
    print(f"\n{about_curves(curves) if outcomes[0].curve else ABOUT_SECONDS}\n")


def about_curves(curves: dict[str, demo_curves.Curve]) -> str:
    """Accuracy against time, and what it says."""
    return (
        "Accuracy on test images, at the global weights, against seconds of training:\n"
        f"\n{demo_curves.chart(curves)}\n"
        f"\n{demo_curves.comparison(curves, LEAST_ACCURACY)}\n"
        "Seconds are without start-up and evaluation."
    )


def main(settings: Settings) -> int:
    """Run both jobs, show what came of them, and return the exit code."""
    links = f", on links of {settings.network}" if settings.network else ""
    print(
        f"Training a small net on handwritten digits, on this machine{links}.\n"
        f"Workers: {settings.num_workers}, servers: {settings.num_servers}. First "
        f"{settings.warmup_steps} synchronous warm-up steps, then One-step Delay SGD;\n"
        "and all of it once more with MXNet's own dist_sync.\n",
        flush=True,
    )
    outcomes = []
    for kvstore in (settings.kvstore, "dist_sync"):
        with tempfile.TemporaryDirectory() as folder:
            job = dataclasses.replace(settings, kvstore=kvstore)
            outcomes.append(run_job(job, Path(folder)))
    show(outcomes)
    ours = outcomes[0]
    if ours.difference != 0:
        print("demo: FAILED, the ranks hold different global weights", file=sys.stderr)
        return 1
    if not ours.accuracy >= LEAST_ACCURACY:
        least = f"{100 * LEAST_ACCURACY:g} %"
        print(f"demo: FAILED, the accuracy is less than {least}", file=sys.stderr)
        return 1
    print(NEXT)
    return 0


def parse() -> Settings:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, argument_default=argparse.SUPPRESS
    )
    for name in ("num_workers", "num_servers", "epochs"):
        default = getattr(Settings, name)
        text = f"how many; default {default}"
        if name in ON_LINKS:
            text += f", with --network {ON_LINKS[name]}"
        flag = "--" + name.replace("num_", "")
        parser.add_argument(flag, dest=name, type=positive, metavar="N", help=text)
    text = "give each role a link of this rate, such as 200mbit"
    parser.add_argument("--network", type=rate, metavar="RATE", help=text)
    given = vars(parser.parse_args())
    return Settings(**{**(ON_LINKS if "network" in given else {}), **given})


def rate(text: str) -> str:
    """A rate, for argparse."""
    try:
        parse_rate(text)
    except LaunchError as error:
        raise argparse.ArgumentTypeError(as_ours(error)) from None
    return text


def as_ours(error: LaunchError) -> str:
    """The launcher's message, with this program's option."""
    return str(error).replace("--emulate-bandwidth", "--network")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(parse()))
    except LaunchError as error:
        sys.exit(f"demo: {as_ours(error)}")
    except KeyboardInterrupt:
        sys.exit("\ndemo: interrupted")
