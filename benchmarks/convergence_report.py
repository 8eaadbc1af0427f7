"""The report of benchmark_convergence.py: printed, and as a page of Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import convergence_plot
from convergence_claims import check_claims, claims_table, claims_text
from convergence_sections import Section, by_section, tables_of
from convergence_store import Contents, Result
from convergence_tables import Table

PAGE = "report.md"
ABOUT = """\
Written by `benchmark_convergence.py` from the results beside it; `--report` writes it \
anew.

Accuracies are on the test images, at the global weights after the last step. 'minus \
dist_sync' is the mean difference between runs of equal setting and seed, in points, \
with its standard error; intervals are Student's. A training has failed if its \
accuracy is below twice that of guessing; it counts with the accuracy it has. Training \
losses are those of the batches, at the weights at which the gradients were computed.

Pairs of one seed share first weights and data order, also in different settings, so \
they are not fully independent; and settings with a wide spread widen the pooled \
interval. Look at the settings, too."""

ABOUT_CLAIMS = """\
'so far': some of the preset's runs are still missing. The order of methods is four \
comparisons of means: it is 'as predicted' if all of them are and each differs by two \
standard errors at least, 'NOT as predicted' if one is the other way by so much, else \
'within noise'. It is checked where a simulation had predicted it."""


def publish(
    contents: Contents, folder: Path, chosen: Collection[Section] | None
) -> list[Path]:
    """Draw and print the chosen sections, and write the page of all results.

    Parameters
    ----------
    contents : Contents
        Of the folder, with one result at least.
    folder : Path
        Of the results.
    chosen : collection of Section, optional
        None for all.

    Returns
    -------
    list of Path
        What was written.
    """
    written: list[Path] = []
    draws = convergence_plot.is_available()
    page = [f"# Convergence\n\n{ABOUT}\n\n{origins(contents.results.values())}"]
    checks = check_claims(contents.results.values())
    page.append(f"## Claims\n\n{ABOUT_CLAIMS}\n\n{claims_table(checks).markdown()}")
    for section, results in by_section(contents.results.values()).items():
        tables = tables_of(section, results)
        if chosen is None or section in chosen:
            if draws:
                written += convergence_plot.draw(section, results, folder)
            print_section(section, tables)
        page += in_markdown(section, tables, folder)
    print(f"\n{claims_text(checks)}", flush=True)
    left_out = not_counted(contents)
    if left_out:
        print("\nNot counted:\n" + "\n".join(left_out), flush=True)
        page.append("## Not counted\n\n" + _as_list(left_out))
    path = folder / PAGE
    path.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    return [path, *written]


def print_section(section: Section, tables: Iterable[Table]) -> None:
    """A section for a terminal."""
    heading = f"{section.title}\n{'=' * len(section.title)}\n{section.about}"
    print("\n" + "\n\n".join([heading, *(t.text() for t in tables)]), flush=True)


def in_markdown(section: Section, tables: Iterable[Table], folder: Path) -> list[str]:
    """A section in paragraphs of a page."""
    return [
        f"## {section.title}\n\n{section.about}",
        *(table.markdown() for table in tables),
        *(f"![{name}]({name})" for name in pictures(section, folder)),
    ]


def pictures(section: Section, folder: Path) -> list[str]:
    """Names of a section's pictures that are there."""
    names = [curves.name for curves in convergence_plot.curves_of(section)]
    names.append("differences")
    files = [f"{section.slug}-{name}.png" for name in names]
    return [file for file in files if (folder / file).is_file()]


def origins(results: Collection[Result]) -> str:
    """Where and with what the results were measured, as a list."""
    commits, versions, machines, loads = set(), set(), set(), set()
    for result in results:
        origin = result.origin
        commits.add(str(origin.get("commit") or "unknown"))
        for name, version in _mapping(origin.get("versions")).items():
            versions.add(f"{name} {version}")
        machine = _mapping(origin.get("machine"))
        if machine:
            machines.add(f"{machine.get('processor')}, {machine.get('cores')} cores")
        if isinstance(machine.get("load"), (int, float)):
            loads.add(machine["load"])
    lines = [f"{len(results)} runs", f"commits: {_listed(commits)}"]
    lines += [f"versions: {_listed(versions)}", f"machines: {_listed(machines)}"]
    if loads:
        lines.append(f"load of the machine: {min(loads):.1f} to {max(loads):.1f}")
    return _as_list(lines)


def not_counted(contents: Contents) -> list[str]:
    """Lines about broken jobs without a result, and about unreadable files."""
    lines = []
    for run, reason in contents.failed.items():
        last = (reason.strip().splitlines() or ["no reason is known"])[-1]
        lines.append(f"{run.name}: the job broke: {last}")
    return lines + [
        f"{name}: not readable as a result; it was left as it is"
        for name in contents.unreadable
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    """What a file says, if it can be looked up in: provenance is not checked."""
    return value if isinstance(value, Mapping) else {}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "unknown"


def _as_list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
