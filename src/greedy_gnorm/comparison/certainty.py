"""How certain the numbers of a comparison are: a bootstrap over the evaluation rows and over the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.pruning.curves import Walk
from greedy_gnorm.tasks.intervals import Interval, middle, resamples
from greedy_gnorm.units import Matrix, unpack_rows

RESAMPLES = 200

Value = Callable[[Walk], float]


def sampled_means(
    curves: dict[str, list[Walk]], measure: str, rows: int, values: Sequence[Value]
) -> dict[str, Matrix] | None:
    """For each method, the means over runs in samples of rows and of runs, (R, values); None if nothing varies.

    All methods have the same samples of rows, and those with as many runs the same samples of runs: differences between
    them are paired.
    """
    by_rows = all(step.right is not None for walks in curves.values() for walk in walks for step in walk)
    if not by_rows and any(len(walks) == 1 for walks in curves.values()):
        return None
    weights = np.concatenate(list(resamples(rows, RESAMPLES))) / rows if by_rows else None
    return {method: _sampled(walks, measure, weights, values) for method, walks in curves.items()}


def _sampled(
    walks: Sequence[Walk], measure: str, weights: NDArray[np.float64] | None, values: Sequence[Value]
) -> Matrix:
    samples = range(RESAMPLES)
    if weights is None:
        found = np.array([[[value(walk) for value in values]] * RESAMPLES for walk in walks])
    else:
        found = np.array(
            [[[value(walk) for value in values] for walk in _samples_of(walk, measure, weights)] for walk in walks]
        )
    picks = np.random.default_rng(len(walks)).integers(len(walks), size=(RESAMPLES, len(walks)))
    return np.stack([found[picks[place], place].mean(axis=0) for place in samples])


def _samples_of(walk: Walk, measure: str, weights: NDArray[np.float64]) -> list[Walk]:
    """The walk as it would be on each sample of the rows."""
    right = np.stack([unpack_rows(step.right or "", weights.shape[1]) for step in walk])
    curves = weights @ right.T
    return [
        [replace(step, quality={measure: float(value)}) for step, value in zip(walk, curve, strict=True)]
        for curve in curves
    ]


def interval(samples: NDArray[np.float64]) -> Interval | None:
    """The 95 % interval of a mean, if it varies."""
    low, high = middle(samples)
    return (low, high) if high > low else None


def differ(best: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Whether the 95 % interval of the difference between two methods leaves out zero."""
    low, high = middle(best - other)
    return low > 0 or high < 0
