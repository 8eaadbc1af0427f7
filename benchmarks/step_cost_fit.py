"""How near to a straight line the cost of a step is, in a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

import numpy as np
import report
from step_cost_rows import Results

HEADER = ("sweep", "system", "ms", "+ us each", "off the line by", "points")


@dataclass(frozen=True)
class Line:
    """The straight line nearest to the points, by least squares.

    Parameters
    ----------
    xs, ys : tuple of float
        The points: parameters or keys, and milliseconds.
    slope, intercept : float
    residual : float
        By how much a point is off the line at most, over the largest y.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    slope: float
    intercept: float
    residual: float

    @classmethod
    def through(cls, xs: Sequence[float], ys: Sequence[float]) -> Line:
        """Fit it.

        Raises
        ------
        ValueError
            There are fewer than 3 points: through 2 there is always a line.
        """
        if len(xs) < 3:
            raise ValueError(f"{len(xs)} points; a fit needs at least 3")
        slope, intercept = (float(value) for value in np.polyfit(xs, ys, 1))
        off = max(abs(y - slope * x - intercept) for x, y in zip(xs, ys))
        return cls(tuple(xs), tuple(ys), slope, intercept, off / max(ys))


def fit_sweep(
    points: Mapping[str, float], results: Results, figure: str
) -> dict[str, Line]:
    """Fit a figure of each system over the points that were measured.

    Parameters
    ----------
    points : mapping of str to float
        x of each section of the sweep.
    results : Results
    figure : str
        As `step_cost_job.figures_of` names it.
    """
    ys: dict[str, list[tuple[float, float]]] = {}
    for section, x in points.items():
        for system, row in results.get(section, {}).items():
            if row.figures:
                ys.setdefault(system, []).append((x, row[figure]))
    return {
        system: Line.through(*zip(*measured))
        for system, measured in ys.items()
        if len(measured) > 2
    }


def fit_table(fits: Mapping[str, Mapping[str, Line]]) -> str:
    """All fits as text."""
    lines = [
        [
            sweep,
            system,
            f"{line.intercept:.2f}",
            f"{1000 * line.slope:.4g}",
            f"{100 * line.residual:.1f} %",
            str(len(line.xs)),
        ]
        for sweep, systems in fits.items()
        for system, line in systems.items()
    ]
    return report.table(HEADER, lines)
