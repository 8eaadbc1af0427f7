"""Draws what benchmark_scaling.py measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

from overlap_plot import OUR_COLOUR, PEER_COLOUR
from scaling_rows import Points, speedups
from scaling_sweeps import Sweep
from systems import BASELINE, OURS

COLOURS = {OURS: OUR_COLOUR, BASELINE: PEER_COLOUR}


def draw(
    sweeps: Mapping[str, Sweep], results: Mapping[str, Points], path: Path
) -> None:
    """Write a PNG: for each sweep a step's time with its bound, and the speed-up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(results), 2, figsize=(12, 4 * len(results)), squeeze=False
    )
    for (name, points), (times, speed) in zip(results.items(), grid):
        sweep = sweeps[name]
        _draw_times(times, sweep, points)
        times.set_title(f"{name}: {sweep.network}, links {sweep.rate}")
        for system, speedup in speedups(sweep, points).items():
            counts, ratios = list(speedup), list(speedup.values())
            speed.plot(counts, ratios, "o-", color=COLOURS[system], label=system)
        ends = [min(points), max(points)]
        speed.plot(ends, ends, color="black", linewidth=1, label="linear")
        speed.set_ylabel("speed-up over 1 worker that never waits")
        for axes in (times, speed):
            axes.set_xlabel("workers")
            axes.set_xticks(list(points))
            axes.set_ylim(bottom=0)
            axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_times(axes: Any, sweep: Sweep, points: Points) -> None:
    """Times of a step, and the longer of computation and busiest link."""
    for system, colour in COLOURS.items():
        times = {
            n: rows[system].step_ms for n, rows in points.items() if system in rows
        }
        good = {n: ms for n, ms in times.items() if ms is not None}
        axes.plot(list(good), list(good.values()), "o-", color=colour, label=system)
    bounds = [max(sweep.compute_ms, sweep.link_ms(count)) for count in points]
    label = "max(T_compute, T_link)"
    axes.plot(list(points), bounds, color="black", linewidth=1, label=label)
    axes.set_ylabel("ms per step")
