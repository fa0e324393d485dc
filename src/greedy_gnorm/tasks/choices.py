"""Multiple choice: one of several answers or endings for each row."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.data.columns import Columns, Format, LabelColumn, cells, is_list_of_text, read_texts
from greedy_gnorm.data.rows import Encoded, Label, Row, Text
from greedy_gnorm.errors import DataError
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.classification import ACCURACY, LOSS, SequenceTask, SingleLabel, mean
from greedy_gnorm.tasks.predictions import Predictions
from greedy_gnorm.tasks.task import register_task
from greedy_gnorm.units import Matrix, Measure, Vector

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from greedy_gnorm.data.batches import Batches

log = logging.getLogger("greedy_gnorm")

PROMPTS = ("sent1", "article", "context", "passage", "ctx", "prompt", "premise", "question", "goal", "text", "sentence")
LISTS = ("choices", "endings", "options", "answers")
"""Columns that hold all choices of a row."""
NUMBERED = ("ending", "choice", "option", "answer", "sol", "op")
"""Beginnings of the names of columns that hold one choice each: ending0, ending1, ..."""
BEGINNINGS = {"sent1": "sent2", "article": "question", "context": "question", "passage": "question"}
"""The column that stands before every choice, by the column of the prompt."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@register_task
class MultipleChoice(SingleLabel):
    """One correct choice per row; the model has an output for each choice."""

    name = "multiple_choice"
    metrics = (ACCURACY, LOSS)
    auto_class = "AutoModelForMultipleChoice"
    pipeline = "multiple-choice"
    format = Format(
        tuple((prompt, choices) for prompt in PROMPTS for choices in LISTS),
        PROMPTS,
        ("label", "labels", "answer", "answerKey", "answer_key", "target", "cop"),
    )

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        """By the class alone, whatever number of labels the configuration names."""
        return super(SequenceTask, cls).fits(model)

    def offered_metrics(self, rows: Batches | None = None) -> Sequence[Measure]:
        return self.metrics

    def read_texts(
        self, table: Any, columns: Columns, tokenizer: Any, settings: Settings
    ) -> list[tuple[Text, Text | None]]:
        """The prompt, and the choices as a tuple; a question after a passage stands before every choice."""
        prompts, choices = read_texts(table, columns.text), _read_choices(table, columns.pair)
        beginning = BEGINNINGS.get(columns.text, "")
        if beginning in table.column_names:
            begun = read_texts(table, beginning)
            choices = [tuple(f"{start} {choice}" for choice in row) for start, row in zip(begun, choices, strict=True)]
        return list(zip(prompts, choices, strict=True))

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        """Numbers count from 0, letters from A; numbers written as text count from 1 if none of them is 0.

        A label map gives numbers from 0, or letters.
        """
        table = {ours: int(to) if to.isdecimal() else to for ours, to in (settings.label_map or {}).items()}
        texts = [[table.get(_written(value), value) for value in column.values] for column in columns]
        written = {str(value) for column in texts for value in column if isinstance(value, str)}
        from_one = any(text.isdecimal() for text in written) and "0" not in written
        if from_one:
            log.info("labels are read as numbers of choices from 1, because they are text and none is 0")
        return [
            [_place(value, from_one) for value in values] if column.used else []
            for column, values in zip(columns, texts, strict=True)
        ]

    def encode(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> tuple[list[Encoded], int]:
        from greedy_gnorm.data.encoding import tokenised

        items, truncated = [], 0
        for number, row in enumerate(rows):
            assert isinstance(row.pair, tuple)
            if row.label is not None and row.label not in range(len(row.pair)):
                raise DataError(
                    f"Label {row.label} is none of {len(row.pair)} choices, counted from 0: {row.text!r:.60}. Letters "
                    f"(A, B, ...) are labels too."
                )
            parts, cut = tokenised([Row(row.text, choice, None) for choice in row.pair], tokenizer, limit)
            inputs = {name: [part.inputs[name] for part in parts] for name in parts[0].inputs}
            items.append(Encoded(inputs, row.label, number))
            truncated += cut > 0
        return items, truncated

    def random_inputs(self, rows: int, tokens: int, chance: Generator, choices: int = 1) -> dict[str, Tensor]:
        inputs = super().random_inputs(rows, tokens, chance)
        return {name: each[:, None].repeat(1, choices, 1) for name, each in inputs.items()}

    def doubts(self, labels: Sequence[Any], quality: Mapping[str, float]) -> list[str]:
        chance = max(Counter(labels).values()) / len(labels)
        if quality["accuracy"] > chance:
            return []
        return [
            f"The unpruned model's accuracy is {quality['accuracy']:.1%}, not above the {chance:.1%} of always "
            f"choosing the same place. Check the model and the labels."
        ]

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        return {"accuracy": float((statistics[:, 0] == statistics[:, 1]).mean()), "loss": mean(statistics[:, 2])}

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        samples = weights.astype(np.float64)
        rows = samples.sum(axis=1)
        right = statistics[:, 0] == statistics[:, 1]
        return {"accuracy": samples @ right / rows, "loss": samples @ statistics[:, 2] / rows}

    @property
    def classes(self) -> list[str]:
        return []

    def predictions(self, statistics: Matrix) -> Predictions | None:
        """The places of choices are no classes."""
        return None


def _read_choices(table: Any, column: str | None) -> list[tuple[str, ...]]:
    """The choices of each row: a list, a list of dicts with a `text`, a dict of lists, or a column for each choice."""
    present = table.column_names
    column = column or next((name for name in LISTS if name in present), None)
    if column is not None:
        rows = [_texts(value) for value in cells(table, column)]
    else:
        columns = next(filter(None, (_numbered(present, stem) for stem in NUMBERED)), None)
        if columns is None:
            raise DataError(
                f"Which column holds the choices? Give its name with --text-pair. Columns: {', '.join(present)}."
            )
        rows = [list(row) for row in zip(*(cells(table, name) for name in columns), strict=True)]
    for number, row in enumerate(rows):
        if not is_list_of_text(row) or len(row) < 2:
            raise DataError(f"Row {number} (counted from 0) has no list of two or more choices: {row!r:.80}.")
    return [tuple(row) for row in rows]


def _texts(value: Any) -> Any:
    """The texts of choices, which may have names too."""
    if isinstance(value, dict):
        return value.get("text")
    return (
        [each.get("text") if isinstance(each, dict) else each for each in value] if isinstance(value, list) else value
    )


def _numbered(present: Sequence[str], stem: str) -> list[str]:
    """The columns of this stem and a number or a letter, in order, if there are at least two."""
    found = sorted(name for name in present if re.fullmatch(rf"{stem}_?(\d|[a-zA-Z])", name))
    return found if len(found) > 1 else []


def _written(value: Any) -> str:
    """A label as a label map writes it."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _place(value: Any, from_one: bool) -> int:
    """The number of a choice from how it is written."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value) - from_one
    if isinstance(value, str) and len(value.strip()) == 1 and value.strip().lower() in LETTERS:
        return LETTERS.index(value.strip().lower())
    if isinstance(value, int | float) and value == int(value):
        return int(value)
    raise DataError(f"A label must be the number of a choice, or its letter, not {value!r:.80}.")
