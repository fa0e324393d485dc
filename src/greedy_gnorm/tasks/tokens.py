"""Token classification: a tag for every word, which may be part of an entity (IOB2) or stand for itself.

A word's tag is at its first sub-word; the outputs of other sub-words, special tokens and padding do not count. Words
that are cut off because a row is too long are not judged, as in transformers' own scripts: the rows are told.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.data.columns import Columns, Format, LabelColumn, read_words
from greedy_gnorm.data.rows import IGNORED, Encoded, Label, Row, Text
from greedy_gnorm.errors import DataError
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.classification import ACCURACY, F1, LOSS, MACRO_F1, class_names
from greedy_gnorm.tasks.counts import macro_f1, micro_f1, ratio
from greedy_gnorm.tasks.labels import map_tags
from greedy_gnorm.tasks.predictions import Predictions
from greedy_gnorm.tasks.task import Task, kl_divergences, register_task
from greedy_gnorm.units import Matrix, Measure, Vector

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from greedy_gnorm.data.batches import Batch

log = logging.getLogger("greedy_gnorm")

WORDS = Format(
    (),
    ("tokens", "words", "text", "sentence"),
    ("ner_tags", "tags", "labels", "ner", "label", "pos_tags", "upos", "chunk_tags"),
)
"""Words with a tag each."""
PRECISION, RECALL = (Measure(name, largest=1.0) for name in ("precision", "recall"))

OUTSIDE = "O"
PART = re.compile(r"([BI])(-.*)?")
"""A tag of IOB2: the beginning or the inside of an entity of some type."""


class TokenTask(Task):
    """A task with an output vector for every token.

    Statistics are the counts of each class among the labels, among the predictions and in both, then the words, the
    words that are right, and the loss.
    """

    auto_class = "AutoModelForTokenClassification"
    pipeline = "token-classification"
    format = WORDS

    def read_texts(
        self, table: Any, columns: Columns, tokenizer: Any, settings: Settings
    ) -> list[tuple[Text, Text | None]]:
        if columns.pair is not None:
            raise DataError("The model tags the words of one text: leave out --text-pair.")
        return [(words, None) for words in read_words(table, columns.text)]

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        return map_tags(columns, self.config, settings.label_map)

    def encode(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> tuple[list[Encoded], int]:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"Words can be aligned with tokens only by a fast tokenizer, which {type(tokenizer).__name__} is not."
            )
        spaced = _keeps_spaces(tokenizer)
        items, truncated = [], 0
        for number, row in enumerate(rows):
            if row.label is not None and len(_tags(row)) != len(row.text):
                raise DataError(
                    f"A row has {len(row.text)} words and {len(_tags(row))} tags: {' '.join(row.text)!r:.60}."
                )
            words = [" " * (spaced and place > 0) + word for place, word in enumerate(row.text)]
            options = {"is_split_into_words": True, "return_attention_mask": True, "verbose": False}
            encoding = tokenizer(words, **options)
            if len(encoding["input_ids"]) > limit:
                encoding, truncated = tokenizer(words, truncation=True, max_length=limit, **options), truncated + 1
            items.append(_encoded(number, row, encoding))
        return items, truncated

    def has_right_shape(self, logits: Tensor) -> bool:
        return logits.ndim == 3

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits, (B, T, classes), with zeros for the tokens that do not count."""
        logits = super().outputs(model, batch)
        return logits.masked_fill(~counting(batch).to(logits.device)[..., None], 0.0)

    def row_norms(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The norm over all words of a row, over the square root of their number."""
        import torch

        words = counting(batch).sum(1).clamp_min(1).to(outputs)
        norms: Tensor = torch.linalg.vector_norm(outputs.flatten(1), dim=1) / words.sqrt()
        return norms

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean over the words of each row."""
        from torch.nn import functional

        losses = functional.cross_entropy(outputs.mT, labels, ignore_index=IGNORED, reduction="none")
        return losses.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)

    def row_divergences(self, outputs: Tensor, reference: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
        """The mean over the words of each row; other tokens have zeros for outputs, which do not differ."""
        words = counting(batch).sum(1).clamp_min(1).to(outputs)
        return kl_divergences(outputs, reference, temperature).sum((1, 2)) / words

    def predicted_labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.argmax(-1).masked_fill(~counting(batch).to(outputs.device), IGNORED)

    def drawn_labels(self, outputs: Tensor, batch: Batch, chance: Generator) -> Tensor:
        import torch

        shares = outputs.double().softmax(-1).flatten(0, 1).cpu()
        drawn = torch.multinomial(shares, 1, generator=chance).view(outputs.shape[:2])
        return drawn.to(outputs.device).masked_fill(~counting(batch).to(outputs.device), IGNORED)

    def row_statistics(self, outputs: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        import torch

        losses, predicted = self.row_losses(outputs, labels), outputs.argmax(-1)
        rows = []
        for tags, guesses in zip(labels.cpu().numpy(), predicted.cpu().numpy(), strict=True):
            words = tags != IGNORED
            tags, guesses = tags[words], guesses[words]
            rows.append([*self.class_counts(tags, guesses).flatten(), len(tags), (tags == guesses).sum()])
        counts = torch.tensor(np.array(rows), dtype=torch.float64, device=losses.device)
        return torch.cat([counts, losses.double()[:, None]], dim=1)

    def class_counts(self, tags: NDArray[np.int64], guesses: NDArray[np.int64]) -> NDArray[np.int64]:
        """How often each class is in the tags of a row, in those predicted, and in both, (3, classes)."""
        sides = [one_hot(each, len(self.classes)) for each in (tags, guesses)]
        return np.stack([*(side.sum(0) for side in sides), (sides[0] & sides[1]).sum(0)]).astype(np.int64)

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        whole = self.resampled(statistics, np.ones((1, len(statistics)), dtype=np.int64))
        return {name: float(values[0]) for name, values in whole.items()}

    def predictions(self, statistics: Matrix) -> Predictions | None:
        labelled, predicted, both = self._counts(statistics)
        return Predictions(labelled, predicted, both=both)

    def _counts(self, statistics: Matrix) -> tuple[Matrix, Matrix, Matrix]:
        """Of the classes: in the labels, in the predictions, and in both, (N, classes) each."""
        width = len(self.classes)
        labelled, predicted, both = (statistics[:, part * width : (part + 1) * width] for part in range(3))
        return labelled, predicted, both

    def _of_words(self, statistics: Matrix, weights: NDArray[np.int64]) -> tuple[list[Matrix], Mapping[str, Vector]]:
        """The counts of samples of the rows, and the measures that all tasks have."""
        samples = weights.astype(np.float64)
        words, right, losses = statistics[:, -3:].T
        common = {
            "accuracy": ratio(samples @ right, samples @ words),
            "loss": samples @ losses / samples.sum(axis=1),
        }
        return [samples @ each for each in self._counts(statistics)], common


@register_task
class Entities(TokenTask):
    """Tags of IOB2: an entity is a beginning and what is inside of it, and right only as a whole, with its type."""

    name = "entity_recognition"
    metrics = (F1, PRECISION, RECALL, ACCURACY, LOSS)
    counted = "entities"

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        return super().fits(model) and is_iob2(class_names(model.config))

    @property
    def classes(self) -> list[str]:
        return entity_types(class_names(self.config))

    def check_labels(self, labels: Sequence[Any]) -> None:
        beginnings = {number for number, name in enumerate(class_names(self.config)) if name[:1] == "B"}
        if not any(tag in beginnings for tags in labels for tag in tags):
            raise DataError(
                f"None of the {len(labels)} evaluation rows has an entity, so quality can't be measured ({self.name})."
            )

    def doubts(self, labels: Sequence[Any], quality: Mapping[str, float]) -> list[str]:
        begun = {tag for tags in labels for tag in tags}
        names = class_names(self.config)
        present = {kind(names[tag]) for tag in begun if tag != IGNORED and names[tag][:1] == "B"}
        found = []
        if missing := [name for name in self.classes if name not in present]:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            found.append(f"No evaluation row has an entity of the type {shown}: quality there is not measured.")
        if quality["f1"] == 0:
            found.append("The unpruned model finds no entity. Check the model and the tags (--label-map).")
        return found

    def class_counts(self, tags: NDArray[np.int64], guesses: NDArray[np.int64]) -> NDArray[np.int64]:
        names = class_names(self.config)
        sides = [entities([names[tag] for tag in each]) for each in (tags, guesses)]
        parts = (*sides, sides[0] & sides[1])
        return np.array([[sum(each[0] == name for each in part) for name in self.classes] for part in parts])

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        counts, common = self._of_words(statistics, weights)
        labelled, predicted, both = (each.sum(axis=1) for each in counts)
        return {
            "f1": micro_f1(*counts),
            "precision": ratio(both, predicted),
            "recall": ratio(both, labelled),
            **common,
        }


@register_task
class Tags(TokenTask):
    """Tags that stand for themselves, such as parts of speech; also those of other schemes than IOB2."""

    name = "token_classification"
    metrics = (ACCURACY, MACRO_F1, LOSS)
    counted = "words"

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        return super().fits(model) and not is_iob2(class_names(model.config))

    @property
    def classes(self) -> list[str]:
        return class_names(self.config)

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        log.info("the model's tags are not those of entities (IOB2): quality is the accuracy of words")
        return super().map_labels(columns, settings)

    def check_labels(self, labels: Sequence[Any]) -> None:
        super().check_labels([tag for tags in labels for tag in tags if tag != IGNORED])

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        counts, common = self._of_words(statistics, weights)
        return {"accuracy": common["accuracy"], "macro_f1": macro_f1(*counts), "loss": common["loss"]}


def counting(batch: Batch) -> Tensor:
    """Which tokens count, (B, T): those marked, or those with a label where the caller made the batch, or all."""
    if batch.positions is not None:
        return batch.positions.bool()
    if batch.labels is not None and batch.labels.ndim == 2:
        return batch.labels != IGNORED
    return batch.real_tokens().bool()


def _tags(row: Row) -> tuple[int, ...]:
    assert isinstance(row.label, tuple)
    return row.label


def _encoded(number: int, row: Row, encoding: Any) -> Encoded:
    """A row with its tags at the first sub-words, which count unless their word has no tag."""
    words = encoding.word_ids()
    firsts = [word is not None and word != before for before, word in zip([None, *words], words, strict=False)]
    inputs = {name: encoding[name] for name in encoding}
    if row.label is None:
        return Encoded(inputs, None, number, [int(first) for first in firsts])
    tags = [_tags(row)[word] if first else IGNORED for word, first in zip(words, firsts, strict=True)]
    return Encoded(inputs, tags, number, [int(tag != IGNORED) for tag in tags])


def _keeps_spaces(tokenizer: Any) -> bool:
    """Whether a word in a text has other tokens than alone, because the space before it belongs to it."""
    options = {"add_special_tokens": False, "verbose": False}
    alone = tokenizer(["a", "a"], is_split_into_words=True, **options)["input_ids"]
    return bool(alone != tokenizer("a a", **options)["input_ids"])


def is_iob2(names: Sequence[str]) -> bool:
    """Whether tags are B-, I- and O, and everything with an inside also has a beginning."""
    parts = [PART.fullmatch(name) for name in names if name != OUTSIDE]
    if not parts or any(part is None for part in parts):
        return False
    return {kind(name) for name in names if name[0] == "I"} <= {kind(name) for name in names if name[0] == "B"}


def entity_types(names: Sequence[str]) -> list[str]:
    """The types of entities of IOB2 tags, in their order."""
    return list(dict.fromkeys(kind(name) for name in names if name != OUTSIDE))


def kind(tag: str) -> str:
    """The type of a tag, named as seqeval does."""
    return tag[1:].strip("-") or "_"


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """The type, start and end of each entity: an inside without a beginning of its type is none."""
    found, start = set(), None
    for place, tag in enumerate([*tags, OUTSIDE]):
        if start is not None and not (tag[0] == "I" and kind(tag) == kind(tags[start])):
            found.add((kind(tags[start]), start, place))
            start = None
        if tag[0] == "B":
            start = place
    return found


def one_hot(numbers: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """(N, classes)."""
    hot: NDArray[np.bool_] = numbers[:, None] == np.arange(count)
    return hot
