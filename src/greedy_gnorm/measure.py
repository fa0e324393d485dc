"""Sizes: parameters by module before and after, as in the paper's tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from greedy_gnorm.families import FAMILIES

MEGABYTE = 2**20
FLOAT32 = 4


def parameter_count(model: nn.Module) -> int:
    """All parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class SizeRow:
    """A module's parameters before and after, and what they are of the whole model."""

    name: str
    before: int
    after: int
    total_before: int
    total_after: int

    def cells(self) -> list[str]:
        """Params, share in %, MB of float32; before, then after."""
        sides = ((self.before, self.total_before), (self.after, self.total_after))
        return [
            cell
            for count, total in sides
            for cell in (f"{count:,}", f"{100 * count / total:.2f}", f"{count * FLOAT32 / MEGABYTE:.2f}")
        ]


HEADER = ("Layer", "Params before", "Share % before", "MB before", "Params after", "Share % after", "MB after")


Counts = list[tuple[str, int]]
"""Parameters of modules, by their title in the table; titles may recur under different modules."""


def module_counts(model: nn.Module) -> Counts:
    """Parameters of the rows of the paper's tables: the model, its base with its parts, its head with its parts."""
    base = getattr(model, "base_model", model)
    counts = [("Model", parameter_count(model))]
    config: Any = model.config
    if base is not model:
        counts.append((FAMILIES[config.model_type].title, parameter_count(base)))
    counts += _children(base)
    for name, module in model.named_children():
        if module is not base and parameter_count(module):
            counts += [(_title(name), parameter_count(module)), *_children(module)]
    return counts


def _children(module: nn.Module) -> Counts:
    """The counts of a module's parts; of its weight and bias where it has no parts."""
    parts = [(_title(name), parameter_count(child)) for name, child in module.named_children()]
    parts += [(_title(name), parameter.numel()) for name, parameter in module.named_parameters(recurse=False)]
    return [(name, count) for name, count in parts if count]


def _title(name: str) -> str:
    return "Encoder" if name == "transformer" else name.capitalize()


def size_table(before: Counts, after: Counts) -> list[SizeRow]:
    """Rows of the table from the counts of the same model before and after."""
    totals = before[0][1], after[0][1]
    return [SizeRow(name, old, new, *totals) for (name, old), (_, new) in zip(before, after, strict=True)]


def table_cells(rows: Sequence[SizeRow], quality: tuple[str, float, float] | None = None) -> list[list[str]]:
    """The table as text, with a last row for the quality before and after where it is known."""
    cells = [[row.name, *row.cells()] for row in rows]
    if quality is not None:
        name, before, after = quality
        percent = [f"{100 * value:.2f}%" if name == "accuracy" else f"{value:.4f}" for value in (before, after)]
        cells.append([name.replace("_", " ").capitalize(), percent[0], "", "", percent[1], "", ""])
    return cells


def as_csv(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Comma-separated, numbers without their thousands' commas."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([[cell.replace(",", "") for cell in row] for row in cells])
    return text.getvalue()


def as_markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
