"""What every role does in two steps of dist_sync, and of dist_odsgd below it.

Runs one job of each on links of a limited rate, with an emulated computation that
takes about as long as the communication, under MXNet's profiler on workers and servers.
Writes all profiles as one Chrome trace, and a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import report
import timeline_plot
from emulated import NETWORKS
from measure import link_ms
from overlap_worker import PREFIX
from systems import BASELINE, OURS, SYSTEMS, WARMUP_STEPS
from timeline_links import LinkSampler
from timeline_trace import Timeline, check_clocks, chrome_trace, read_spans
from timeline_worker import WorkerSettings, server_file, worker_file

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import commands, local, processes
from odsgd_kvstore.launch.bandwidth import parse_rate

WORKER = Path(__file__).resolve().with_name("timeline_worker.py")
SHOWN = (BASELINE, OURS)  # from top to bottom


@dataclass(frozen=True)
class Settings:
    """The jobs; they differ in the system only.

    Parameters
    ----------
    network : str
        A name in `NETWORKS`.
    rate : str
        Of each role's link in each direction, such as '200mbit'.
    ratio : float
        T_link over T_compute; sets the time of the computation.
    num_untimed_iters, num_steps : int
        Steps before the profile, and in it: at least 4, of which the first and the
        last are not looked at.
    """

    network: str = "mlp8"
    rate: str = "200mbit"
    ratio: float = 1.0
    num_workers: int = 2
    num_servers: int = 2
    num_untimed_iters: int = 3
    num_steps: int = 10
    timeout_s: float = 300.0

    @property
    def compute_ms(self) -> float:
        """T_compute that gives the ratio."""
        counts = self.num_workers, self.num_servers
        return link_ms(NETWORKS[self.network], *counts, self.rate) / self.ratio

    def job(self, system: str) -> commands.Job:
        """The job of one system."""
        names = [field.name for field in dataclasses.fields(WorkerSettings)]
        values = {"system": system, "compute_ms": self.compute_ms, **vars(self)}
        text = json.dumps({name: values[name] for name in names})
        return commands.Job(
            self.num_workers,
            self.num_servers,
            (sys.executable, str(WORKER), text),
            stock_servers=SYSTEMS[system].servers != "own",
            env=SYSTEMS[system].environment(NETWORKS[self.network]),
            bandwidth=self.rate,
        )


PRESETS = {
    "smoke": Settings(),
    "goals": Settings(num_untimed_iters=10, num_steps=30),
}


class Recorder:
    """Takes the workers' marks, and samples the links between them."""

    def __init__(self) -> None:
        self.marks_us: dict[str, list[float]] = {"begin": [], "end": []}
        self.lines: list[str] = []
        self.links: LinkSampler | None = None

    def on_started(self, pids: dict[str, int]) -> None:
        """Know the roles."""
        roles = {name: pid for name, pid in pids.items() if name != "scheduler"}
        self.links = LinkSampler(roles)

    def on_line(self, role: Any, text: str) -> None:
        """Take a line that a role wrote."""
        if not text.startswith(PREFIX):
            self.lines.append(f"[{role.name}] {text}")
            return
        mark = json.loads(text[len(PREFIX) :])
        marks = self.marks_us[mark["event"]]
        marks.append(mark["clock_us"])
        if mark["event"] == "begin" and len(marks) == 1:
            self.links.start()
        elif mark["event"] == "end" and len(marks) == len(self.marks_us["begin"]):
            self.links.stop()


def run_job(system: str, settings: Settings) -> Timeline:
    """Run the job of a system; return what its roles did."""
    recorder = Recorder()
    roles, sockets = local.new_job(settings.job(system), os.environ)
    with tempfile.TemporaryDirectory() as folder:
        with working_folder(folder):
            result = processes.run_roles(
                roles,
                on_line=recorder.on_line,
                on_started=recorder.on_started,
                timeout=settings.timeout_s,
                sockets=sockets,
            )
        if result.exit_code:
            raise SystemExit(
                "\n".join([*recorder.lines, f"timeline: {result.message}"])
            )
        timeline = read_timeline(system, settings, Path(folder))
    recorder.links.stop()
    timeline.links = recorder.links.samples
    marks_us = recorder.marks_us
    check_clocks(timeline, min(marks_us["begin"]), max(marks_us["end"]))
    return timeline


