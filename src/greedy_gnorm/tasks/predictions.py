"""What a model predicts for rows of known classes: precision, recall and F1 of each class, and what it confuses.

scikit-learn takes a second to load, so it is imported where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.tasks.counts import class_counts, ratio
from greedy_gnorm.units import Vector

Numbers = NDArray[Any]


@dataclass(frozen=True)
class Predictions:
    """The labels of rows and what was predicted: numbers of classes, (N,), or how often each class, (N, classes).

    `probability` is that of each row's prediction, where it has one class. Otherwise `both` is how often a class is
    predicted rightly, (N, classes).
    """

    labels: Numbers
    predicted: Numbers
    probability: Vector = field(default_factory=lambda: np.empty(0))
    both: Numbers = field(default_factory=lambda: np.empty(0))


def class_measures(predictions: Predictions, count: int) -> list[dict[str, float]]:
    """Precision, recall and F1 of each class, and how often it is a label; 0 where there is nothing to divide by."""
    if predictions.labels.ndim == 1:
        labels, predicted, both = (each[0] for each in class_counts(predictions.labels, predictions.predicted, count))
    else:
        labels, predicted, both = (
            each.sum(axis=0) for each in (predictions.labels, predictions.predicted, predictions.both)
        )
    found = ratio(both, predicted), ratio(both, labels), ratio(2 * both, labels + predicted), labels
    rows = list(zip(*found, strict=True))
    return [
        {"precision": float(precision), "recall": float(recall), "f1": float(f1), "rows": int(support)}
        for precision, recall, f1, support in rows
    ]


def confusion(predictions: Predictions, count: int) -> list[list[int]]:
    """How many rows of each class (first index) were predicted as each class (second index)."""
    matrix = np.bincount(predictions.labels * count + predictions.predicted, minlength=count**2).reshape(count, count)
    return [[int(value) for value in row] for row in matrix]
