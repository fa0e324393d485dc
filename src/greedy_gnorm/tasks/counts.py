"""Measures for many samples of rows at once: those of scikit-learn and scipy, which take one sample at a time.

Counts are (R, C), samples x classes: rows of a class, rows predicted as it, and rows that are both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.units import Matrix, Vector


def class_counts(labels: NDArray[np.int64], predicted: NDArray[np.int64], count: int) -> tuple[Matrix, Matrix, Matrix]:
    """The counts of each of so many classes, with all rows as the only sample; (N,) numbers of classes."""
    labelled, chosen, both = (
        np.bincount(numbers, minlength=count)[None].astype(np.float64)
        for numbers in (labels, predicted, labels[labels == predicted])
    )
    return labelled, chosen, both


def class_f1(labelled: Matrix, predicted: Matrix, both: Matrix) -> Matrix:
    """The F1 of each class; NaN for a class that is neither a label nor a prediction."""
    found: Matrix = np.full(both.shape, np.nan)
    np.divide(2 * both, labelled + predicted, out=found, where=labelled + predicted > 0)
    return found


def macro_f1(labelled: Matrix, predicted: Matrix, both: Matrix, *, absent: float = np.nan) -> Vector:
    """The mean over classes; one that is neither a label nor a prediction is left out, or counts as `absent`."""
    scores = class_f1(labelled, predicted, both)
    means: Vector = np.nanmean(np.where(np.isnan(scores), absent, scores), axis=1)
    return means


def micro_f1(labelled: Matrix, predicted: Matrix, both: Matrix) -> Vector:
    """F1 over all labels of all rows; 0 without any label."""
    return ratio(2 * both.sum(axis=1), (labelled + predicted).sum(axis=1))


def ratio(part: Vector, whole: Vector) -> Vector:
    """The quotient; 0 where the whole is 0."""
    found: Vector = np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)
    return found


def matthews(labelled: Matrix, predicted: Matrix, both: Matrix) -> Vector:
    """Matthews' correlation of labels and predictions; 0 if either is always the same class."""
    rows = labelled.sum(axis=1)
    covariance = both.sum(axis=1) * rows - (labelled * predicted).sum(axis=1)
    spread = (rows**2 - (labelled**2).sum(axis=1)) * (rows**2 - (predicted**2).sum(axis=1))
    found: Vector = np.divide(covariance, np.sqrt(spread), out=np.zeros(len(rows)), where=spread > 0)
    return found


def correlations(weights: Matrix, first: Vector, second: Vector) -> Vector:
    """Pearson's correlation of two values of each row, (N,); `weights`, (R, N), says how often a row is in a sample.

    0 where all values of a sample are the same.
    """
    total = weights.sum(axis=1, keepdims=True)
    deviations = [values - (weights * values).sum(axis=1, keepdims=True) / total for values in (first, second)]
    covariance = (weights * deviations[0] * deviations[1]).sum(axis=1)
    spreads = [(weights * np.square(each)).sum(axis=1) for each in deviations]
    varied = _varies(weights, first) & _varies(weights, second)
    return ratio(np.where(varied, covariance, 0.0), np.sqrt(spreads[0] * spreads[1]))


def _varies(weights: Matrix, values: Vector) -> NDArray[np.bool_]:
    """Which samples have more than one value."""
    present = weights > 0
    low, high = (np.where(present, values, nothing) for nothing in (np.inf, -np.inf))
    varies: NDArray[np.bool_] = high.max(axis=1) > low.min(axis=1)
    return varies
