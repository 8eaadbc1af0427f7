"""Train on this machine with One-step Delay SGD, and with dist_sync beside it."""

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

import numpy as np
from demo_worker import PREFIX, Settings
from digits import positive

from odsgd_kvstore.launch import commands, local, processes

WORKER = Path(__file__).resolve().with_name("demo_worker.py")
LEAST_ACCURACY = 0.97
JOB_TIMEOUT_S = 150
BAR_WIDTH = 16  # so that the line fits into 80 columns

NEXT = """\
Next:
  in your script      trainer = odsgd_kvstore.Trainer(params, 'sgd', {...}), or only
                      kvstore='dist_odsgd' where it has 'dist_sync' now
  start it            odsgd-launch -n 2 -s 1 -- python -m odsgd_kvstore train.py
  read on             README.md: how it works, options, clusters, limits"""


@dataclass(frozen=True)
class Outcome:
    """What a job came to; `difference` is between the ranks' global weights."""

    kvstore: str
    accuracy: float
    difference: float
    staleness: int
    steps: int
    seconds: float


class Progress:
    """One line for the whole job, from the reports of all its ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.latest: dict[int, dict[str, Any]] = {}  # by rank
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
        if "loss" in report and len(self.latest) == self.settings.num_workers:
            self.draw()

    def draw(self) -> None:
        """Draw the bar over the last one; without a terminal, write a line a tenth."""
        ranks = list(self.latest.values())
        step, steps = min(r["step"] for r in ranks), ranks[0]["steps"]
        loss = sum(r["loss"] for r in ranks) / len(ranks)
        speed = sum(r["speed"] for r in ranks)
        stale = max(r["staleness"] for r in ranks)
        full = BAR_WIDTH * step // steps
        text = (
            f"{self.settings.kvstore:<10} [{'#' * full:-<{BAR_WIDTH}}] "
            f"{step:>{len(str(steps))}}/{steps} steps  loss {loss:.4f}  "
            f"{speed:5.0f} samples/s  staleness {stale}"
        )
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + text[:width].ljust(width), end="", flush=True)
        elif 10 * step // steps > self._shown:
            self._shown = 10 * step // steps
            print(text, flush=True)

    def close(self) -> None:
        """End the line."""
        if self._is_terminal and self.latest:
            print(flush=True)


def run_job(settings: Settings, folder: Path) -> Outcome:
    """Run a scheduler, servers and workers on this machine, and draw its progress."""
    text = json.dumps(dataclasses.asdict(settings))
    job = commands.LocalJob(
        settings.num_workers,
        settings.num_servers,
        (sys.executable, str(WORKER), str(folder), text),
        stock_servers=settings.kvstore == "dist_sync",
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
    return summarise(settings, progress.latest, folder)


def summarise(
    settings: Settings, ranks: dict[int, dict[str, Any]], folder: Path
) -> Outcome:
    """Compare what the ranks left."""
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
        seconds=max(r["seconds"] for r in ranks.values()),
    )


def show(outcomes: list[Outcome]) -> None:
    """Print the table of the jobs."""
    print("\nkvstore      accuracy   ranks differ by   staleness   steps   seconds")
    for o in outcomes:
        print(
            f"{o.kvstore:<10} {100 * o.accuracy:8.2f} %   {o.difference:15g}   "
            f"{o.staleness:9}   {o.steps:5}   {o.seconds:7.1f}"
        )
    print(
        "\nAccuracy: on test images, at the global weights. Within one machine there\n"
        "is no slow network to hide, so the seconds say little; see README.md.\n"
    )


def main(settings: Settings) -> int:
    """Run both jobs, show what came of them, and return the exit code."""
    print(
        "Training a small net on handwritten digits, on this machine.\n"
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
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name in ("num_workers", "num_servers", "epochs"):
        flag = "--" + name.replace("num_", "")
        options = {"default": getattr(Settings, name), "help": "how many"}
        parser.add_argument(flag, dest=name, type=positive, **options)
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(parse()))
    except KeyboardInterrupt:
        sys.exit("\ndemo: interrupted")
