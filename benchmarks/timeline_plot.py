"""Draws two steps of each system, on the same time scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence, Tuple

from timeline_trace import (
    BACKWARD,
    COMPUTATION,
    FORWARD,
    GLOBAL_UPDATE,
    LOCAL_UPDATE,
    Timeline,
    merged,
)

LABELS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    "waits": "worker waits",
    LOCAL_UPDATE: "local update",
    "push": "push",
    GLOBAL_UPDATE: "server update",
    "pull": "pull",
}
_EDGES = {"edgecolor": "white", "linewidth": 0.4}  # between the layers
STYLES = {
    FORWARD: {"facecolor": "#fdd0a2", **_EDGES},
    BACKWARD: {"facecolor": "#fd8d3c", **_EDGES},
    "waits": {
        "facecolor": "#f7f7f7",
        "edgecolor": "#969696",
        "hatch": "////",
        "linewidth": 0.5,
    },
    LOCAL_UPDATE: {"facecolor": "#cb181d"},
    "push": {"facecolor": "#3182bd"},
    GLOBAL_UPDATE: {"facecolor": "#54278f"},
    "pull": {"facecolor": "#31a354"},
}
LANE, GAP = 0.9, 0.35  # heights: of a lane of three in a role, between roles
LEAST_SHARE = 1 / 400  # of the scale: shorter updates would not be seen
WINDOW_US = 5000.0  # over which the use of a link is averaged
NUM_POINTS = 800
SMALL = 8.5

Intervals = Sequence[Tuple[float, float]]


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Write a PNG, readable at 800 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = [timeline.typical_pair() for timeline in timelines]
    longest_ms = max(end - start for start, _, end in pairs) / 1000
    figure, panels = pyplot.subplots(
        len(timelines), 1, figsize=(8, 6.3), sharex=True, squeeze=False
    )
    for axes, timeline in zip(panels[:, 0], timelines):
        _draw_system(axes, timeline, longest_ms)
    panels[-1, 0].set_xlabel("milliseconds", fontsize=SMALL)
    _legend(figure)
    figure.tight_layout(rect=(0, 0.035, 1, 1), h_pad=1.2)
    figure.savefig(path, dpi=200)
    pyplot.close(figure)


def _draw_system(axes: Any, timeline: Timeline, longest_ms: float) -> None:
    """Draw all roles of one system, and say what its steps took."""
    starts_us = timeline.typical_pair()
    top, ticks = 0.0, {}
    for role in timeline.roles:
        _Lanes(axes, timeline, role, top, LEAST_SHARE * longest_ms).draw()
        ticks[role] = top - 1.5 * LANE
        top -= 3 * LANE + GAP
    axes.set_ylim(top + GAP - 0.2, 1.6)
    moments = [(start - starts_us[0]) / 1000 for start in starts_us]
    for moment in moments:
        axes.axvline(moment, color="black", linewidth=0.9, zorder=5)
    for number, (a, b) in enumerate(zip(moments, moments[1:]), 1):
        text = f"step {number}: {b - a:.0f} ms"
        axes.text((a + b) / 2, 0.3, text, ha="center", fontsize=SMALL)
    axes.set_xlim(-0.005 * longest_ms, 1.005 * longest_ms)
    if moments[-1] < 0.75 * longest_ms:  # else there is no room
        _note_gain(axes, moments[-1], longest_ms, (top + GAP) / 2)
    axes.set_yticks(list(ticks.values()))
    axes.set_yticklabels(list(ticks), fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=SMALL, labelbottom=True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    hidden = f"{100 * timeline.hidden_share():.0f} % of communication behind compute"
    title = f"{timeline.system}: two steps in {moments[-1]:.0f} ms, {hidden}"
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold")


def _note_gain(axes: Any, end_ms: float, longest_ms: float, height: float) -> None:
    """An arrow over the time by which this system is faster."""
    arrow = {"arrowstyle": "<->", "color": "black", "linewidth": 0.9}
    axes.annotate("", (end_ms, height), xytext=(longest_ms, height), arrowprops=arrow)
    text = f"{longest_ms - end_ms:.0f} ms less\nfor the same two steps"
    middle = (end_ms + longest_ms) / 2
    axes.text(middle, height + 0.4, text, ha="center", va="bottom", fontsize=SMALL)


class _Lanes:
    """The three lanes of a role, from its `top`: what it does, and its link.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
    timeline : Timeline
    role : str
    top : float
        The height at which the first lane begins.
    least_ms : float
        An update is drawn at least as wide.
    """

    def __init__(
        self, axes: Any, timeline: Timeline, role: str, top: float, least_ms: float
    ) -> None:
        self._axes, self._timeline, self._role = axes, timeline, role
        self._top, self._least_ms = top, least_ms
        self._first, _, self._end = timeline.typical_pair()

    def draw(self) -> None:
        """What a worker sends is a push, what a server sends is a pull."""
        if self._role.startswith("worker"):
            self._computation(0)
            # Low, as the device computes meanwhile.
            self._updates(0, LOCAL_UPDATE, height=0.5 * LANE)
            self._link(1, "push", "sent")
            self._link(2, "pull", "received")
        else:
            self._link(0, "push", "received")
            self._updates(1, GLOBAL_UPDATE)
            self._link(2, "pull", "sent")

    def _bottom(self, lane: int) -> float:
        return self._top - (lane + 1) * LANE

    def _ms(self, moment_us: float) -> float:
        """A moment on the axis, cut at its ends."""
        return (min(max(moment_us, self._first), self._end) - self._first) / 1000

    def _bars(
        self,
        lane: int,
        intervals: Intervals,
        least_ms: float = 0,
        height: float = LANE - 0.12,
        **style: Any,
    ) -> None:
        bars = []
        for start_us, end_us in intervals:
            if end_us > self._first and start_us < self._end:
                start = self._ms(start_us)
                bars.append((start, max(self._ms(end_us) - start, least_ms)))
        self._axes.broken_barh(bars, (self._bottom(lane) + 0.06, height), **style)

    def _computation(self, lane: int) -> None:
        computation = self._timeline.computation(self._role)
        busy = merged(computation)
        idle = [(a[1], b[0]) for a, b in zip(busy, busy[1:])]
        self._bars(lane, idle, **STYLES["waits"])
        for kind in COMPUTATION:
            chosen = [(s.start_us, s.end_us) for s in computation if s.kind == kind]
            self._bars(lane, chosen, **STYLES[kind])

    def _updates(self, lane: int, kind: str, **style: Any) -> None:
        spans = [s for s in self._timeline.spans[self._role] if s.kind == kind]
        intervals = [(s.start_us, s.end_us) for s in spans]
        style = {**STYLES[kind], **style}
        self._bars(lane, intervals, self._least_ms, zorder=3, **style)

    def _link(self, lane: int, kind: str, counter: str) -> None:
        """The share of the link's rate that is used, as a height."""
        import numpy as np

        samples = self._timeline.links[self._role]
        clock = [sample.clock_us for sample in samples]
        counted = [getattr(sample, counter) for sample in samples]
        grid = np.linspace(self._first, self._end, NUM_POINTS)
        before, after = (
            np.interp(grid + shift, clock, counted)
            for shift in (-WINDOW_US / 2, WINDOW_US / 2)
        )
        rate = 8e6 * (after - before) / WINDOW_US  # bits per second
        share = np.clip(rate / self._timeline.rate, 0, 1)
        bottom = self._bottom(lane)
        top = bottom + share * (LANE - 0.08)
        milliseconds = (grid - self._first) / 1000
        self._axes.fill_between(milliseconds, bottom, top, **STYLES[kind])


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(label=label, **STYLES[kind]) for kind, label in LABELS.items()]
    figure.legend(
        handles=handles,
        loc="lower center",
        ncol=len(handles),
        fontsize=SMALL,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.3,
    )
