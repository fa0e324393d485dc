"""Curves of quality against units removed, and the numbers read from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greedy_gnorm.units import Measure, Step

Walk = list[Step]
"""The steps of a run."""

Points = Sequence[tuple[float, float]]
"""(units removed, quality) after each step."""


def curve(steps: Sequence[Step], measure: Measure) -> list[tuple[float, float]]:
    """The points of a run's curve."""
    points, gone = [], 0
    for step in steps:
        gone += len(step.removed)
        points.append((float(gone), measure.of(step)))
    return points


def knee(points: Points, *, higher_is_better: bool = True) -> int:
    """The index of the point farthest on the better side of the line from the first point to the last.

    If several points are equally far, up to rounding, it is the first of them; both ends have height 0.
    """
    sign = 1.0 if higher_is_better else -1.0
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
    heights = [0.0, *(sign * (y - (y0 + slope * (x - x0))) for x, y in points[1:-1]), 0.0]
    least = max(heights) - 1e-12 * max(abs(y) for _, y in points)
    return next(place for place, height in enumerate(heights) if height >= least)


def knee_at(points: Points, measure: Measure) -> int:
    """The index of the point at the knee of a curve of this measure."""
    heights = [(gone, measure.height(quality)) for gone, quality in points]
    return knee(heights, higher_is_better=measure.higher_is_better)


def knee_of(steps: Sequence[Step], measure: Measure) -> int:
    """The step at the knee of a run's curve."""
    return knee_at(curve(steps, measure), measure)


def at_share(points: Points, share: float) -> float:
    """Quality when this share of the units is removed, interpolated linearly."""
    units, quality = zip(*points, strict=True)
    return float(np.interp(share * units[-1], units, quality))


def mean_over_curve(points: Points) -> float:
    """The mean height of the curve: the area under it (by trapezoids) divided by its width."""
    units, quality = zip(*points, strict=True)
    return float(np.trapezoid(quality, units) / (units[-1] - units[0]))


def units_before_drop(points: Points, drop: float, measure: Measure) -> float:
    """How many units can be removed before quality first falls by more than this."""
    safe = 0.0
    for gone, quality in points:
        if measure.drop(points[0][1], quality) > drop + 1e-12:
            break
        safe = gone
    return safe
