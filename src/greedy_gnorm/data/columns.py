"""Finding and reading the columns of text, second text and label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from greedy_gnorm.errors import DataError
from greedy_gnorm.settings import Settings

if TYPE_CHECKING:
    import datasets

PAIRS = (
    ("text", "text_pair"),
    ("text", "text2"),
    ("text1", "text2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
)
TEXTS = (
    "text",
    "sentence",
    "content",
    "review",
    "tweet",
    "document",
    "headline",
    "title",
    "premise",
    "question",
    "query",
    "line",
)
LABELS = ("label", "labels", "gold_label", "class", "target", "category", "sentiment", "emotion", "intent", "score")


class Format(NamedTuple):
    """Common names of columns in the data of a task: pairs of texts, single texts, labels; a text is a `word`."""

    pairs: tuple[tuple[str, str], ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    word: str = "text"


SENTENCES = Format(PAIRS, TEXTS, LABELS)
"""Texts or pairs of texts with one label each."""


class Columns(NamedTuple):
    text: str
    pair: str | None
    label: str | None


class LabelColumn(NamedTuple):
    """The labels of one split as they are written in the data.

    `names` are the names of the classes if the data set has a ClassLabel feature, whose values are numbers. Labels of a
    split that is not `used` only help to interpret the others.
    """

    values: list[Any]
    names: Sequence[str] | None
    used: bool


def find_columns(table: datasets.Dataset, names: Format, settings: Settings) -> Columns:
    """The columns given by the user, else those with a common name."""
    present = list(table.column_names)
    for option, name in (("--text", settings.text), ("--text-pair", settings.text_pair), ("--label", settings.label)):
        if name is not None and name not in present:
            raise DataError(f"There is no column {name!r} ({option}). Columns: {', '.join(present)}.")
    label = label_column_name(table, names, settings)
    if settings.text is not None:
        return Columns(settings.text, settings.text_pair, label)
    text, pair = next((both for both in names.pairs if set(both) <= set(present)), (None, None))
    text = text or next((name for name in names.texts if name in present), None)
    if text is None:
        raise DataError(f"Which column is the {names.word}? Give its name with --text. Columns: {', '.join(present)}.")
    return Columns(text, settings.text_pair or pair, label)


def label_column_name(table: datasets.Dataset, names: Format, settings: Settings) -> str | None:
    """The name of the label column, if there is one."""
    name = settings.label or next((common for common in names.labels if common in table.column_names), None)
    return name if name in table.column_names else None


def cells(table: datasets.Dataset, column: str) -> list[Any]:
    """All cells of a column, read at once: row by row takes much longer. A format of the user's own is kept."""
    found = table[column]
    return found[:] if table.format["type"] is None else list(found)


def read_texts(table: datasets.Dataset, column: str) -> list[str]:
    """Read a column of text; empty rows and values of other types are refused."""
    values = cells(table, column)
    missing = [row for row, value in enumerate(values) if is_missing(value)]
    if missing:
        raise DataError(f"{_rows_have(missing)} no text in {column!r} (empty or NaN): {numbered(missing)}.")
    odd = [row for row, value in enumerate(values) if not isinstance(value, str)]
    if odd:
        raise DataError(f"Column {column!r} holds {type(values[odd[0]]).__name__}, not text, in {numbered(odd)}.")
    return values


def read_words(table: datasets.Dataset, column: str) -> list[tuple[str, ...]]:
    """Read a column of words: lists of them, or texts, which are split at white space."""
    values = [value.split() if isinstance(value, str) else value for value in cells(table, column)]
    missing = [row for row, value in enumerate(values) if is_missing(value) or value == []]
    if missing:
        raise DataError(f"{_rows_have(missing)} no words in {column!r}: {numbered(missing)}.")
    odd = [row for row, value in enumerate(values) if not is_list_of_text(value)]
    if odd:
        raise DataError(f"Column {column!r} holds no list of words, and no text, in {numbered(odd)}.")
    return [tuple(value) for value in values]


def is_list_of_text(value: Any) -> bool:
    """Whether a cell is a list of texts."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def read_labels(table: datasets.Dataset, column: str, split: str) -> LabelColumn:
    """Read the labels of a split in which every row must have one."""
    values = cells(table, column)
    missing = [row for row, value in enumerate(values) if is_missing(value)]
    if missing:
        raise DataError(f"{_rows_have(missing)} no {column!r} ({split}): {numbered(missing)}.")
    return LabelColumn(values, _class_names(table, column), True)


def other_labels(table: datasets.Dataset, names: Format, settings: Settings) -> LabelColumn | None:
    """Read the labels of a split that is not used, if it has any."""
    column = label_column_name(table, names, settings)
    if column is None:
        return None
    values = [value for value in cells(table, column) if not (is_missing(value) or value == -1)]
    return LabelColumn(values, _class_names(table, column), False)


def has_labels(table: datasets.Dataset, names: Format, settings: Settings) -> bool:
    """Whether any row has a label; some data sets hide those of the test split, or write -1."""
    column = label_column_name(table, names, settings)
    return column is not None and not all(value == -1 or is_missing(value) for value in cells(table, column))


def _class_names(table: datasets.Dataset, column: str) -> Sequence[str] | None:
    feature = table.features[column]
    return getattr(getattr(feature, "feature", feature), "names", None)  # a list of classes, or a class


def is_missing(value: Any) -> bool:
    """Whether a cell is empty."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def _rows_have(rows: Sequence[int]) -> str:
    return f"{len(rows)} rows have" if len(rows) > 1 else "1 row has"


def numbered(rows: Sequence[int], most: int = 5) -> str:
    """`rows 1, 2, 3 (counted from 0)`; the first few of many."""
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:most]))}{more} (counted from 0)"
