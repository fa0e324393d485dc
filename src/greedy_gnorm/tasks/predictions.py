"""What a model predicts for rows of known classes: precision, recall and F1 of each class, and what it confuses.

scikit-learn takes a second to load, so it is imported where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.units import Vector

Numbers = NDArray[Any]


@dataclass(frozen=True)
class Predictions:
    """The labels of rows and what was predicted: numbers of classes, (N,), or 0 and 1 for each class, (N, classes).

    `probability` is that of each row's prediction; it is empty where a row may have several classes.
    """

    labels: Numbers
    predicted: Numbers
    probability: Vector = field(default_factory=lambda: np.empty(0))


def class_measures(predictions: Predictions, count: int) -> list[dict[str, float]]:
    """Precision, recall and F1 of each class, and how many rows have it; 0 where there is nothing to divide by."""
    from sklearn.metrics import precision_recall_fscore_support

    if predictions.labels.ndim == 1:
        found = precision_recall_fscore_support(
            predictions.labels, predictions.predicted, labels=range(count), average=None, zero_division=0
        )
        rows = list(zip(*found, strict=True))
    else:
        columns = zip(predictions.labels.T, predictions.predicted.T, strict=True)
        each = [precision_recall_fscore_support(*pair, labels=[1], average=None, zero_division=0) for pair in columns]
        rows = [tuple(part[0] for part in parts) for parts in each]
    return [
        {"precision": float(precision), "recall": float(recall), "f1": float(f1), "rows": int(support)}
        for precision, recall, f1, support in rows
    ]


def confusion(predictions: Predictions, count: int) -> list[list[int]]:
    """How many rows of each class (first index) were predicted as each class (second index)."""
    from sklearn.metrics import confusion_matrix

    matrix = confusion_matrix(predictions.labels, predictions.predicted, labels=np.arange(count))
    return [[int(value) for value in row] for row in matrix]
