"""Draws the results of benchmark_convergence.py: curves and differences."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import numpy as np
from convergence_sections import Section, describe, pools
from convergence_statistics import (
    BASELINE,
    by_method,
    by_setting,
    differences,
    estimate,
    pool,
)
from convergence_store import Result

# Okabe and Ito's palette, which the colour-blind can tell apart, and a grey.
COLOURS = {
    "dist_sync": "#000000",
    "dist_async": "#999999",
    "dist_async scaled": "#E69F00",
    "none": "#D55E00",
    "sgd": "#CC79A7",
    "dcsgd": "#56B4E9",
    "dcsgd adaptive": "#8C6D31",
    "mirror": "#0072B2",
    "replica": "#009E73",
}
OTHER_COLOUR = "#AA3377"
STYLES = {"mirror": "--", "replica": (0, (4, 2, 1, 2)), "dist_async scaled": ":"}
MAX_COLUMNS = 3
ACCURACY_TICKS = (10, 30, 50, 60, 70, 80, 85, 90, 93, 95, 96, 97, 98, 99, 99.5)
SPREAD_FROM = 90  # percent
BEYOND = 100.3  # so that 100 % has a place
DIFFERENCE_TICKS = (-80, -30, -10, -3, -1, 0, 1, 3, 10, 30, 80)


@dataclass(frozen=True)
class Curves:
    """A picture of curves.

    Parameters
    ----------
    name : str
        In the file's name.
    x_label, y_label : str
        Of the axes.
    points : callable
        Takes a result; returns x and y.
    is_accuracy : bool
        Whether y is in percent, to be spread near 100; else it is a loss.
    needs_seconds : bool
        Whether it is only for sections whose seconds mean something.
    """

    name: str
    x_label: str
    y_label: str
    points: Callable[[Result], tuple[np.ndarray, np.ndarray]]
    is_accuracy: bool
    needs_seconds: bool = False


def seconds_of(result: Result) -> np.ndarray:
    """Time of the training losses: linear between evaluations, from 0 at step 0."""
    steps = np.concatenate([[0.0], result.evaluations[:, 0]])
    seconds = np.concatenate([[0.0], result.evaluations[:, 1]])
    return np.interp(result.losses[:, 0], steps, seconds)


CURVES = (
    Curves(
        "loss-steps",
        "step",
        "training loss",
        lambda result: (result.losses[:, 0], result.losses[:, 1]),
        False,
    ),
    Curves(
        "loss-seconds",
        "seconds of training",
        "training loss",
        lambda result: (seconds_of(result), result.losses[:, 1]),
        False,
        needs_seconds=True,
    ),
    Curves(
        "accuracy-steps",
        "step",
        "test accuracy in %",
        lambda result: (result.evaluations[:, 0], result.evaluations[:, 2]),
        True,
    ),
    Curves(
        "accuracy-seconds",
        "seconds of training",
        "test accuracy in %",
        lambda result: (result.evaluations[:, 1], result.evaluations[:, 2]),
        True,
        needs_seconds=True,
    ),
)


def curves_of(section: Section) -> list[Curves]:
    """The pictures of curves that a section has."""
    return [c for c in CURVES if section.has_seconds or not c.needs_seconds]


def is_available() -> bool:
    """Whether pictures can be drawn; a note on standard output if not."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        print("\nNo pictures: they need matplotlib; install '.[benchmarks]'.")
        return False
    return True


