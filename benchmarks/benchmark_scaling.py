"""How a step's time grows with the number of workers, on links of a limited rate.

Each worker trains the same emulated network at the same speed, so a step takes as long
as with one worker until the servers' links are busy all the time; then as long as the
busiest of them needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, Mapping, Sequence

import report
import scaling_plot
from emulated import NETWORKS
from interleave import Journal, interleaved
from overlap_goals import table_of_goals
from overlap_rows import rows_of
from scaling_rows import Points, check_goals, table_of
from scaling_sweeps import PRESETS, Sweep
from systems import WARMUP_STEPS

from odsgd_kvstore.errors import LaunchError

Outcomes = Mapping[int, Sequence[Mapping[str, Any]]]  # by number of workers


def run(sweep: Sweep, journal: Journal) -> dict[int, list[dict[str, Any]]]:
    """Make all launches of a sweep; points and systems are interleaved."""
    print(f"\n{describe(sweep)}", flush=True)
    outcomes: dict[int, list[dict[str, Any]]] = {n: [] for n in sweep.num_workers}
    for launch in interleaved(sweep.counts, sweep.launch):
        outcome = journal.run(launch)
        outcomes[launch.num_workers].append(outcome)
        print(f"  {progress(outcome)}", flush=True)
    return outcomes


def describe(sweep: Sweep) -> str:
    """A sweep in words."""
    payload = NETWORKS[sweep.network].payload_bytes / 1e6
    return (
        f"{sweep.name}: {sweep.network}, {payload:.1f} MB, "
        f"{sweep.num_servers} servers, links {sweep.rate}, "
        f"computation {sweep.compute_ms:.1f} ms"
    )


def progress(outcome: Mapping[str, Any]) -> str:
    """A launch in a line."""
    launch = outcome["launch"]
    what = f"{outcome['step_ms']:.1f} ms" if "step_ms" in outcome else outcome["status"]
    return (
        f"{launch['num_workers']} workers, {launch['system']}, "
        f"launch {launch['repetition'] + 1}: {what}"
    )


def parse(arguments: list[str] | None = None) -> tuple[str, Path]:
    """Return the preset, and where the results go."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="smoke", help="what to measure")
    folder = {"type": Path, "default": report.DEFAULT_FOLDER, "metavar": "FOLDER"}
    add("--output", **folder, help="for the results")
    options = parser.parse_args(arguments)
    return options.preset, options.output / f"scaling-{options.preset}"


def main(sweeps: Sequence[Sweep], path: Path, resume: bool, show_goals: bool) -> int:
    """Measure, print and write; return 1 if a launch failed.

    Parameters
    ----------
    sweeps : sequence of Sweep
        What to measure.
    path : Path
        Of the results, without a suffix.
    resume : bool
        Do not repeat launches that are in the journal beside them.
    show_goals : bool
        Print the goals; they are written in any case.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(path.with_suffix(".jsonl"), resume)
    by_name = {sweep.name: sweep for sweep in sweeps}
    outcomes: dict[str, Outcomes] = {}
    results: dict[str, Points] = {}
    for sweep in sweeps:
        done = outcomes[sweep.name] = run(sweep, journal)
        results[sweep.name] = {count: rows_of(group) for count, group in done.items()}
        print(f"\n{table_of(sweep, results[sweep.name])}", flush=True)
    checks = check_goals(by_name, results)
    content = {
        **report.provenance(),
        "algorithm_warmup_steps": WARMUP_STEPS,
        "num_resumed_launches": journal.num_resumed,
        "sweeps": {sweep.name: sweep.to_json() for sweep in sweeps},
        "rows": {name: to_json(points) for name, points in results.items()},
        "goals": checks,
        "launches": outcomes,
    }
    report.write_json(path.with_suffix(".json"), content)
    scaling_plot.draw(by_name, results, path.with_suffix(".png"))
    if show_goals:
        print(f"\n{table_of_goals(checks)}")
    print(f"\nWritten: {path}.json, {path}.png, {path}.jsonl (a line for each launch)")
    groups = [group for done in outcomes.values() for group in done.values()]
    return int(any(one["status"] != "ok" for group in groups for one in group))


def to_json(points: Points) -> dict[int, dict[str, Any]]:
    """Rows by number of workers and system."""
    return {
        count: {system: dataclasses.asdict(row) for system, row in rows.items()}
        for count, rows in points.items()
    }


if __name__ == "__main__":
    preset, output = parse()
    try:
        sys.exit(main(PRESETS[preset], output, preset == "full", preset != "smoke"))
    except LaunchError as error:
        sys.exit(f"benchmark_scaling: {error}")
    except KeyboardInterrupt:
        sys.exit("\nbenchmark_scaling: interrupted")
