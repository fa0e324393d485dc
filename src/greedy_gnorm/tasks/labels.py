"""Mapping the labels of the data to the model's numbers, using its `label2id`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from greedy_gnorm.data.columns import LabelColumn
from greedy_gnorm.data.rows import IGNORED, Label
from greedy_gnorm.errors import DataError

log = logging.getLogger("greedy_gnorm")


def map_by_name_or_number(
    columns: Sequence[LabelColumn], config: Any, label_map: Mapping[str, str] | None
) -> list[list[Label]]:
    """Map the labels of rows with one class each to the model's numbers, column by column."""
    known = LabelNames(config, label_map or {})
    table = known.table([(column.names, column.used, column.values) for column in columns])
    return [
        [table[known.as_text(value, column.names)] for value in column.values] if column.used else []
        for column in columns
    ]


def map_sets(columns: Sequence[LabelColumn], config: Any, label_map: Mapping[str, str] | None) -> list[list[Label]]:
    """Map rows of several labels, given as lists of labels or of zeros and ones, to tuples of 0.0 and 1.0."""
    known, count = LabelNames(config, label_map or {}), int(config.num_labels)
    values = [value for column in columns if column.used for value in column.values]
    if not all(isinstance(value, list | tuple) for value in values):
        raise DataError("The model predicts several labels per row: the label column must hold a list in each row.")
    if all(len(value) == count and all(entry in (0, 1) for entry in value) for value in values):
        return [
            [tuple(float(entry) for entry in value) for value in column.values] if column.used else []
            for column in columns
        ]
    lists = [[value for value in column.values if isinstance(value, list | tuple)] for column in columns]
    table = known.table(
        [
            (column.names, column.used, [entry for value in rows for entry in value])
            for column, rows in zip(columns, lists, strict=True)
        ]
    )
    mapped: list[list[Label]] = []
    for column in columns:
        sets = [
            {table[known.as_text(entry, column.names)] for entry in value} for value in column.values if column.used
        ]
        mapped.append([tuple(float(number in numbers) for number in range(count)) for numbers in sets])
    return mapped


def map_tags(columns: Sequence[LabelColumn], config: Any, label_map: Mapping[str, str] | None) -> list[list[Label]]:
    """Map rows with a label for every word, given as lists or as texts, to tuples of the model's numbers."""
    known = LabelNames(config, label_map or {})
    lists = [[value.split() if isinstance(value, str) else value for value in column.values] for column in columns]
    for column, rows in zip(columns, lists, strict=True):
        if column.used and not all(isinstance(row, list | tuple) for row in rows):
            raise DataError("The model predicts a tag for every word: the label column must hold a list in each row.")
    table = known.table(
        [
            (column.names, column.used, [tag for row in rows if isinstance(row, list | tuple) for tag in _given(row)])
            for column, rows in zip(columns, lists, strict=True)
        ]
    )
    return [
        [
            tuple(IGNORED if tag in NO_TAG else table[known.as_text(tag, column.names)] for tag in row)
            for row in rows
            if column.used
        ]
        for column, rows in zip(columns, lists, strict=True)
    ]


NO_TAG = (IGNORED, str(IGNORED))
"""How data writes that a word has no tag."""


def _given(tags: Sequence[Any]) -> list[Any]:
    return [tag for tag in tags if tag not in NO_TAG]


