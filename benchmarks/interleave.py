"""Runs launches of several systems in turn, and keeps what was measured in a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import report
from measure import Launch, run_launch


def interleaved(
    systems: Sequence[tuple[str, int]], make: Callable[[str, int], Launch]
) -> Iterator[Launch]:
    """All repetitions of all systems; the order is reversed every other time.

    So neither a slow change of the machine's load nor the order favours a system.

    Parameters
    ----------
    systems : sequence of (str, int)
        Names, and how often each is measured.
    make : callable
        Takes a system's name and the number of the repetition.
    """
    for repetition in range(max(count for _, count in systems)):
        names = [name for name, count in systems if repetition < count]
        for name in reversed(names) if repetition % 2 else names:
            yield make(name, repetition)


class Journal:
    """A file with a line of JSON for each launch that has been made.

    Parameters
    ----------
    path : Path
        Made with the first line.
    resume : bool
        Take the figures that are there instead of measuring them again.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if not resume:
            path.unlink(missing_ok=True)
        elif path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                outcome = _parsed(line)
                if outcome.get("status") == "ok":
                    self._known[_key(outcome["launch"])] = outcome
        self.num_resumed = 0
        self._commit = report.commit()

    def run(self, launch: Launch) -> dict[str, Any]:
        """Return what a launch came to: measured now, or found in the file."""
        key = _key(dataclasses.asdict(launch))
        if key in self._known:
            self.num_resumed += 1
            return self._known[key]
        outcome = {"commit": self._commit, **run_launch(launch)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")
        self._known[key] = outcome
        return outcome


def _key(launch: dict[str, Any]) -> str:
    return json.dumps(launch, sort_keys=True)


def _parsed(line: str) -> dict[str, Any]:
    """A line's content; nothing for one that an interruption cut off."""
    try:
        return json.loads(line)
    except ValueError:
        return {}
