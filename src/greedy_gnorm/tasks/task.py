"""The base class of tasks, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.data.columns import SENTENCES, Columns, Format, LabelColumn, read_texts
from greedy_gnorm.data.rows import Encoded, Label, Row, Text
from greedy_gnorm.errors import DataError, GnormError, UnsupportedModel
from greedy_gnorm.registry import Registry, suggestion
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.predictions import Predictions
from greedy_gnorm.units import Matrix, Measure, Vector

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from greedy_gnorm.data.batches import Batch, Batches


class Task(ABC):
    """What a model predicts: how labels are read, the statistics of a row, and the measures computed from them.

    `metrics` are the measures that rules and curves can use; they use the first unless the user names another.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Measure, ...]]
    one_class: ClassVar[bool] = False
    """Whether each row has one correct class."""
    auto_class: ClassVar[str]
    pipeline: ClassVar[str]
    """The name that the hub has for the task; transformers may have a pipeline for it."""
    format: ClassVar[Format] = SENTENCES
    """The common names of columns in the data of this task."""
    labelled: ClassVar[bool] = True
    """Whether rows need labels of their own: those of a language model are its text."""
    row: ClassVar[type[Row]] = Row
    """What a row of the data is."""
    output_names: ClassVar[tuple[str, ...]] = ("logits",)
    """The names of the model's outputs that the task reads; none where ONNX can't give them."""
    own_labels: ClassVar[bool] = False
    """Whether rows are always judged by what the unpruned model makes of them; labels of the data are an addition."""
    tells_agreement: ClassVar[bool] = False
    """Whether the statistics of a row hold its prediction, so that agreement needs no further pass."""
    counted: ClassVar[str] = "rows"
    """What is counted where each class has numbers of its own."""
    library: ClassVar[str] = "transformers"
    """The library that loads a saved model, as the hub names it."""
    reader: ClassVar[tuple[str, str]] = ("tokenizer", "AutoTokenizer")
    """What turns a row into the model's inputs, and the class of transformers that loads it."""
    gives_chances: ClassVar[bool] = True
    """Whether outputs are logits of a distribution; otherwise they are numbers of some scale."""
    varies: ClassVar[bool] = True
    """Whether a distillation may replace tokens of its rows: what a language model learns is the order of its text."""
    tokens_alike: ClassVar[bool] = False
    """Whether every token is a sample of its own: tokens weigh the same in calibration, and Fisher scores add them."""

    def __init__(self, config: Any, model: nn.Module | None = None) -> None:
        self.config = config
        self.model = model

    @property
    def quality(self) -> str:
        """The name of the measure that leads unless the user names another."""
        return self.metrics[0].name

    @property
    def agreement(self) -> str:
        """The measure that is called agreement where labels are the unpruned model's predictions."""
        return self.quality

    def is_agreement(self, measure: str) -> bool:
        """Whether a measure compares with the unpruned model, which agrees with itself."""
        return measure == AGREEMENT

    def measure(self, name: str | None = None, rows: Batches | None = None) -> Measure:
        """The measure of this name, or the one that leads; `rows` are those that it is measured on."""
        offered = self.offered_metrics(rows)
        if name is None:
            return offered[0]
        found = next((each for each in offered if each.name == name), None)
        if found is None:
            names = ", ".join(each.name for each in offered)
            raise GnormError(f"metric must be one of {names} for this model ({self.name}), not {name!r}.")
        return found

    def offered_metrics(self, rows: Batches | None = None) -> Sequence[Measure]:
        """The measures that make sense for this model, and for these rows where they are known; the first leads."""
        return self.metrics

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        """Whether this is the model's task."""
        from greedy_gnorm.model.modeling_pruned import auto_class_of

        return auto_class_of(type(model)) == cls.auto_class

    def read_texts(
        self, table: Any, columns: Columns, tokenizer: Any, settings: Settings
    ) -> list[tuple[Text, Text | None]]:
        """The text of each row, and the second text where there is one."""
        texts = read_texts(table, columns.text)
        pairs = [None] * len(texts) if columns.pair is None else read_texts(table, columns.pair)
        return list(zip(texts, pairs, strict=True))

    def encode(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> tuple[list[Encoded], int]:
        """The rows as the model takes them, of at most `limit` tokens each, and how many rows were truncated."""
        from greedy_gnorm.data.encoding import tokenised

        return tokenised(rows, tokenizer, limit)

    def token_counts(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> list[int]:
        """The number of tokens of each row, after truncation."""
        counts = [0] * len(rows)
        for item in self.encode(rows, tokenizer, limit, settings)[0]:
            counts[item.row] += len(item)
        return counts

    def padding(self, items: Sequence[Encoded], model: nn.Module, tokenizer: Any) -> dict[str, int]:
        """The model's inputs, and what fills up each of them in rows that are shorter than others."""
        from greedy_gnorm.data.encoding import token_padding

        return token_padding(items, model, tokenizer)

    def random_inputs(self, rows: int, tokens: int, chance: Generator, choices: int = 1) -> dict[str, Tensor]:
        """A batch without padding, with token types where the model has them; `choices` are for multiple choice."""
        import torch

        config = self.config
        lowest = min((config.pad_token_id or 0) + 1, config.vocab_size - 1)
        ids = torch.randint(lowest, config.vocab_size, (rows, tokens), generator=chance)
        types = {"token_type_ids": torch.zeros_like(ids)} if getattr(config, "type_vocab_size", 0) > 1 else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}

    @abstractmethod
    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        """Map the labels of all columns to the model's numbers by a single mapping; returns a list for each column."""

    def check_labels(self, labels: Sequence[Any]) -> None:
        """Refuse labels for which quality can't be measured."""
        if len(set(labels)) < 2:
            raise DataError(
                f"All {len(labels)} evaluation rows have the same label, so quality can't be measured ({self.name}). "
                f"Give rows with at least two different labels."
            )

    def completed(self, batch: Batch) -> Batch:
        """A batch that the user has made, with what its inputs imply, such as the labels of a language model."""
        return batch

    def doubts(self, labels: Sequence[Any], quality: Mapping[str, float]) -> list[str]:
        """What makes the unpruned model's quality on rows with these labels doubtful, as sentences."""
        return []

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's output for each row; the first dimension is that of the rows."""
        from torch import Tensor

        logits: Any = getattr(model(**batch.inputs), "logits", None)
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else None
        if not isinstance(logits, Tensor) or not self.has_right_shape(logits):
            raise UnsupportedModel(
                f"{type(model).__name__} returns logits of shape {shape}, which does not fit {self.name}."
            )
        return logits

    @abstractmethod
    def has_right_shape(self, logits: Tensor) -> bool:
        """Whether the logits have the shape of this task."""

    @abstractmethod
    def row_norms(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The norm of each row's output, (B,): the paper's objective."""

    @abstractmethod
    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row, (B,)."""

    def row_divergences(self, outputs: Tensor, reference: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
        """How far each row's outputs are from those of another model, (B,).

        The divergence KL(reference || outputs) of the distributions at a temperature, the mean over those of a row; the
        squared distance where outputs are no logits.
        """
        return kl_divergences(outputs, reference, temperature).flatten(1).mean(1)

    @abstractmethod
    def predicted_labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The labels that these outputs predict, as the labels of the data are given."""

    def joined_predictions(self, predicted: Sequence[Tensor], batches: Sequence[Batch]) -> list[Tensor]:
        """The predicted labels of all batches, each with what the other parts of its row say."""
        return list(predicted)

    @abstractmethod
    def drawn_labels(self, outputs: Tensor, batch: Batch, chance: Generator) -> Tensor:
        """Labels drawn at random from the distribution that these outputs describe."""

    def right_rows(self, statistics: Matrix, measure: str) -> NDArray[np.bool_] | None:
        """Which rows are right, (N,), if that is what this measure is the share of."""
        return None

    @abstractmethod
    def row_statistics(self, outputs: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        """The numbers that the measures need from each row of a batch, (B, S) in float64.

        Only these, not the outputs, are collected from all batches and processes, in one (N, S) table.
        """

    def combined(self, statistics: Matrix) -> Matrix:
        """The statistics of the rows of the data, from those of the rows of all batches, which may be parts of them."""
        return statistics

    @abstractmethod
    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        """The measures over all rows, (N, S), by name; the metrics are among them."""

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        """The measures of R samples of the rows, (R,) each; `weights`, (R, N), says how often each row is drawn."""
        samples = [self.measures(np.repeat(statistics, times, axis=0)) for times in weights]
        return {name: np.array([sample[name] for sample in samples]) for name in samples[0]}

    @property
    def classes(self) -> list[str]:
        """The names of the classes, if the model predicts classes."""
        return []

    def predictions(self, statistics: Matrix) -> Predictions | None:
        """The labels and predictions of rows as classes, if the model predicts classes."""
        return None

    def agreement_statistics(self, before: Matrix, after: Matrix) -> Matrix | None:
        """The statistics of one model with the predictions of another as labels, if they can be told from them."""
        return None


def kl_divergences(outputs: Tensor, reference: Tensor, temperature: float = 1.0, dim: int = -1) -> Tensor:
    """KL(reference || outputs) of the softmax of both, along a dimension that is kept with the length 1."""
    from torch.nn import functional

    ours, theirs = ((logits / temperature).log_softmax(dim) for logits in (outputs, reference.to(outputs)))
    return functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim, keepdim=True)


AGREEMENT = "agreement"
"""The quality where labels are the unpruned model's predictions: a measure of the task with these labels."""
TASKS: Registry[type[Task]] = Registry("task")


def register_task(task: type[Task]) -> type[Task]:
    """Register a class as a task under its name."""
    return TASKS.add(task.name, task)


def check_metric(name: str | None) -> None:
    """Refuse a metric that no task has, before anything is loaded."""
    known = list(dict.fromkeys([*(each.name for task in TASKS for each in TASKS[task].metrics), AGREEMENT]))
    if name is not None and name not in known:
        raise GnormError(f"Unknown metric {name!r}.{suggestion(name, known)} Choose from: {', '.join(known)}.")


def task_of(model: nn.Module) -> Task:
    """The task of a model; raises UnsupportedModel if none fits."""
    config: Any = model.config
    for name in TASKS:
        if TASKS[name].fits(model):
            return TASKS[name](config, model)
    problem = getattr(config, "problem_type", None)
    raise UnsupportedModel(
        f"The model's problem_type is {problem!r} with {getattr(config, 'num_labels', '?')} outputs; supported tasks "
        f"are: {', '.join(TASKS)}."
    )


def uses_own_labels(task: Task, settings: Settings) -> bool:
    """Whether labels are those that the unpruned model predicts."""
    return task.own_labels or settings.labels == "own"


def measure_of(header: Mapping[str, Any]) -> Measure:
    """The measure that a record follows, as the tasks that have it describe it."""
    name = str(header["quality"])
    known = (each for task in TASKS for each in TASKS[task].metrics if name in (each.name, AGREEMENT))
    found = next(known, Measure(name))
    return replace(found, name=name, higher_is_better=bool(header.get("higher_is_better", True)))
