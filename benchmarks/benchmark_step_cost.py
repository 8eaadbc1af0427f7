"""What a step costs apart from the network: host and server time, memory, start-up.

Jobs train without computing, one step after the other, so that all that is used is
the step's own. Processor time counts, not the time that passes: it hardly depends on
what else the machine does. Networks have MXNet's default settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, Mapping, Sequence

import report
import step_cost_plot
from interleave import interleaved
from overlap_goals import table_of_goals
from step_cost_fit import Line, fit_sweep, fit_table
from step_cost_goals import Measured, check_goals
from step_cost_imports import measure_imports
from step_cost_job import links_work, run_job
from step_cost_presets import (
    IMPORT,
    KEYS,
    KINDS,
    LAYOUT,
    PRESETS,
    SIZES,
    Section,
    Settings,
)
from step_cost_rows import (
    Results,
    cost_table,
    failures,
    layout_table,
    rows_of,
    start_table,
)
from systems import WARMUP_STEPS

NO_LINKS = (
    "This machine does not let us count bytes on links of our own: the layout is what "
    "the stores plan to send."
)


def run(sections: Sequence[Section]) -> dict[str, list[dict[str, Any]]]:
    """Make all jobs of all sections; a line for each."""
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for section in sections:
        done = outcomes[section.name] = []
        counts = [(system, section.repetitions) for system in section.systems]
        for job in interleaved(counts, section.make):
            done.append(run_job(job))
            print(f"  {section.name}: {progress(done[-1])}", flush=True)
    return outcomes


def progress(outcome: Mapping[str, Any]) -> str:
    """A job in a line."""
    job, what = outcome["job"], outcome["status"]
    if what == "ok":
        figures = outcome["figures"]
        what = f"{figures['cpu_ms']:.1f} ms CPU, {figures['step_ms']:.1f} ms"
    return f"{job['system']}, job {job['repetition'] + 1}: {what}"


def fit(sections: Sequence[Section], rows: Results) -> dict[str, dict[str, Line]]:
    """The straight lines of both sweeps: processor time of all roles in a step."""
    fits = {}
    for kind, count in ((SIZES, "num_numbers"), (KEYS, "num_keys")):
        points = {s.name: s.to_json()[count] for s in sections if s.kind == kind}
        fits[kind] = fit_sweep(points, rows, "cpu_ms")
    return fits


def show(measured: Measured, checks: list[dict[str, Any]] | None) -> None:
    """Print the tables."""
    layout = {n: r for n, r in measured.rows.items() if n.split()[0] == LAYOUT}
    others = {n: r for n, r in measured.rows.items() if n not in layout}
    tables = [layout_table(layout)] if layout else []
    tables += [cost_table(others), start_table(others)] if others else []
    tables += [fit_table(measured.fits)] if any(measured.fits.values()) else []
    if measured.imports:
        added = measured.imports["added_s"], measured.imports["added_cpu_s"]
        text = "import odsgd_kvstore adds {:.3f} s ({:.3f} s CPU) to import mxnet"
        tables.append(text.format(*added))
    tables += failures(measured.rows)
    tables += [table_of_goals(checks)] if checks else []
    print("", *tables, sep="\n\n")


def parse(arguments: list[str] | None = None) -> tuple[str, list[str], Path]:
    """Return the preset, the kinds of sections, and where the results go."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = functools.partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--preset", choices=list(PRESETS), default="smoke", help="what to measure")
    many: dict[str, Any] = {"action": "append", "choices": KINDS, "metavar": "KIND"}
    add("--only", **many, help=f"of the preset, only this: {', '.join(KINDS)}")
    folder = {"type": Path, "default": report.DEFAULT_FOLDER, "metavar": "FOLDER"}
    add("--output", **folder, help="for the results")
    options = parser.parse_args(arguments)
    kinds = getattr(options, "only", list(KINDS))
    return options.preset, kinds, options.output / f"step-cost-{options.preset}"


def main(settings: Settings, kinds: Sequence[str], path: Path) -> int:
    """Measure, print and write; return 1 if a job failed.

    Parameters
    ----------
    settings : Settings
        What to measure.
    kinds : sequence of str
        Of the sections to measure.
    path : Path
        Of the results, without a suffix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sections = [section for section in settings.sections() if section.kind in kinds]
    if any(section.job.rate for section in sections) and not links_work():
        print(NO_LINKS)
        sections = [without_links(section) for section in sections]
    outcomes = run(sections)
    rows = {name: rows_of(done) for name, done in outcomes.items()}
    count = settings.import_repetitions if IMPORT in kinds else 0
    imports = measure_imports(count) if count else {}
    measured = Measured(rows, imports, fit(sections, rows))
    checks = check_goals(measured)
    show(measured, checks if settings.network == "resnet50" else None)
    content = {
        **report.provenance(),
        "algorithm_warmup_steps": WARMUP_STEPS,
        "settings": dataclasses.asdict(settings),
        "sections": {section.name: section.to_json() for section in sections},
        "rows": to_json(rows),
        "imports": imports,
        "fits": to_json(measured.fits),
        "goals": checks,
        "jobs": outcomes,
    }
    report.write_json(path.with_suffix(".json"), content)
    step_cost_plot.draw(rows, measured.fits, path.with_suffix(".png"))
    print(f"\nWritten: {path}.json, {path}.png")
    return int(bool(failures(rows)))


def without_links(section: Section) -> Section:
    """The same jobs with ipc."""
    return dataclasses.replace(section, job=dataclasses.replace(section.job, rate=""))


def to_json(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Dataclasses, by two names, as dicts."""
    return {
        name: {inner: dataclasses.asdict(value) for inner, value in values.items()}
        for name, values in results.items()
    }


if __name__ == "__main__":
    preset, only, output = parse()
    try:
        sys.exit(main(PRESETS[preset], only, output))
    except KeyboardInterrupt:
        sys.exit("\nbenchmark_step_cost: interrupted")
