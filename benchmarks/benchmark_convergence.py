"""What each way to train does to the accuracy, beside dist_sync: tables and plots.

Results are kept: a run that is stored is not made again, and --report makes tables and
plots of all that is stored.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import convergence_options
import report
from batches import DataError
from convergence_check import RunError, check_runs, check_same_data
from convergence_job import execute
from convergence_options import Options
from convergence_report import not_counted, publish
from convergence_run import Run
from convergence_sections import describe, section_of
from convergence_statistics import setting_of
from convergence_store import Contents, Result, Store
from datasets import CACHE

from odsgd_kvstore.errors import LaunchError


def main(options: Options) -> int:
    """Make the runs that are missing; print and write the report.

    Parameters
    ----------
    options : Options
        Of the command line.

    Returns
    -------
    int
        1 if a job broke.
    """
    store = Store(options.folder)
    if options.list_only:
        list_runs(options.runs, store.read())
        return 0
    num_broken = 0 if options.report_only else make_runs(options, store)
    contents = store.read()
    if not contents.results:
        print(without_result(contents, options.folder))
        return 1
    chosen = {section_of(run) for run in options.runs} or None
    written = publish(contents, options.folder, chosen)
    pictures = f", {len(written) - 1} pictures beside it" if written[1:] else ""
    print(f"\nWritten: {written[0]}{pictures}")
    print(f"Stored: {len(contents.results)} runs, a file of JSON for each")
    return int(num_broken > 0)


def without_result(contents: Contents, folder: Path) -> str:
    """Why there is nothing to report."""
    left_out = not_counted(contents)
    if not left_out:
        return f"There is no result in {folder}: run a preset first."
    return "\n".join([f"\nNothing in {folder} is the result of a run:", *left_out])


def list_runs(runs: Sequence[Run], contents: Contents) -> None:
    """Print the runs, and which of them are there already."""
    for run in runs:
        mark = "stored" if run in contents.results else "to run"
        print(f"{mark}  {in_words(run)}")
    print(about(runs, contents))


def about(runs: Sequence[Run], contents: Contents) -> str:
    """How many runs there are, and how many are stored."""
    num_stored = sum(run in contents.results for run in runs)
    return f"{num_stored} of {len(runs)} runs are stored already"


def make_runs(options: Options, store: Store) -> int:
    """Make all runs that are not stored; return how many jobs broke."""
    store.probe()
    contents = store.read()
    known = dict(contents.results)
    missing = [run for run in options.runs if run not in known]
    check_same_data(options.runs, known.values(), options.data, options.folder)
    check_runs(missing, options.data, options.folder / CACHE)
    if missing and options.is_timed:
        report.warn_if_busy()
    print(about(options.runs, contents), flush=True)
    num_broken = 0
    for i, run in enumerate(missing):
        if run in store.read().results:  # another benchmark has made it meanwhile
            continue
        outcome = make_run(run, options, store)
        if outcome["status"] == "ok":
            known[run] = Result.from_json(outcome)
        else:
            num_broken += 1
        number = len(options.runs) - len(missing) + i + 1
        left = in_time(remaining_s(missing[i + 1 :], known.values()))
        head = f"[{number}/{len(options.runs)}] {in_words(run)}"
        print(f"{head}: {came_to(outcome)}{left}", flush=True)
    return num_broken


def make_run(run: Run, options: Options, store: Store) -> dict[str, Any]:
    """Train, and keep what it came to."""
    origin = report.provenance()
    cache = options.folder / CACHE
    outcome = execute(run, options.data, cache, timeout_s=options.timeout_s)
    store.save(run, {**outcome, "provenance": origin})
    return outcome


def came_to(outcome: Mapping[str, Any]) -> str:
    """What a run came to, in words."""
    if outcome["status"] != "ok":
        return f"the job broke: {outcome['reason']}"
    return f"{100 * outcome['accuracy']:.2f} % in {outcome['seconds']:.1f} s"


def in_time(left_s: float) -> str:
    """The time that is left, in words."""
    if not left_s:
        return ""
    return f"; about {left_s / 60:.0f} min left" if left_s >= 90 else "; < 2 min left"


def remaining_s(runs: Sequence[Run], known: Collection[Result]) -> float:
    """How long runs will take: as like ones did, else as all did on average."""
    times: dict[tuple[Any, ...], list[float]] = {}
    for result in known:
        times.setdefault(_cost_of(result.run), []).append(result.wall_s)
    overall = [time for group in times.values() for time in group]
    groups = [times.get(_cost_of(run), overall) for run in runs]
    return sum(sum(group) / len(group) for group in groups if group)


def _cost_of(run: Run) -> tuple[Any, ...]:
    """What mainly decides how long a run takes."""
    names = ("dataset", "network", "num_workers", "epochs", "rate", "straggler_ms")
    return tuple(getattr(run, name) for name in names)


def in_words(run: Run) -> str:
    """A run in words."""
    return f"{describe(setting_of(run))}, {run.method}, seed {run.seed}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.stdout.reconfigure(errors="replace")
    asked = convergence_options.parse(about=__doc__)
    try:
        sys.exit(main(asked))
    except OSError as error:  # one of a write that fails does not know its file
        path = error.filename or asked.folder
        sys.exit(f"benchmark_convergence: {path}: {error.strerror or error}")
    except (DataError, LaunchError, RunError) as error:
        text = str(error).replace("--emulate-bandwidth", "--rate")
        sys.exit(f"benchmark_convergence: {text}")
    except KeyboardInterrupt:
        sys.exit("\nbenchmark_convergence: interrupted; what is done is kept")
