"""How certain a measured quality is: 95 % intervals over rows, of one model and of the difference between two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.tasks.task import Task
from greedy_gnorm.units import Matrix, Vector

RESAMPLES, AT_ONCE = 1000, 100
LEVEL, QUANTILE = 0.95, 1.959963984540054
"""The level of all intervals, and the normal quantile that belongs to it."""

Interval = tuple[float, float]


def quality_interval(task: Task, statistics: Matrix, measure: str) -> Interval:
    """The interval of a measure: Wilson's for a share of rows that are right, else by a bootstrap over rows."""
    right = task.right_rows(statistics, measure)
    if right is not None:
        return wilson(int(right.sum()), len(right))
    return middle(_resampled(task, statistics)[measure])


def paired_intervals(task: Task, before: Matrix, after: Matrix) -> dict[str, dict[str, Interval]]:
    """For every measure, the intervals before and after, and that of the change by a paired bootstrap over rows."""
    sides = [_resampled(task, statistics) for statistics in (before, after)]
    found = {}
    for name in sides[0]:
        first, second = (side[name] for side in sides)
        found[name] = {"before": middle(first), "after": middle(second), "change": middle(second - first)}
        for side, statistics in (("before", before), ("after", after)):
            if task.right_rows(statistics, name) is not None:
                found[name][side] = quality_interval(task, statistics, name)
    return found


def change_interval(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> Interval:
    """The interval of the change of a share of rows that are right, by a paired bootstrap over rows."""
    change = after.astype(np.int64) - before
    kinds = np.array([-1, 0, 1])
    counts = np.random.default_rng(0).multinomial(
        len(change), [(change == kind).mean() for kind in kinds], size=RESAMPLES
    )  # as rows drawn with replacement
    return middle(counts @ kinds / len(change))


def wilson(right: int, rows: int) -> Interval:
    """Wilson's interval of a share."""
    share, square = right / rows, QUANTILE**2 / rows
    middle = (share + square / 2) / (1 + square)
    half = QUANTILE / (1 + square) * math.sqrt(share * (1 - share) / rows + square / (4 * rows))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _resampled(task: Task, statistics: Matrix) -> Mapping[str, Vector]:
    """The measures of samples of the rows, drawn with replacement; the same rows for every model."""
    chunks = [task.resampled(statistics, weights) for weights in resamples(len(statistics))]
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def resamples(rows: int, count: int = RESAMPLES) -> Iterator[NDArray[np.int64]]:
    """How often each row is drawn, (R, rows) at a time; seeded."""
    random = np.random.default_rng(0)
    for start in range(0, count, AT_ONCE):
        drawn = random.integers(rows, size=(min(AT_ONCE, count - start), rows))
        yield np.stack([np.bincount(sample, minlength=rows) for sample in drawn])


def middle(values: Vector) -> Interval:
    """The interval that leaves out as many of the samples on either side."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
