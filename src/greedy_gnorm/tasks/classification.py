"""Sequence classification: one label per row, several labels per row, or a number.

torch and scikit-learn take seconds to load, so they are imported where they compute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.data.columns import LabelColumn
from greedy_gnorm.data.rows import Label
from greedy_gnorm.errors import DataError, UnsupportedModel
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.counts import class_counts, correlations, macro_f1, matthews, micro_f1
from greedy_gnorm.tasks.labels import map_by_name_or_number, map_sets
from greedy_gnorm.tasks.predictions import Predictions
from greedy_gnorm.tasks.ranks import spearman
from greedy_gnorm.tasks.task import Task, register_task
from greedy_gnorm.units import Matrix, Measure, Vector

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from greedy_gnorm.data.batches import Batch, Batches

ACCURACY, MACRO_F1, MICRO_F1, F1, MCC, R2, PEARSON, SPEARMAN = (
    Measure(name, largest=1.0)
    for name in ("accuracy", "macro_f1", "micro_f1", "f1", "mcc", "r2", "pearson", "spearman")
)
LOSS, MEAN_ABSOLUTE_ERROR = (Measure(name, higher_is_better=False) for name in ("loss", "mean_absolute_error"))


class SequenceTask(Task):
    """A task with one output vector per row; statistics begin with the labels and the predictions of a row."""

    auto_class = "AutoModelForSequenceClassification"
    pipeline = "text-classification"
    tells_agreement = True

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        if not super().fits(model):
            return False
        config: Any = model.config
        implied = Regression.name if config.num_labels == 1 else SingleLabel.name
        return bool((config.problem_type or implied) == cls.name)

    def has_right_shape(self, logits: Tensor) -> bool:
        return logits.ndim == 2

    def row_norms(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch

        norms: Tensor = torch.linalg.vector_norm(outputs, dim=-1)
        return norms

    @property
    def width(self) -> int:
        """The numbers that the labels of a row are."""
        return 1

    def agreement_statistics(self, before: Matrix, after: Matrix) -> Matrix | None:
        width = self.width
        return np.hstack([before[:, width : 2 * width], after[:, width:]])


@register_task
class SingleLabel(SequenceTask):
    """One correct class per row."""

    name = "single_label_classification"
    metrics: ClassVar[tuple[Measure, ...]] = (ACCURACY, MACRO_F1, F1, MCC, LOSS)
    one_class = True

    def offered_metrics(self, rows: Batches | None = None) -> Sequence[Measure]:
        """F1 is that of the second of two classes."""
        return [each for each in self.metrics if each != F1 or self.config.num_labels == 2]

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        return map_by_name_or_number(columns, self.config, settings.label_map)

    def doubts(self, labels: Sequence[Any], quality: Mapping[str, float]) -> list[str]:
        counts, found = Counter(labels), []
        names = self.config.id2label
        if missing := [str(names[label]) for label in range(self.config.num_labels) if not counts[label]]:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            found.append(f"No evaluation row has the label {shown}: quality there is not measured.")
        chance = max(counts.values()) / len(labels)
        if quality["accuracy"] <= chance:
            found.append(
                f"The unpruned model's accuracy is {quality['accuracy']:.1%}, not above the {chance:.1%} of always "
                f"answering {names[counts.most_common(1)[0][0]]}. Check the model and the labels (--label-map)."
            )
        return found

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(outputs, labels, reduction="none")

    def predicted_labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.argmax(-1)

    def drawn_labels(self, outputs: Tensor, batch: Batch, chance: Generator) -> Tensor:
        import torch

        return torch.multinomial(outputs.double().softmax(-1).cpu(), 1, generator=chance)[:, 0].to(outputs.device)

    def right_rows(self, statistics: Matrix, measure: str) -> NDArray[np.bool_] | None:
        return statistics[:, 0] == statistics[:, 1] if measure == ACCURACY.name else None

    def row_statistics(self, outputs: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        """Label, prediction, loss, probability of the prediction."""
        import torch

        predicted, losses = outputs.argmax(-1), self.row_losses(outputs, labels)
        probabilities = outputs.softmax(-1).gather(1, predicted[:, None])[:, 0]
        return torch.stack([labels.double(), predicted.double(), losses, probabilities], dim=1)

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        """Those of scikit-learn, to the last digit, without the seconds that it takes to load."""
        labels, predicted = statistics[:, 0].astype(int), statistics[:, 1].astype(int)
        counts = class_counts(labels, predicted, self.config.num_labels)
        present = (counts[0] + counts[1])[0] > 0  # zeros among the numbers would change the digits of their sum
        found = {
            "accuracy": float(np.mean(labels == predicted)),
            "macro_f1": float(macro_f1(*(each[:, present] for each in counts))[0]),
            "mcc": float(matthews(*counts)[0]),
            "loss": mean(statistics[:, 2]),
        }
        if self.config.num_labels == 2:
            found["f1"] = float(micro_f1(*(each[:, 1:] for each in counts))[0])
        return found

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        classes = np.arange(self.config.num_labels)
        labels, predicted = (statistics[:, place, None] == classes for place in (0, 1))
        samples = weights.astype(np.float64)
        rows, both = samples.sum(axis=1), samples @ (labels & predicted)
        counts = samples @ labels, samples @ predicted, both
        found = {
            "accuracy": both.sum(axis=1) / rows,
            "macro_f1": macro_f1(*counts),
            "mcc": matthews(*counts),
            "loss": samples @ statistics[:, 2] / rows,
        }
        if self.config.num_labels == 2:
            found["f1"] = micro_f1(*(each[:, 1:] for each in counts))
        return found

    @property
    def classes(self) -> list[str]:
        return class_names(self.config)

    def predictions(self, statistics: Matrix) -> Predictions | None:
        labels, predicted = statistics[:, 0].astype(int), statistics[:, 1].astype(int)
        return Predictions(labels, predicted, statistics[:, 3])


@register_task
class MultiLabel(SequenceTask):
    """Any number of labels per row: those whose probability is above the threshold."""

    name = "multi_label_classification"
    metrics = (MICRO_F1, MACRO_F1, ACCURACY, LOSS)

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        return map_sets(columns, self.config, settings.label_map)

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(outputs, labels.to(outputs), reduction="none").mean(-1)

    def row_divergences(self, outputs: Tensor, reference: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
        """The mean over the labels of a row, each of which is there or not."""
        import torch

        ours, theirs = (torch.stack([torch.zeros_like(each), each], -1) for each in (outputs, reference))
        return super().row_divergences(ours, theirs, batch, temperature)

    def predicted_labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._above(outputs, batch).to(outputs.dtype)

    def drawn_labels(self, outputs: Tensor, batch: Batch, chance: Generator) -> Tensor:
        import torch

        return torch.bernoulli(outputs.double().sigmoid().cpu(), generator=chance).to(outputs)

    def row_statistics(self, outputs: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        """The labels, the predictions, the loss."""
        import torch

        predicted, losses = self._above(outputs, batch).double(), self.row_losses(outputs, labels)
        return torch.cat([labels.double(), predicted, losses[:, None]], dim=1)

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        from sklearn import metrics

        labels, predicted = self._sides(statistics)
        return {
            "micro_f1": float(metrics.f1_score(labels, predicted, average="micro", zero_division=0)),
            "macro_f1": float(metrics.f1_score(labels, predicted, average="macro", zero_division=0)),
            "accuracy": float(metrics.accuracy_score(labels, predicted)),
            "loss": mean(statistics[:, -1]),
        }

    def right_rows(self, statistics: Matrix, measure: str) -> NDArray[np.bool_] | None:
        labels, predicted = self._sides(statistics)
        right: NDArray[np.bool_] = (labels == predicted).all(axis=1)
        return right if measure == ACCURACY.name else None

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        labels, predicted = self._sides(statistics)
        samples = weights.astype(np.float64)
        rows, counts = samples.sum(axis=1), (samples @ labels, samples @ predicted, samples @ (labels * predicted))
        return {
            "micro_f1": micro_f1(*counts),
            "macro_f1": macro_f1(*counts, absent=0.0),
            "accuracy": samples @ (labels == predicted).all(axis=1) / rows,
            "loss": samples @ statistics[:, -1] / rows,
        }

    @property
    def width(self) -> int:
        return int(self.config.num_labels)

    @property
    def classes(self) -> list[str]:
        return class_names(self.config)

    def predictions(self, statistics: Matrix) -> Predictions | None:
        labels, predicted = self._sides(statistics)
        return Predictions(labels, predicted, both=labels * predicted)

    @staticmethod
    def _above(outputs: Tensor, batch: Batch) -> Tensor:
        return outputs > math.log(batch.threshold / (1 - batch.threshold))

    @staticmethod
    def _sides(statistics: Matrix) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The labels and the predictions, (N, C) each."""
        count = statistics.shape[1] // 2
        return statistics[:, :count].astype(np.int64), statistics[:, count : 2 * count].astype(np.int64)


