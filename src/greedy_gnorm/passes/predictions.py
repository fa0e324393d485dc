"""What two models predict on the same rows: by class, and the rows whose prediction changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.passes.evaluation import LABELS, PREDICTED, by_source
from greedy_gnorm.tasks.predictions import Predictions, class_measures, confusion
from greedy_gnorm.tasks.task import Task
from greedy_gnorm.units import Matrix

SIDES = ("before", "after")
MOST_EXAMPLES = 48
"""The rows with a changed prediction that a run keeps at most."""


def compared_predictions(
    task: Task, batches: Batches, tables: Sequence[Matrix], examples: int = MOST_EXAMPLES
) -> dict[str, Any] | None:
    """The predictions of two models, from the statistics of the rows; None for a model that does not predict classes.

    Confusion, agreement and the changed rows, at most so many, are given where each row has one class. Rows without
    labels are compared with what the unpruned model predicts.
    """
    source = LABELS if LABELS in batches.judged_by else PREDICTED
    sides = [task.predictions(by_source(batches, table)[source]) for table in tables]
    both = {name: side for name, side in zip(SIDES, sides, strict=True) if side is not None}
    if not both:
        return None
    return {
        "rows": len(tables[0]),
        "labels": "data" if source == LABELS else "own",
        "classes": task.classes,
        "counted": task.counted,
        "per_class": _per_class(task.classes, both),
        **(_of_one_class(task.classes, both, batches, examples) if task.one_class else {}),
    }


def _per_class(classes: Sequence[str], both: dict[str, Predictions]) -> list[dict[str, Any]]:
    measured = {side: class_measures(predictions, len(classes)) for side, predictions in both.items()}
    return [
        {
            "class": name,
            "rows": measured["before"][place]["rows"],
            **{
                side: {key: rows[place][key] for key in ("precision", "recall", "f1")}
                for side, rows in measured.items()
            },
        }
        for place, name in enumerate(classes)
    ]


def _of_one_class(
    classes: Sequence[str], both: dict[str, Predictions], batches: Batches, examples: int
) -> dict[str, Any]:
    changed = np.flatnonzero(both["before"].predicted != both["after"].predicted)
    return {
        "confusion": {side: confusion(predictions, len(classes)) for side, predictions in both.items()},
        "agreement": 1 - len(changed) / len(both["before"].predicted),
        "changed_count": len(changed),
        "changed": [_example(row, classes, both, batches) for row in _surest(changed, both)[:examples]]
        if batches.texts
        else [],
    }


def _surest(rows: Any, both: dict[str, Predictions]) -> list[int]:
    """The rows with the largest change first.

    If one class had the probability p and another one has q now, that of the first fell by p + q - 1 or more.
    """
    first, second = (predictions.probability for predictions in both.values())
    order = np.argsort(-(first[rows] + second[rows]), kind="stable")
    return [int(row) for row in rows[order]]


def _example(row: int, classes: Sequence[str], both: dict[str, Predictions], batches: Batches) -> dict[str, Any]:
    text, pair = batches.texts[row]
    label = classes[both["before"].labels[row]] if LABELS in batches.judged_by else None
    sides = {
        side: {
            "label": classes[predictions.predicted[row]],
            "probability": round(float(predictions.probability[row]), 6),
        }
        for side, predictions in both.items()
    }
    return {"text": text, "text_pair": pair, "label": label, **sides}
