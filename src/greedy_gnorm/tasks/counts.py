"""Measures of classes from counts, for many samples of rows at once: scikit-learn's, which takes one at a time.

Counts are (R, C), samples x classes: rows of a class, rows predicted as it, and rows that are both.
"""

from __future__ import annotations

import numpy as np

from greedy_gnorm.units import Matrix, Vector


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
    total = (labelled + predicted).sum(axis=1)
    found: Vector = np.divide(2 * both.sum(axis=1), total, out=np.zeros(len(total)), where=total > 0)
    return found


def matthews(labelled: Matrix, predicted: Matrix, both: Matrix) -> Vector:
    """Matthews' correlation of labels and predictions; 0 if either is always the same class."""
    rows = labelled.sum(axis=1)
    covariance = both.sum(axis=1) * rows - (labelled * predicted).sum(axis=1)
    spread = (rows**2 - (labelled**2).sum(axis=1)) * (rows**2 - (predicted**2).sum(axis=1))
    found: Vector = np.divide(covariance, np.sqrt(spread), out=np.zeros(len(rows)), where=spread > 0)
    return found
