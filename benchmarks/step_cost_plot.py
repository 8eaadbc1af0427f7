"""Draws what benchmark_step_cost.py measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

from overlap_plot import OUR_COLOUR, PEER_COLOUR
from step_cost_fit import Line
from step_cost_presets import HOST, KEYS, LAYOUT, SERVERS, SIZES
from step_cost_rows import Results
from systems import OURS

X_LABELS = {SIZES: "parameters", KEYS: "keys of 256 numbers"}


def draw(results: Results, fits: Mapping[str, Mapping[str, Line]], path: Path) -> None:
    """Write a PNG: evenness, cost of a step, and cost over parameters and keys."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9))
    _bars(axes[0, 0], results, (LAYOUT,), "unevenness")
    axes[0, 0].set_xlabel("bytes of the busiest server / mean")
    axes[0, 0].axvline(1.1, color="black", linewidth=1)
    _bars(axes[0, 1], results, (HOST, SERVERS), "cpu_ms")
    axes[0, 1].set_xlabel("CPU of all workers and servers in a step, ms")
    for axis, sweep in zip(axes[1], (SIZES, KEYS)):
        _lines(axis, fits.get(sweep, {}))
        axis.set_xlabel(X_LABELS[sweep])
        axis.set_ylabel("CPU of a step, ms")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _bars(axis: Any, results: Results, kinds: tuple[str, ...], name: str) -> None:
    """A bar for each row of sections of these kinds."""
    bars = [
        (f"{section}, {system}", row[name], system.startswith(OURS))
        for section, rows in results.items()
        for system, row in rows.items()
        if section.split()[0] in kinds and row.figures
    ][::-1]
    if not bars:
        axis.set_visible(False)
        return
    names, values, ours = zip(*bars)
    colours = [OUR_COLOUR if own else PEER_COLOUR for own in ours]
    drawn = axis.barh(names, values, color=colours)
    axis.bar_label(drawn, fmt="%.2f", padding=2, fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlim(0, 1.2 * max(values))


def _lines(axis: Any, lines: Mapping[str, Line]) -> None:
    """The points of a sweep with the fitted lines."""
    for system, line in lines.items():
        colour = OUR_COLOUR if system == OURS else PEER_COLOUR
        axis.plot(line.xs, line.ys, "o", color=colour)
        ends = [min(line.xs), max(line.xs)]
        ys = [line.intercept + line.slope * x for x in ends]
        axis.plot(ends, ys, color=colour, label=system)
    axis.set_visible(bool(lines))
    if lines:
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.legend()