@contextlib.contextmanager
def working_folder(folder: str) -> Iterator[None]:
    """Start processes in `folder`: a server writes its profile into its own only."""
    before, path = os.getcwd(), os.environ.get("PYTHONPATH")
    if path:  # A relative entry would mean another place.
        places = [os.path.abspath(place) for place in path.split(os.pathsep) if place]
        os.environ["PYTHONPATH"] = os.pathsep.join(places)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def read_timeline(system: str, settings: Settings, folder: Path) -> Timeline:
    """The profiles that the roles of a job left in `folder`."""
    files = {f"worker {i}": worker_file(i) for i in range(settings.num_workers)}
    files.update({f"server {i}": server_file(i) for i in range(settings.num_servers)})
    num_layers = len(NETWORKS[settings.network].layers)
    spans = {
        role: read_spans(folder / file, num_layers) for role, file in files.items()
    }
    return Timeline(system, parse_rate(settings.rate), spans, {})


def parse(arguments: list[str] | None = None) -> tuple[Settings, Path]:
    """Return the settings of the command line, and where the results go."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="smoke", help="how many steps")
    add("--network", choices=list(NETWORKS), default=Settings.network, help="to train")
    link = {"type": rate, "default": Settings.rate}
    add("--rate", **link, help="of each link, such as 200mbit")
    folder = {"type": Path, "default": report.DEFAULT_FOLDER, "metavar": "FOLDER"}
    add("--output", **folder, help="for the results")
    options = parser.parse_args(arguments)
    settings = dataclasses.replace(
        PRESETS[options.preset], network=options.network, rate=options.rate
    )
    return settings, options.output.absolute() / f"timeline-{options.preset}"


def rate(text: str) -> str:
    """A rate, for argparse."""
    try:
        parse_rate(text)
    except LaunchError as error:
        raise argparse.ArgumentTypeError(as_ours(error)) from None
    return text


def as_ours(error: LaunchError) -> str:
    """The launcher's message, in this program's words: it needs the links."""
    text = str(error).replace(", or leave --emulate-bandwidth out", "")
    return text.replace("--emulate-bandwidth", "--rate")


def figures(timelines: list[Timeline]) -> dict[str, dict[str, float]]:
    """What can be said in numbers, by system."""
    return {
        timeline.system: {
            "step_ms": timeline.step_ms(),
            "hidden_share": timeline.hidden_share(),
        }
        for timeline in timelines
    }


def main(settings: Settings, path: Path) -> int:
    """Run the jobs, write what they did, and return the exit code.

    Parameters
    ----------
    settings : Settings
    path : Path
        Of the results, without a suffix.
    """
    network, compute_ms = NETWORKS[settings.network], settings.compute_ms
    print(
        f"{settings.num_workers} workers, {settings.num_servers} servers, links "
        f"{settings.rate}; {network.name}: {network.payload_bytes / 1e6:.1f} MB; "
        f"computation {compute_ms:.1f} ms",
        flush=True,
    )
    timelines = [run_job(system, settings) for system in SHOWN]
    found = figures(timelines)
    rows = [
        [system, f"{row['step_ms']:.1f}", f"{100 * row['hidden_share']:.0f} %"]
        for system, row in found.items()
    ]
    header = ["system", "step, ms", "communication while computing"]
    print(f"\n{report.table(header, rows)}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    trace, picture = path.with_suffix(".trace.json"), path.with_suffix(".png")
    trace.write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")
    timeline_plot.draw(timelines, picture)
    content = {
        **report.provenance(),
        "algorithm_warmup_steps": WARMUP_STEPS,
        "settings": {**dataclasses.asdict(settings), "compute_ms": compute_ms},
        "figures": found,
    }
    report.write_json(path.with_suffix(".json"), content)
    print(f"Trace (for chrome://tracing or ui.perfetto.dev): {trace}")
    print(f"Picture: {picture}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*parse()))
    except LaunchError as error:
        sys.exit(f"timeline: {as_ours(error)}")
    except KeyboardInterrupt:
        sys.exit("\ntimeline: interrupted")
