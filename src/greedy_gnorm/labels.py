"""Labels of the data as the model counts them, through its `label2id`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from greedy_gnorm.errors import DataError

Label = int | float | tuple[float, ...]


def parse_label_map(text: str | None) -> dict[str, str]:
    """`neg=NEGATIVE,pos=POSITIVE` as a dict: the data's label -> the model's."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    if any(not sign or not ours.strip() or not theirs.strip() for ours, sign, theirs in pairs):
        raise DataError(f"--label-map takes pairs such as neg=NEGATIVE,pos=POSITIVE, not {text!r}.")
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def to_model_labels(
    values: Sequence[Any], names: Sequence[str] | None, config: Any, problem: str, label_map: Mapping[str, str]
) -> list[Label]:
    """Map a label column; `names` are those of a data set's ClassLabel, where the column is numbers behind names."""
    if problem == "regression":
        return _numbers(values)
    known = LabelNames(config, names, label_map)
    if problem == "multi_label_classification":
        return _multi_hot(values, known, int(config.num_labels))
    table = known.table(values)
    return [table[value] for value in values]


class LabelNames:
    """The model's labels, and the ways a data set may write them: by name (any case), or else by number."""

    def __init__(self, config: Any, names: Sequence[str] | None, label_map: Mapping[str, str]) -> None:
        self.count = int(config.num_labels)
        self.by_name = {str(name): int(number) for name, number in config.label2id.items()}
        self.by_lower = {name.lower(): number for name, number in self.by_name.items()}
        self.label_map = label_map
        generic = all(name == f"LABEL_{number}" for name, number in self.by_name.items())
        # A model that never named its labels is counted by number; one that did is matched by name
        self.names = None if generic and names and not label_map else names

    def table(self, values: Iterable[Any]) -> dict[Any, int]:
        """The model's number of each label of a column: all by name, or else all by number, never mixed."""
        values = list(values)
        odd = next((value for value in values if not isinstance(value, str | int | float)), None)
        if odd is not None:
            raise DataError(f"A label must be a name or a number, not {type(odd).__name__}: {odd!r:.80}.")
        wanted = {value: self.label_map.get(str(self.written(value)), str(self.written(value))) for value in values}
        by_name = {value: self.named(name) for value, name in wanted.items()}
        if None in by_name.values() and all(name.isdecimal() and int(name) < self.count for name in wanted.values()):
            return {value: int(name) for value, name in wanted.items()}
        unknown = sorted(wanted[value] for value, number in by_name.items() if number is None)
        if unknown:
            shown = sorted({str(self.written(value)) for value in wanted})
            raise DataError(
                f"The model does not know the label {unknown[0]!r}. "
                f"Labels in the data: {_listed(shown)}. Labels of the model: {_listed(list(self.by_name))}. "
                f"Map them with --label-map, such as {shown[0]}={next(iter(self.by_name))}."
            )
        return {value: number for value, number in by_name.items() if number is not None}

    def written(self, value: Any) -> Any:
        """The label as the data's author wrote it."""
        if self.names is not None and isinstance(value, int) and 0 <= value < len(self.names):
            return self.names[value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def named(self, name: str) -> int | None:
        """The model's number for a name, or None."""
        return self.by_name.get(name, self.by_lower.get(name.lower()))


def _numbers(values: Sequence[Any]) -> list[Label]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise DataError(f"The model is a regression: its labels must be numbers ({error}).") from error
    if not all(map(math.isfinite, numbers)):
        raise DataError("The model is a regression: its labels must be finite numbers, and one is NaN or infinite.")
    return list(numbers)


def _multi_hot(values: Sequence[Any], known: LabelNames, count: int) -> list[Label]:
    if not all(isinstance(value, list | tuple) for value in values):
        raise DataError("The model predicts several labels a row: the label column must hold a list in each row.")
    if all(len(value) == count and all(entry in (0, 1) for entry in value) for value in values):
        return [tuple(float(entry) for entry in value) for value in values]
    table = known.table(entry for value in values for entry in value)
    chosen = [{table[entry] for entry in value} for value in values]
    return [tuple(float(number in numbers) for number in range(count)) for numbers in chosen]


def _listed(names: Sequence[str], most: int = 30) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
