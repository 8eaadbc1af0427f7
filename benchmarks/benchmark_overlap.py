"""How much of the communication each way to train hides behind the computation.

Each job trains an emulated network on links of a limited rate. The bound of a step is
the longer of its computation and of its uncompressed payload on the busiest link.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import signal
import sys
from pathlib import Path
from typing import Any

import overlap_plot
import report
from emulated import NETWORKS, find_network
from interleave import Journal, interleaved
from overlap_goals import check_goals, table_of_goals
from overlap_presets import Setting, presets
from overlap_rows import Rows, rows_of, table_of
from systems import SYSTEMS, WARMUP_STEPS

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.bandwidth import parse_rate

NO_LIMIT = "none"


def run(settings: list[Setting], journal: Journal) -> dict[str, list[dict[str, Any]]]:
    """Make all launches of all settings, and print a table after each setting."""
    report.warn_if_busy()
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for setting in settings:
        print(f"\n{describe(setting)}", flush=True)
        done = outcomes[setting.name] = []
        counts = [(name, setting.count(name)) for name in setting.systems]
        for launch in interleaved(counts, setting.launch):
            if launch.system in unavailable(done):
                continue
            done.append(journal.run(launch))
            print(f"  {progress(done[-1])}", flush=True)
        print(f"\n{table_of(rows_of(done))}", flush=True)
    return outcomes


def unavailable(outcomes: list[dict[str, Any]]) -> set[str]:
    """Systems that another launch would not make available."""
    missing = [o for o in outcomes if o["status"] == "not available"]
    return {outcome["launch"]["system"] for outcome in missing}


def describe(setting: Setting) -> str:
    """A setting in words."""
    network = find_network(setting.network)
    return (
        f"{setting.name}: {len(network.shapes)} arrays, "
        f"{network.payload_bytes / 1e6:.1f} MB, {setting.num_workers} workers, "
        f"{setting.num_servers} servers, links {setting.rate or 'without limit'}, "
        f"computation {setting.compute_ms:.1f} ms"
    )


def progress(outcome: dict[str, Any]) -> str:
    """A launch in a line."""
    launch = outcome["launch"]
    what = f"{outcome['step_ms']:.1f} ms" if "step_ms" in outcome else outcome["status"]
    return f"{launch['system']}, launch {launch['repetition'] + 1}: {what}"


def parse(arguments: list[str] | None = None) -> tuple[list[Setting], Path]:
    """Return the settings of the command line, and where the results go."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = functools.partial(parser.add_argument, default=argparse.SUPPRESS)
    many: dict[str, Any] = {"action": "append", "metavar": "NAME"}
    add("--preset", choices=list(presets()), default="smoke", help="what to measure")
    systems, networks = (
        f"{', '.join(names)}; repeatable" for names in (SYSTEMS, NETWORKS)
    )
    add("--system", choices=list(SYSTEMS), **many, help=f"these only: {systems}")
    add("--network", choices=list(NETWORKS), **many, help=f"these only: {networks}")
    add("--repetitions", type=positive, metavar="N", help="launches of each system")
    add("--rate", type=rate, help=f"of each link, such as 200mbit, or {NO_LIMIT!r}")
    folder = {"type": Path, "default": report.DEFAULT_FOLDER, "metavar": "FOLDER"}
    add("--output", **folder, help="for the results")
    options = parser.parse_args(arguments)
    settings = chosen(options)
    if not settings:
        parser.error(f"--preset {options.preset} has no setting with this --network")
    return settings, options.output / f"overlap-{options.preset}"


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def rate(text: str) -> str:
    """A rate, '' for no limit."""
    if text == NO_LIMIT:
        return ""
    try:
        parse_rate(text)
    except LaunchError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def chosen(options: argparse.Namespace) -> list[Setting]:
    """The preset's settings, as far as the options leave them as they are."""
    change: dict[str, Any] = {}
    if "system" in options:
        change["systems"] = tuple(options.system)
    if "repetitions" in options:
        change.update(repetitions=options.repetitions, peer_repetitions=None)
    if "rate" in options:
        change["rate"] = options.rate
    networks = options.network if "network" in options else list(NETWORKS)
    settings = presets()[options.preset]
    return [
        dataclasses.replace(setting, **change)
        for setting in settings
        if setting.network in networks
    ]


def main(settings: list[Setting], path: Path) -> int:
    """Measure, print and write; return 1 if a launch failed.

    Parameters
    ----------
    settings : list of Setting
        What to measure.
    path : Path
        Of the results, without a suffix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    preset = path.name.rpartition("-")[2]
    journal = Journal(path.with_suffix(".jsonl"), resume=preset == "full")
    outcomes = run(settings, journal)
    results = {name: rows_of(done) for name, done in outcomes.items()}
    goals = check_goals(results)
    content = {
        **report.provenance(),
        "algorithm_warmup_steps": WARMUP_STEPS,
        "num_resumed_launches": journal.num_resumed,
        "settings": {setting.name: setting.to_json() for setting in settings},
        "rows": {name: as_dicts(rows) for name, rows in results.items()},
        "goals": goals,
        "launches": outcomes,
    }
    report.write_json(path.with_suffix(".json"), content)
    drawn = overlap_plot.draw(results, path.with_suffix(".png"))
    if preset != "smoke":
        print(f"\n{table_of_goals(goals)}")
    if journal.num_resumed:
        print(f"\n{journal.num_resumed} launches were in {path}.jsonl already.")
    picture = f", {path}.png" if drawn else ""
    print(f"\nWritten: {path}.json{picture}, {path}.jsonl (a line for each launch)")
    done = [outcome for group in outcomes.values() for outcome in group]
    return int(any(outcome["status"] == "failed" for outcome in done))


def as_dicts(rows: Rows) -> dict[str, dict[str, Any]]:
    """Rows, for JSON."""
    return {system: dataclasses.asdict(row) for system, row in rows.items()}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(*parse()))
    except LaunchError as error:
        sys.exit(f"benchmark_overlap: {error} (here: --rate {NO_LIMIT})")
    except KeyboardInterrupt:
        sys.exit("\nbenchmark_overlap: interrupted")