def draw(section: Section, results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the pictures of a section.

    Parameters
    ----------
    section : Section
        Names the files.
    results : sequence of Result
        All of the section; at least one.
    folder : Path
        Where the PNGs go.

    Returns
    -------
    list of Path
        What was written.
    """
    import matplotlib

    matplotlib.use("Agg")
    paths = [_draw_curves(section, c, results, folder) for c in curves_of(section)]
    return paths + _draw_differences(section, results, folder)


def _draw_curves(
    section: Section, curves: Curves, results: Sequence[Result], folder: Path
) -> Path:
    """A panel for each setting."""
    groups = by_setting(results)
    figure, grid = _panels(len(groups), 4.6, 3.4)
    for axes, (setting, group) in zip(grid, groups.items()):
        for method, runs in by_method(group).items():
            _draw_method(axes, method, [curves.points(run) for run in runs])
        (_spread_accuracies if curves.is_accuracy else _log_losses)(axes)
        axes.set_title(_wrapped(describe(setting), len(groups)), fontsize=9)
        axes.set_xlabel(curves.x_label)
        axes.set_ylabel(curves.y_label)
        axes.grid(alpha=0.25)
    return _finish(figure, section, curves.name, results, folder)


def _draw_method(
    axes: Any, method: str, runs: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """A thin line for each run, and a thick one for their mean."""
    look = {"color": _colour(method), "linestyle": STYLES.get(method, "-")}
    for x, y in runs if len(runs) > 1 else ():
        axes.plot(x, y, color=look["color"], linewidth=0.6, alpha=0.35)
    count = min(len(x) for x, _ in runs)
    x, y = (np.mean([run[i][:count] for run in runs], axis=0) for i in (0, 1))
    axes.plot(x, y, linewidth=1.8, label=method, **look)


def _log_losses(axes: Any) -> None:
    axes.set_yscale("log")
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "125" else "")


def _spread_accuracies(axes: Any) -> None:
    """Near 100 % make 98 to 99 as wide as 80 to 90; else leave the axis as it is."""
    known = np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines])
    known = known[np.isfinite(known)]
    if not len(known) or known.max() < SPREAD_FROM:
        return
    axes.set_yscale("function", functions=(_spread, lambda z: BEYOND - 10.0**-z))
    low, high = max(0.0, known.min() - 3), min(100.0, (known.max() + 100) / 2)
    axes.set_ylim(low, high)
    ticks: list[float] = []
    for tick in (tick for tick in ACCURACY_TICKS[::-1] if low <= tick <= high):
        room = _spread(ticks[-1]) - _spread(tick) if ticks else 1
        if room > 0.07 * (_spread(high) - _spread(low)):
            ticks.append(tick)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def _spread(accuracy: Any) -> Any:
    return -np.log10(BEYOND - np.clip(accuracy, 0, 100))


def _draw_differences(
    section: Section, results: Sequence[Result], folder: Path
) -> list[Path]:
    """A panel for each pool: a method's settings, their mean and its interval."""
    groups = {
        title: group
        for title, group in pools(results).items()
        if any(differences(group, method) for method in _others(group))
    }
    if not groups:
        return []
    figure, grid = _panels(len(groups), 4.6, 3.0)
    for axes, (title, group) in zip(grid, groups.items()):
        methods = [m for m in _others(group) if differences(group, m)][::-1]
        for height, method in enumerate(methods):
            _draw_difference(axes, height, method, group)
        axes.set_yticks(range(len(methods)), methods)
        axes.set_ylim(-0.6, len(methods) - 0.4)
        axes.axvline(0, color="black", linewidth=0.8)
        _log_differences(axes)
        axes.set_title(_wrapped(title, len(groups)), fontsize=9)
        axes.set_xlabel("accuracy minus dist_sync's, points")
        axes.grid(axis="x", alpha=0.25)
    note = "large: mean over all pairs, with the 95 % interval; small: each setting's"
    return [_finish(figure, section, "differences", (), folder, note)]


def _draw_difference(
    axes: Any, height: int, method: str, group: Sequence[Result]
) -> None:
    found = differences(group, method)
    colour = _colour(method)
    means = [e.mean for e in map(estimate, (p.values() for p in found.values())) if e]
    offsets = np.linspace(-0.16, 0.16, len(means)) if len(means) > 1 else [0.0]
    axes.scatter(means, height + np.array(offsets), s=12, color=colour, alpha=0.5)
    pooled = pool(found)
    if pooled is None:
        return
    mean, interval = pooled.estimate.mean, pooled.estimate.interval
    if interval is not None:
        axes.plot(interval, [height, height], color=colour, linewidth=2)
    axes.plot([mean], [height], "o", color=colour, markersize=8)


def _log_differences(axes: Any) -> None:
    """Linear within a point, logarithmic outside, where failed trainings are."""
    axes.set_xscale("symlog", linthresh=1, linscale=1)
    low, high = axes.dataLim.intervalx
    low, high = min(1.4 * low, -1.2), max(1.4 * high, 1.2)
    axes.set_xlim(low, high)
    ticks = [tick for tick in DIFFERENCE_TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
    axes.minorticks_off()


def _panels(count: int, width: float, height: float) -> tuple[Any, Sequence[Any]]:
    """A figure with so many axes; those that are left over are hidden."""
    from matplotlib import pyplot

    columns = min(MAX_COLUMNS, count)
    lines = math.ceil(count / columns)
    figure, grid = pyplot.subplots(
        lines,
        columns,
        # One panel alone has to be wide enough for the legend.
        figsize=(max(6.4, width * columns), height * lines + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return figure, list(grid.flat[:count])


def _finish(
    figure: Any,
    section: Section,
    name: str,
    results: Iterable[Result],
    folder: Path,
    note: str = "",
) -> Path:
    """Add a title and one legend for all panels, and write the picture."""
    from matplotlib import pyplot

    figure.suptitle(f"{section.title}\n{note}" if note else section.title, fontsize=11)
    methods = list(by_method(results))
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    if methods:
        handles = [lines[method] for method in methods]
        columns = min(len(methods), max(4, int(figure.get_figwidth() / 1.7)))
        figure.legend(handles, methods, loc="outside lower center", ncols=columns)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{section.slug}-{name}.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _others(results: Iterable[Result]) -> list[str]:
    return [method for method in by_method(results) if method != BASELINE]


def _colour(method: str) -> str:
    return COLOURS.get(method, OTHER_COLOUR)


def _wrapped(text: str, num_panels: int) -> str:
    """A title in lines that a panel is wide enough for."""
    return textwrap.fill(text, 80 if num_panels == 1 else 52)
