"""Keeps the results of benchmark_convergence.py: a file of JSON for each run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Mapping

import datasets
import numpy as np
from convergence_run import METHODS, Run

NO_RESULT = KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError
AT_LEAST_1 = ("num_workers", "num_servers", "epochs", "batch_size", "num_evaluations")
# As `Run` annotates its fields; a whole number may be written without a point.
TYPES = {"str": (str,), "int": (int,), "float": (float, int), "None": (type(None),)}


@dataclass(frozen=True, eq=False)
class Result:
    """What a run came to.

    Parameters
    ----------
    run : Run
        The training.
    accuracy : float
        At its end, in percent; nan if it is not known.
    num_steps : int
        Steps of each worker.
    seconds : float
        Of training, without start-up and evaluations.
    wall_s : float
        Of the whole job.
    losses : ndarray, shape (points, 2)
        Step, training loss; nan where it was not a finite number.
    evaluations : ndarray, shape (points, 4)
        Step, seconds, accuracy in percent, test loss.
    origin : mapping
        Where and how it was measured; `report.provenance`.
    data : str, optional
        Digest of the data, `datasets.digest`; None in older files.
    """

    run: Run
    accuracy: float
    num_steps: int
    seconds: float
    wall_s: float
    losses: np.ndarray
    evaluations: np.ndarray
    max_staleness: int | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Result:
        """Of what a file holds.

        Raises
        ------
        KeyError, OverflowError, TypeError, ValueError
            The content is not that of a run that ended.
        """
        run = run_from_json(content["run"])
        evaluations = _points(content["evaluations"], 4)
        evaluations[:, 2] *= 100
        accuracy = _number(content["accuracy"])
        if accuracy < 0 or accuracy > 1:
            raise ValueError(f"accuracy is {accuracy}; it is from 0 to 1.")
        origin = content.get("provenance")
        return cls(
            run=run,
            accuracy=100 * accuracy,
            num_steps=_checked("num_steps", content["num_steps"], "int"),
            seconds=_number(content["seconds"]),
            wall_s=_number(content["wall_s"]),
            losses=_points(content["losses"], 2),
            evaluations=evaluations,
            max_staleness=_checked(
                "max_staleness", content.get("max_staleness"), "int | None"
            ),
            origin=origin if isinstance(origin, Mapping) else {},
            data=_checked("data", content.get("data"), "str | None"),
        )


@dataclass(frozen=True)
class Contents:
    """What a folder holds.

    Parameters
    ----------
    results : dict of Run to Result
        Runs that ended.
    failed : dict of Run to str
        Why the last job of a run broke, for those without a result.
    unreadable : tuple of str
        Names of files that are no result.
    """

    results: dict[Run, Result]
    failed: dict[Run, str]
    unreadable: tuple[str, ...]


class Store:
    """A folder with results. No file in it is ever changed or overwritten.

    Parameters
    ----------
    folder : Path
        Made with the first result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def probe(self) -> None:
        """Make the folder, and try whether a file can be written there.

        Raises
        ------
        OSError
            It cannot.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f".probe.{secrets.token_hex(4)}.tmp"
        try:
            path.write_text("probe\n", encoding="ascii")
        finally:
            path.unlink(missing_ok=True)

    def read(self) -> Contents:
        """Read all files; of several with the same run the first one counts."""
        results: dict[Run, Result] = {}
        failed: dict[Run, str] = {}
        unreadable = []
        paths = self.folder.glob("*.json")
        for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                if content["status"] == "ok":
                    result = Result.from_json(content)
                    results.setdefault(result.run, result)
                else:
                    failed[run_from_json(content["run"])] = str(content["reason"])
            except NO_RESULT:
                unreadable.append(path.name)
        broken = {run: why for run, why in failed.items() if run not in results}
        return Contents(results, broken, tuple(unreadable))

    def save(self, run: Run, content: Mapping[str, Any]) -> Path:
        """Keep what a run came to, under a name that is free.

        Parameters
        ----------
        run : Run
            The training.
        content : mapping
            With 'status', for JSON; numbers that are not finite become null.

        Returns
        -------
        Path
            Of the file: ``NAME.json``, ``NAME-2.json``, ... or, for a job that
            broke, ``NAME-failed-1.json``, ``NAME-failed-2.json``, ...
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(content), indent=1, allow_nan=False) + "\n"
        temporary = self.folder / f".{run.name}.{secrets.token_hex(4)}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8")
            for name in _names(run, failed=content["status"] != "ok"):
                with contextlib.suppress(FileExistsError):
                    # Unlike a rename, a link never takes the place of a file.
                    os.link(temporary, self.folder / name)
                    return self.folder / name
        finally:
            temporary.unlink(missing_ok=True)
        raise AssertionError("unreachable: the names do not end")


def run_from_json(fields: Mapping[str, Any]) -> Run:
    """A run from what a file says of it.

    Raises
    ------
    TypeError, ValueError
        A field is missing, unknown, or has a value that no run has.
    """
    run = Run(**fields)
    for each in dataclasses.fields(run):
        _checked(each.name, getattr(run, each.name), each.type)
    for name, known in (("dataset", datasets.DATASETS), ("method", METHODS)):
        if getattr(run, name) not in known:
            raise ValueError(f"{name} is {getattr(run, name)!r}, which is not known.")
    for name in AT_LEAST_1:
        if getattr(run, name) < 1:
            raise ValueError(f"{name} is {getattr(run, name)}; it is 1 at least.")
    return run


def _checked(name: str, value: Any, kind: str) -> Any:
    """The value, if it is of that type, such as 'int | None', and finite."""
    allowed = tuple(t for word in kind.split(" | ") for t in TYPES[word])
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it is of type {kind}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it is a finite number.")
    return value


def _names(run: Run, failed: bool) -> Iterator[str]:
    """Names for a run's file, in the order in which they are tried."""
    if not failed:
        yield f"{run.name}.json"
    number = 1 if failed else 2
    while True:
        yield f"{run.name}{'-failed' if failed else ''}-{number}.json"
        number += 1


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _points(rows: Any, width: int) -> np.ndarray:
    """Rows of numbers, nan for null; one row at least."""
    if not rows:
        raise ValueError("there is no point.")
    points = np.array([[_number(x) for x in row] for row in rows], dtype=float)
    return points.reshape(len(rows), width)


def finite(value: Any) -> Any:
    """The value with None in place of nan and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
