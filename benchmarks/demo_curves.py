"""Accuracy against time as text: what the demo shows with ``--network``."""

from __future__ import annotations

from typing import Mapping, Sequence, Tuple

Curve = Sequence[Tuple[float, float]]  # (seconds, accuracy from 0 to 1), in order

MARKS = "ox"  # of the first and of the second curve
COLUMNS = 60
LEVELS = (1.0, 0.99, 0.98, 0.97, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2, 0.0)


def chart(curves: Mapping[str, Curve]) -> str:
    """Draw curves with a mark for each point.

    Parameters
    ----------
    curves : mapping of str to Curve
        By name; a later one is drawn over an earlier one.

    Notes
    -----
    The levels lie closer at the top, where training ends. A point is drawn at the
    highest level that it has reached.
    """
    end_s = max(seconds for curve in curves.values() for seconds, _ in curve)
    rows = [[" "] * COLUMNS for _ in LEVELS]
    for mark, curve in zip(MARKS, curves.values()):
        for seconds, accuracy in curve:
            row = next(i for i, level in enumerate(LEVELS) if accuracy >= level)
            rows[row][round((COLUMNS - 1) * seconds / end_s)] = mark
    used = [any(cell != " " for cell in row) for row in rows]
    first, last = used.index(True), len(used) - used[::-1].index(True)
    lines = [
        f"{100 * level:5.0f} % |{''.join(row).rstrip()}"
        for level, row in list(zip(LEVELS, rows))[first:last]
    ]
    axis = f"{'0 s':<{COLUMNS - 8}}{end_s:6.1f} s"
    names = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS, curves))
    return "\n".join([*lines, f"{'':8}+{'-' * COLUMNS}", f"{'':9}{axis}", names])


def reached_s(curve: Curve, accuracy: float) -> float | None:
    """When a curve first had an accuracy; None if it never had."""
    return next((s for s, value in curve if value >= accuracy), None)


def comparison(curves: Mapping[str, Curve], accuracy: float) -> str:
    """Say how much sooner the first curve reached an accuracy than the second.

    Parameters
    ----------
    curves : mapping of str to Curve
        Two, by name.
    accuracy : float
        From 0 to 1.
    """
    (ours, our_curve), (other, other_curve) = curves.items()
    whole = our_curve[-1][0] / other_curve[-1][0]
    steps = f"{ours} made all steps in {whole:.2f} x the time of {other}."
    times = {name: reached_s(curve, accuracy) for name, curve in curves.items()}
    late = [name for name, seconds in times.items() if seconds is None]
    if late:
        return f"{steps}\n{100 * accuracy:g} % was not reached by {' and '.join(late)}."
    return (
        f"{steps}\n{ours} reached {100 * accuracy:g} % in "
        f"{times[ours] / times[other]:.2f} x the time of {other} "
        f"({times[ours]:.1f} s, {times[other]:.1f} s)."
    )