class LabelNames:
    """The model's labels, which data may write by name (in any case) or by number."""

    def __init__(self, config: Any, label_map: Mapping[str, str]) -> None:
        self.count = int(config.num_labels)
        self.by_name = {str(name): int(number) for name, number in config.label2id.items()}
        self.by_lower = {name.lower(): number for name, number in self.by_name.items()}
        self.label_map = label_map
        # Labels that were never named are matched by number, others by name
        self.generic = all(name == f"LABEL_{number}" for name, number in self.by_name.items())

    def table(self, columns: Sequence[tuple[Sequence[str] | None, bool, Iterable[Any]]]) -> dict[str, int]:
        """The model's number for each label as written: all labels are read by name, or all by number.

        Each column is given as the names of its classes, whether its rows are used, and its values. Rows that are not
        used help to decide: if they hold a number that is not a name, the numbers in other rows are not names either.
        """
        used: dict[str, None] = {}
        unused: dict[str, None] = {}
        for names, is_used, values in columns:
            for value in values:
                if isinstance(value, str | int | float):
                    (used if is_used else unused)[self.as_text(value, names)] = None
                elif is_used:
                    raise DataError(f"A label must be a name or a number, not {type(value).__name__}: {value!r:.80}.")
        if missing := [label for label in self.label_map if label not in used and label not in unused]:
            raise DataError(
                f"The label map has {missing[0]!r}, but no row has that label. Labels in the data: "
                f"{_join(sorted(used))}."
            )
        wanted = {label: str(self.label_map.get(label, label)) for label in used}
        evidence = [*wanted.values(), *(label for label in unused if self.is_number(label))]
        numbers = all(map(self.is_number, wanted.values()))
        if numbers and any(self.number_of(label) is None for label in evidence):
            if used:
                self.log_choice("number", {label: int(name) for label, name in wanted.items()})
            return {label: int(name) for label, name in wanted.items()}
        by_name = {label: self.number_of(name) for label, name in wanted.items()}
        unknown = sorted(label for label, number in by_name.items() if number is None)
        if unknown:
            mapped = self.label_map.get(unknown[0])
            how = "" if mapped is None else f", which the label map gives for {unknown[0]!r}"
            raise DataError(
                f"The model does not know the label {mapped or unknown[0]!r}{how}. "
                f"Labels in the data: {_join(sorted(used))}. Labels of the model: {_join(list(self.by_name))}. "
                f"Map them, for example: --label-map {self.example(unknown[:4], used=by_name.values())}."
            )
        found = {label: number for label, number in by_name.items() if number is not None}
        if any(map(self.is_number, wanted.values())):
            self.log_choice("name", found)
        return found

    def example(self, labels: Sequence[str], used: Collection[int | None]) -> str:
        """A label map for these labels: to the label that each resembles, else to those that are left, in order."""
        left = [name for name, number in self.by_name.items() if number not in used] or list(self.by_name)
        pairs: dict[str, str] = {}
        for label in labels:
            alike = [name for name in left if _alike(label, name)]
            if alike:
                pairs[label] = alike[0]
                left.remove(alike[0])
        pairs |= dict(zip((label for label in labels if label not in pairs), left, strict=False))
        return ",".join(f"{label}={pairs[label]}" for label in labels if label in pairs)

    def log_choice(self, how: str, table: Mapping[str, int]) -> None:
        """Log how ambiguous labels are read."""
        names = {number: name for name, number in self.by_name.items()}
        pairs = [f"{label} is {names.get(number, number)!r}" for label, number in sorted(table.items())]
        log.info("labels are read by %s: %s", how, _join(pairs, 6))

    def is_number(self, label: str) -> bool:
        """Whether a label is one of the model's numbers."""
        return label.isdecimal() and int(label) < self.count

    def as_text(self, value: Any, names: Sequence[str] | None) -> str:
        """The label as text; `names` are the names of the classes if labels are numbers of a ClassLabel."""
        use_names = names is not None and not (self.generic and not self.label_map)
        if use_names and names is not None and isinstance(value, int) and 0 <= value < len(names):
            return str(names[value])
        return str(int(value) if isinstance(value, float) and value.is_integer() else value)

    def number_of(self, name: str) -> int | None:
        """The model's number for a name, or None if it has no such label."""
        return self.by_name.get(name, self.by_lower.get(name.lower()))


def _alike(label: str, name: str) -> bool:
    """Whether one is the beginning of the other, as `neg` is of NEGATIVE, or they differ by a few letters."""
    first, second = label.lower(), name.lower()
    return first.startswith(second) or second.startswith(first) or bool(get_close_matches(first, [second], cutoff=0.8))


def _join(names: Sequence[str], most: int = 30) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
