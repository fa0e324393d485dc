"""How certain the numbers of a comparison are: a bootstrap over the evaluation rows and over the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.pruning.curves import Points, Walk, curve, knee_at
from greedy_gnorm.tasks.intervals import Interval, middle, resamples
from greedy_gnorm.units import Matrix, Measure, unpack_rows

RESAMPLES = 200


@dataclass(frozen=True)
class Course:
    """A walk and its curve, which may be the one that it has on a sample of the rows."""

    walk: Walk
    points: Points
    measure: Measure

    @classmethod
    def of(cls, walk: Walk, measure: Measure) -> Course:
        """A walk with the curve that was measured."""
        return cls(walk, curve(walk, measure), measure)

    @cached_property
    def knee(self) -> int:
        """The step at the knee of the curve."""
        return knee_at(self.points, self.measure)

    def sampled(self, weights: NDArray[np.float64]) -> Iterator[Course]:
        """The walk with its curve on samples of the rows, (R, rows)."""
        right = np.stack([unpack_rows(step.right or "", weights.shape[1]) for step in self.walk])
        units = [gone for gone, _ in self.points]
        for qualities in (weights @ right.T).tolist():
            yield Course(self.walk, list(zip(units, qualities, strict=True)), self.measure)


Value = Callable[[Course], float]


def sampled_means(
    curves: dict[str, list[Walk]], measure: Measure, rows: int, values: Sequence[Value]
) -> dict[str, Matrix] | None:
    """For each method, the means over runs in samples of rows and of runs, (R, values); None if nothing varies.

    All methods have the same samples of rows, and those with as many runs the same samples of runs: differences between
    them are paired.
    """
    by_rows = all(step.right is not None for walks in curves.values() for walk in walks for step in walk)
    if not by_rows and any(len(walks) == 1 for walks in curves.values()):
        return None
    weights = np.concatenate(list(resamples(rows, RESAMPLES))) / rows if by_rows else None
    return {
        method: _sampled([Course.of(walk, measure) for walk in walks], weights, values)
        for method, walks in curves.items()
    }


def _sampled(courses: Sequence[Course], weights: NDArray[np.float64] | None, values: Sequence[Value]) -> Matrix:
    if weights is None:
        found = np.array([[[value(course) for value in values]] * RESAMPLES for course in courses])
    else:
        found = np.array(
            [[[value(sample) for value in values] for sample in course.sampled(weights)] for course in courses]
        )
    picks = np.random.default_rng(len(courses)).integers(len(courses), size=(RESAMPLES, len(courses)))
    return np.stack([found[picks[place], place].mean(axis=0) for place in range(RESAMPLES)])


def interval(samples: NDArray[np.float64]) -> Interval | None:
    """The 95 % interval of a mean, if it varies."""
    low, high = middle(samples)
    return (low, high) if high > low else None


def differ(best: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Whether the 95 % interval of the difference between two methods leaves out zero."""
    low, high = middle(best - other)
    return low > 0 or high < 0
