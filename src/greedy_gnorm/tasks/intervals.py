"""How certain a measured quality is: 95 % intervals over rows, of one model and of the difference between two."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.tasks.task import Task
from greedy_gnorm.units import Matrix, Vector

RESAMPLES = 1000
LEVEL = 0.95

Interval = tuple[float, float]


def quality_interval(task: Task, statistics: Matrix) -> Interval:
    """The interval of the leading measure: Wilson's where rows are right or wrong, else by bootstrap."""
    from scipy.stats import binomtest  # takes long to import

    right = task.row_quality(statistics)
    if right is not None and set(np.unique(right)) <= {0.0, 1.0}:
        wilson = binomtest(int(right.sum()), len(right)).proportion_ci(LEVEL, method="wilson")
        return float(wilson.low), float(wilson.high)
    return _middle(np.array([_quality(task, statistics[rows]) for rows in _resamples(len(statistics))]))


def difference_interval(task: Task, before: Matrix, after: Matrix) -> Interval:
    """The interval of the change of the leading measure on the same rows, by a paired bootstrap."""
    sides = task.row_quality(before), task.row_quality(after)
    if sides[0] is not None and sides[1] is not None:
        change = sides[1] - sides[0]
        return _middle(np.array([change[rows].mean() for rows in _resamples(len(change))]))
    changes = [_quality(task, after[rows]) - _quality(task, before[rows]) for rows in _resamples(len(before))]
    return _middle(np.array(changes))


def _quality(task: Task, statistics: Matrix) -> float:
    return task.measures(statistics)[task.quality]


def _resamples(rows: int) -> list[NDArray[np.int64]]:
    """Row numbers drawn with replacement, the same for both models."""
    random = np.random.default_rng(0)
    return [random.integers(rows, size=rows) for _ in range(RESAMPLES)]


def _middle(values: Vector) -> Interval:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
