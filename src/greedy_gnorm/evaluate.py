"""Quality of a model on the evaluation rows (scikit-learn's measures)."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from sklearn import metrics
from torch import Tensor

from greedy_gnorm.batches import Batches
from greedy_gnorm.distributed import of_all
from greedy_gnorm.errors import DataError, NonFiniteScore
from greedy_gnorm.modes import evaluating, without_gradients
from greedy_gnorm.objectives import row_losses
from greedy_gnorm.passes import logits
from greedy_gnorm.problems import problem_of
from greedy_gnorm.sites import Sites


def evaluate(sites: Sites, batches: Batches) -> dict[str, float]:
    """The problem's measures, the first of which is the one that rules and curves follow, and the mean loss."""
    rows, labels = predictions(sites, batches)
    if not torch.isfinite(rows).all():
        raise NonFiniteScore("The model's outputs on the evaluation rows are NaN or infinite. Are all weights finite?")
    problem = problem_of(sites.model).name
    losses = row_losses(rows, labels, problem)
    return {**measures(rows.numpy(), labels.numpy(), problem), "loss": float(losses.mean())}


def predictions(sites: Sites, batches: Batches) -> tuple[Tensor, Tensor]:
    """Logits (float64) and labels of all rows, those of other processes too, in the order of the data."""
    outputs: list[list[float]] = []
    labels: list[Any] = []
    rows: list[int] = []
    with evaluating(sites.model), without_gradients(sites.model):
        for batch in batches:
            if batch.labels is None:
                raise DataError("Quality needs labels, and these evaluation rows have none.")
            outputs += logits(sites, batch).double().tolist()
            labels += batch.labels.tolist()
            rows += batch.rows
    shares = of_all((outputs, labels, rows))
    outputs, labels, rows = ([each for share in of_kind for each in share] for of_kind in zip(*shares, strict=True))
    order = torch.tensor(rows).argsort()
    return torch.tensor(outputs, dtype=torch.float64)[order], torch.tensor(labels)[order]


def measures(logits: NDArray[Any], labels: NDArray[Any], problem: str) -> dict[str, float]:
    """The measures of one problem, best-known first."""
    if problem == "regression":
        numbers = logits[:, 0] if logits.shape[1] == 1 else logits
        return {
            "r2": float(metrics.r2_score(labels, numbers)),
            "mean_absolute_error": float(metrics.mean_absolute_error(labels, numbers)),
        }
    if problem == "multi_label_classification":
        chosen = (logits > 0).astype(int)
        return {
            "micro_f1": float(metrics.f1_score(labels, chosen, average="micro", zero_division=0)),
            "macro_f1": float(metrics.f1_score(labels, chosen, average="macro", zero_division=0)),
            "accuracy": float(metrics.accuracy_score(labels, chosen)),
        }
    predicted = logits.argmax(-1)
    return {
        "accuracy": float(metrics.accuracy_score(labels, predicted)),
        "macro_f1": float(metrics.f1_score(labels, predicted, average="macro", zero_division=0)),
    }
