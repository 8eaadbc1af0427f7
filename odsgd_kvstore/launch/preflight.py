"""Judges what the hosts say of themselves, before any role starts.

A pure function: nothing is asked for here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

OLDEST_PYTHON, NEWEST_PYTHON = (3, 8), (3, 12)
MOST_APART_S = 5.0
MOST_LETTERS = 600
THIS_MACHINE = "this machine"
SAME = (
    "make the same virtual environment there, at the same path (--sync-dst-dir copies "
    "the current folder; the folders in PYTHONPATH are looked for on every host)"
)
_LIBRARY = re.compile(r"(lib[^\s:/]*\.so[^\s:]*): cannot open shared object file")


def judge(
    reports: Sequence[Mapping],
    labels: Sequence[str],
    sent: Sequence[tuple[float, float]],
    stock_servers: bool,
) -> tuple[list[str], str]:
    """Say of each host whether it can take part.

    Parameters
    ----------
    reports : sequence of mapping
        What `probe.report` gives. One with 'error' instead says why there is none.
    labels : sequence of str
        Of each host, for people.
    sent : sequence of (float, float)
        When the launcher asked each host, and when it had the answer, by its own
        clock.
    stock_servers : bool
        The servers are MXNet's own, so this package need not be there.

    Returns
    -------
    lines : list of str
        One for each host; further ones are warnings.
    error : str
        What to raise: the first host that can't, and what to do; '' if all can.
    """
    names = ("mxnet",) if stock_servers else ("mxnet", "package")
    found = [_problem(report, stock_servers) for report in reports]
    sound = [pair for pair, problem in zip(zip(reports, labels), found) if not problem]
    usual = {name: _usual(sound, name) for name in ("python", *names)}
    problems = [
        _short(problem or _difference(report, usual))
        for report, problem in zip(reports, found)
    ]
    width = max((len(label) for label in labels), default=0)
    lines = [
        f"{label:{width}}  " + (f"FAILED  {problem}" if problem else _describe(report))
        for label, report, problem in zip(labels, reports, problems)
    ]
    failed = [f"{label}: {text}" for label, text in zip(labels, problems) if text]
    error = failed[0] if failed else ""
    if len(failed) > 1:
        error += (
            f" ({len(failed)} of {len(labels)} hosts failed; the lines above say why)"
        )
    return lines + list(_clock_warning(reports, labels, sent)), error


def _describe(report: Mapping) -> str:
    """What a host that can take part has."""
    cores = report["cores"]
    return (
        f"ok  Python {report['python']}, MXNet {report['mxnet']}, "
        f"{cores} core{'s' if cores > 1 else ''}"
    )


def _short(text: str) -> str:
    """On one line."""
    text = " ".join(text.split())
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 3] + "..."


def _problem(report: Mapping, stock_servers: bool) -> str:
    """Why a host can't take part, whatever the others have; '' if it can."""
    if report.get("error"):
        return report["error"]
    if report["cwd_error"]:
        return (
            f"{report['cwd_error']}; start in a folder that every host has, or copy it "
            "there with --sync-dst-dir DIR"
        )
    problem = _python_problem(report) or _mxnet_problem(report)
    if not stock_servers:
        problem = problem or _package_problem(report)
    if not problem and report["program_error"]:
        problem = f"{report['program_error']}; install it there, or give its path there"
    if not problem and report["ports_error"]:
        problem = f"{report['ports_error']}; give a wider --port-range"
    return problem


def _python_problem(report: Mapping) -> str:
    """Why the interpreter can't be used."""
    found = _minor(report["python"])
    if report["python"] and not OLDEST_PYTHON <= found <= NEWEST_PYTHON:
        return f"it has Python {report['python']}, and MXNet needs 3.8 to 3.12; {SAME}"
    return f"{report['python_error']}; {SAME}" if report["python_error"] else ""


def _mxnet_problem(report: Mapping) -> str:
    """Why MXNet can't be used."""
    error, python = report["mxnet_error"], report["executable"]
    library = _LIBRARY.search(error)
    if "No module named 'mxnet'" in error:
        return f"MXNet is not installed for {python}; {SAME}"
    if library:
        return (
            f"MXNet needs the library {library.group(1)}, which is not found; install "
            "it there, or put its folder into LD_LIBRARY_PATH, which is forwarded"
        )
    if error:
        advice = report["package_error"]
        if advice.startswith("EnvironmentNotSupported: "):  # Says what to do.
            return advice.partition(": ")[2]
        return f"MXNet cannot be imported by {python} ({error}); {SAME}"
    if not report["dist_kvstore"]:
        return (
            f"its MXNet {report['mxnet']} was built without DIST_KVSTORE, and can't "
            "train on several hosts; install a build that has it, such as "
            "'pip install odsgd-kvstore[cpu]'"
        )
    return ""


def _package_problem(report: Mapping) -> str:
    """Why this package can't be used."""
    error, python = report["package_error"], report["executable"]
    if "No module named 'odsgd_kvstore'" in error:
        return f"odsgd_kvstore is not installed for {python}; {SAME}"
    if error:
        return f"odsgd_kvstore cannot be imported by {python} ({error}); {SAME}"
    return ""


def _difference(report: Mapping, usual: Mapping) -> str:
    """A version that is not the one that most hosts have."""
    titles = {"python": "Python", "mxnet": "MXNet", "package": "odsgd_kvstore"}
    for name, (version, label, shown) in usual.items():
        if _comparable(report, name) != version:
            return (
                f"it has {titles[name]} {report[name]}, and {label} has {shown}; all "
                f"hosts need the same version: {SAME}"
            )
    return ""


def _usual(sound: Sequence[tuple[Mapping, str]], name: str) -> tuple[object, str, str]:
    """The version that most hosts have; the first host with it; as that shows it."""
    versions = [_comparable(report, name) for report, _ in sound]
    if not versions:
        return None, "", ""
    version = Counter(versions).most_common(1)[0][0]  # Of equals the first.
    report, label = sound[versions.index(version)]
    return version, label, report[name]


def _comparable(report: Mapping, name: str) -> object:
    """What has to be equal: of Python, major and minor version."""
    return _minor(report["python"]) if name == "python" else report[name]


def _minor(version: str) -> tuple[int, ...]:
    """(3, 11) of '3.11.7'."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _clock_warning(
    reports: Sequence[Mapping],
    labels: Sequence[str],
    sent: Sequence[tuple[float, float]],
) -> Iterator[str]:
    """A line about the two clocks that are furthest apart, if that is far."""
    offsets = [(0.0, THIS_MACHINE)]
    for report, label, (before, after) in zip(reports, labels, sent):
        if report.get("time"):
            # The middle of the way there and back; the report takes seconds itself.
            started = report.get("started", report["time"])
            offset = (started - before + report["time"] - after) / 2
            offsets.append((offset, label))
    (slow, behind), (fast, ahead) = min(offsets), max(offsets)
    if fast - slow > MOST_APART_S:
        yield (
            f"warning: the clock of {ahead} is {fast - slow:.0f} s ahead of that of "
            f"{behind}, so times in their logs are hard to compare; set the clocks (NTP)"
        )
