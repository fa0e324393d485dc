"""Sequence classification: one label per row, several labels per row, or a number.

torch and scikit-learn take seconds to load, so they are imported where they compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from greedy_gnorm.data.columns import LabelColumn
from greedy_gnorm.data.rows import Label
from greedy_gnorm.errors import DataError, UnsupportedModel
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.labels import map_by_name_or_number, map_sets
from greedy_gnorm.tasks.task import Task, register_task
from greedy_gnorm.units import Matrix, Vector

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn


class SequenceTask(Task):
    """A task with one output vector per row."""

    auto_class = "AutoModelForSequenceClassification"
    pipeline = "text-classification"
    largest_quality = 1.0

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        made_for = {part.__name__.partition("For")[2] for part in type(model).__mro__ if "For" in part.__name__}
        if made_for and "SequenceClassification" not in made_for:
            return False
        config: Any = model.config
        implied = Regression.name if config.num_labels == 1 else SingleLabel.name
        return bool((config.problem_type or implied) == cls.name)

    def has_right_shape(self, logits: Tensor) -> bool:
        return logits.ndim == 2

    def row_norms(self, outputs: Tensor) -> Tensor:
        import torch

        norms: Tensor = torch.linalg.vector_norm(outputs, dim=-1)
        return norms


@register_task
class SingleLabel(SequenceTask):
    """One correct class per row."""

    name = "single_label_classification"
    quality = "accuracy"
    one_class = True

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        return map_by_name_or_number(columns, self.config, settings.label_map)

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(outputs, labels, reduction="none")

    def predicted_labels(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def drawn_labels(self, outputs: Tensor, chance: Generator) -> Tensor:
        import torch

        return torch.multinomial(outputs.double().softmax(-1).cpu(), 1, generator=chance)[:, 0].to(outputs.device)

    def row_quality(self, statistics: Matrix) -> Vector | None:
        right: Vector = (statistics[:, 0] == statistics[:, 1]).astype(np.float64)
        return right

    def row_statistics(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Label, prediction, loss."""
        import torch

        return torch.stack([labels.double(), outputs.argmax(-1).double(), self.row_losses(outputs, labels)], dim=1)

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        from sklearn import metrics

        labels, predicted = statistics[:, 0].astype(int), statistics[:, 1].astype(int)
        return {
            "accuracy": float(metrics.accuracy_score(labels, predicted)),
            "macro_f1": float(metrics.f1_score(labels, predicted, average="macro", zero_division=0)),
            "loss": mean(statistics[:, 2]),
        }


@register_task
class MultiLabel(SequenceTask):
    """Any number of labels per row."""

    name = "multi_label_classification"
    quality = "micro_f1"

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        return map_sets(columns, self.config, settings.label_map)

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(outputs, labels.to(outputs), reduction="none").mean(-1)

    def predicted_labels(self, outputs: Tensor) -> Tensor:
        return (outputs > 0).to(outputs.dtype)

    def drawn_labels(self, outputs: Tensor, chance: Generator) -> Tensor:
        import torch

        return torch.bernoulli(outputs.double().sigmoid().cpu(), generator=chance).to(outputs)

    def row_statistics(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The labels, the predictions, the loss."""
        import torch

        return torch.cat([labels.double(), (outputs > 0).double(), self.row_losses(outputs, labels)[:, None]], dim=1)

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        from sklearn import metrics

        count = statistics.shape[1] // 2
        labels, predicted = statistics[:, :count].astype(int), statistics[:, count : 2 * count].astype(int)
        return {
            "micro_f1": float(metrics.f1_score(labels, predicted, average="micro", zero_division=0)),
            "macro_f1": float(metrics.f1_score(labels, predicted, average="macro", zero_division=0)),
            "accuracy": float(metrics.accuracy_score(labels, predicted)),
            "loss": mean(statistics[:, -1]),
        }


@register_task
class Regression(SequenceTask):
    """A number per row."""

    name = "regression"
    quality = "r2"

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        config: Any = model.config
        if config.problem_type == cls.name and config.num_labels > 1:
            raise UnsupportedModel(
                f"The model is a regression with {config.num_labels} outputs; only one output is supported."
            )
        return super().fits(model)

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        return [_numbers(column.values) if column.used else [] for column in columns]

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.mse_loss(outputs, labels.to(outputs).view_as(outputs), reduction="none").mean(-1)

    def predicted_labels(self, outputs: Tensor) -> Tensor:
        return outputs.view(len(outputs))

    def drawn_labels(self, outputs: Tensor, chance: Generator) -> Tensor:
        """The output plus noise of unit variance, as the squared error assumes."""
        import torch

        noise = torch.randn(len(outputs), generator=chance, dtype=torch.float64)
        return self.predicted_labels(outputs) + noise.to(outputs)

    def row_statistics(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Label, prediction, loss."""
        import torch

        numbers = labels.double().view(len(outputs), -1)
        return torch.cat([numbers, outputs.double(), self.row_losses(outputs, labels).double()[:, None]], dim=1)

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        from sklearn import metrics

        labels, predicted = statistics[:, 0], statistics[:, 1]
        return {
            "r2": float(metrics.r2_score(labels, predicted)),
            "mean_absolute_error": float(metrics.mean_absolute_error(labels, predicted)),
            "loss": mean(statistics[:, 2]),
        }


def mean(values: Any) -> float:
    """The mean of a column, summed by torch to give the same digits as the mean over all rows at once."""
    import torch

    return float(torch.from_numpy(values.copy()).mean())


def _numbers(values: Sequence[Any]) -> list[Label]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise DataError(f"The model is a regression: labels must be numbers ({error}).") from error
    if not all(map(math.isfinite, numbers)):
        raise DataError("The model is a regression: labels must be finite numbers, but one is NaN or infinite.")
    return list(numbers)