@register_task
class Regression(SequenceTask):
    """A number per row."""

    name = "regression"
    metrics = (R2, PEARSON, SPEARMAN, MEAN_ABSOLUTE_ERROR, LOSS)
    gives_chances = False

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

    def row_divergences(self, outputs: Tensor, reference: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
        return squared_distances(outputs, reference)

    def predicted_labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.view(len(outputs))

    def drawn_labels(self, outputs: Tensor, batch: Batch, chance: Generator) -> Tensor:
        """The output plus noise of unit variance, as the squared error assumes."""
        import torch

        noise = torch.randn(len(outputs), generator=chance, dtype=torch.float64)
        return self.predicted_labels(outputs, batch) + noise.to(outputs)

    def row_statistics(self, outputs: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        """Label, prediction, loss."""
        import torch

        numbers = labels.double().view(len(outputs), -1)
        return torch.cat([numbers, outputs.double(), self.row_losses(outputs, labels).double()[:, None]], dim=1)

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        from scipy import stats
        from sklearn import metrics

        labels, predicted = statistics[:, 0], statistics[:, 1]
        return {
            "r2": float(metrics.r2_score(labels, predicted)),
            "pearson": _correlation(stats.pearsonr, labels, predicted),
            "spearman": _correlation(stats.spearmanr, labels, predicted),
            "mean_absolute_error": float(metrics.mean_absolute_error(labels, predicted)),
            "loss": mean(statistics[:, 2]),
        }

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        samples, (labels, predicted, loss) = weights.astype(np.float64), statistics.T
        rows, errors = samples.sum(axis=1), samples @ np.square(labels - predicted)
        spread = samples @ np.square(labels) - np.square(samples @ labels) / rows
        # As in scikit-learn, where all labels are the same: 1 without errors, else 0
        constant = np.where(errors > 0, 0.0, 1.0)
        explained = 1 - np.divide(errors, spread, out=1 - constant, where=spread > 1e-12 * rows)
        return {
            "r2": explained,
            "pearson": correlations(samples, labels, predicted),
            "spearman": spearman(labels, predicted, weights),
            "mean_absolute_error": samples @ np.abs(labels - predicted) / rows,
            "loss": samples @ loss / rows,
        }


def squared_distances(outputs: Tensor, reference: Tensor) -> Tensor:
    """The squared distance of each row's outputs, (B, d), from others, (B,)."""
    return (outputs - reference.to(outputs)).square().sum(-1)


def class_names(config: Any) -> list[str]:
    """The model's names of its classes, in their order."""
    return [str(config.id2label[number]) for number in range(int(config.num_labels))]


def mean(values: Any) -> float:
    """The mean of a column, summed by torch to give the same digits as the mean over all rows at once."""
    import torch

    return float(torch.from_numpy(values.copy()).mean())


def _correlation(function: Any, labels: Vector, predicted: Vector) -> float:
    """A correlation by scipy; 0 where all labels or all predictions are the same."""
    if len(set(labels)) < 2 or len(set(predicted)) < 2:
        return 0.0
    return float(function(labels, predicted).statistic)


def _numbers(values: Sequence[Any]) -> list[Label]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise DataError(f"The model is a regression: labels must be numbers ({error}).") from error
    if not all(map(math.isfinite, numbers)):
        raise DataError("The model is a regression: labels must be finite numbers, but one is NaN or infinite.")
    return list(numbers)
