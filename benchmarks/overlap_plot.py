"""Draws the rows of benchmark_overlap.py."""

from __future__ import annotations

from pathlib import Path

from overlap_rows import Results
from systems import OURS

OUR_COLOUR, PEER_COLOUR = "tab:blue", "tab:gray"


def draw(results: Results, path: Path) -> bool:
    """Write a PNG: for each setting the time of each system's step over the bound.

    Returns
    -------
    bool
        False, with a note on standard output, if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("\nNo picture: it needs matplotlib; install '.[benchmarks]'.")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(results))
    lines = -(-len(results) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 3 * lines), squeeze=False
    )
    for axes in grid.flat[len(results) :]:
        axes.set_visible(False)
    for axes, (setting, rows) in zip(grid.flat, results.items()):
        good = {n: r.ratio_to_bound for n, r in rows.items() if r.ratio_to_bound}
        names = list(good)[::-1]
        colours = [OUR_COLOUR if n.startswith(OURS) else PEER_COLOUR for n in names]
        bars = axes.barh(names, [good[n] for n in names], color=colours)
        axes.bar_label(bars, fmt="%.2f", padding=2)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xlim(0, 1.2 * max([1.0, *good.values()]))
        axes.set_title(setting)
        axes.set_xlabel("step / max(T_compute, T_link)")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True
