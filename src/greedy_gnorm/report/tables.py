"""Tables as people read them: parameters by module, measured speed; as CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greedy_gnorm.comparison.analysis import Comparison
from greedy_gnorm.model.sizes import MEGABYTE, Counts
from greedy_gnorm.pruning.choices import AND, FREE, LOSSES, RELATIVE_LOSSES, Choice
from greedy_gnorm.units import Latency, Measure, Step, quality_text

Quality = tuple[str, float, float]
"""The name of the measure, its value before and after."""


def in_words(name: str) -> str:
    """The name of a measure or a setting as people write it."""
    return name.replace("_", " ")


def measure_title(measure: Measure) -> str:
    """The measure as a title; its direction is stated where lower is better."""
    name = in_words(measure.name).capitalize()
    return name if measure.higher_is_better else f"{name} (lower is better)"


@dataclass(frozen=True)
class Precision:
    """How weights are stored, which turns parameters into megabytes."""

    name: str
    bytes: int


FLOAT32 = Precision("float32", 4)
"""The precision of the paper's parameter tables, whatever a model is stored in."""


def stored_precision(header: Mapping[str, Any], unpruned: Step) -> Precision:
    """The precision that the model of a run is stored in; records of 0.1.0 tell only the number of bits."""
    size = unpruned.bytes // unpruned.parameters
    unnamed = FLOAT32.name if size == FLOAT32.bytes else f"{8 * size} bits"
    return Precision(header["model"].get("dtype", unnamed), size)


def megabytes(size: int) -> str:
    """Bytes as text in MB."""
    return f"{size / MEGABYTE:.2f}"


@dataclass(frozen=True)
class ModuleSize:
    """The parameters of a module before and after, and those of the whole model."""

    name: str
    before: int
    after: int
    total_before: int
    total_after: int

    def cells(self, precision: Precision) -> list[str]:
        """Params, share in %, MB; before, then after."""
        sides = ((self.before, self.total_before), (self.after, self.total_after))
        return [
            cell
            for count, total in sides
            for cell in (f"{count:,}", f"{100 * count / total:.2f}", megabytes(count * precision.bytes))
        ]


@dataclass(frozen=True)
class SizeTable:
    """The parameter table of a model: its modules before and after, and the quality of a run that measured it."""

    rows: Sequence[ModuleSize]
    precision: Precision = FLOAT32
    quality: Quality | None = None

    @classmethod
    def of(
        cls, before: Counts, after: Counts, precision: Precision = FLOAT32, quality: Quality | None = None
    ) -> SizeTable:
        """The table from the counts of the same model before and after."""
        totals = before[0][1], after[0][1]
        rows = [ModuleSize(name, old, new, *totals) for (name, old), (_, new) in zip(before, after, strict=True)]
        return cls(rows, precision, quality)

    @property
    def columns(self) -> list[str]:
        """The names of the columns; the precision is that of the sizes."""
        size = self.precision.name
        sides = [(f"Params {side}", f"Share % {side}", f"MB {side} ({size})") for side in ("before", "after")]
        return ["Layer", *sides[0], *sides[1]]

    @property
    def cells(self) -> list[list[str]]:
        """The table as text; the last row is the quality before and after, where it is known."""
        cells = [[row.name, *row.cells(self.precision)] for row in self.rows]
        if self.quality is not None:
            name, before, after = self.quality
            texts = [f"{100 * value:.2f}%" if name == "accuracy" else quality_text(value) for value in (before, after)]
            cells.append([in_words(name).capitalize(), texts[0], "", "", texts[1], "", ""])
        return cells


def as_csv(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Comma-separated; numbers lose the commas between thousands."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[cell.replace(",", "") for cell in row] for row in cells])
    return text.getvalue()


def as_markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


LATENCY_COLUMNS = ("Runtime", "Batch", "Threads", "ms before", "ms after", "Speed-up", "By multiplications")


def latency_cells(latency: Latency) -> list[str]:
    """A measurement as a row of text."""
    times = [
        f"{median:.1f} ({low:.1f} to {high:.1f})"
        for median, (low, high) in (
            (latency.before_ms, latency.before_spread),
            (latency.after_ms, latency.after_spread),
        )
    ]
    promised = "" if latency.promised is None else f"{latency.promised:.2f}"
    shape = f"{latency.batch} x {latency.tokens}"
    return [latency.runtime, shape, str(latency.threads), *times, f"{latency.speed_up:.2f}", promised]


def comparison_tables(comparison: Comparison) -> dict[str, tuple[list[str], list[list[str]]]]:
    """The tables of a comparison by name; walks towards a budget have no knees, so no table of solutions."""
    tables = {"comparison": comparison.summary}
    return tables if comparison.joint else {**tables, "solutions": comparison.solutions}


def test_table(test: Mapping[str, Any], measure: Measure) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of the quality on test rows, before and after, with 95 % intervals where they are known."""
    cells = []
    for name, (before, after) in test["quality"].items():
        known = test["intervals"].get(name)
        sides = [with_interval(value, known and known[side]) for value, side in ((before, "before"), (after, "after"))]
        cells.append([name, *sides, with_interval(after - before, known and known["change"], "+")])
    return [f"{test['rows']:,} test rows (95 % interval)", "before", "after", "change"], cells


def distilled_text(distilled: Mapping[str, Any], measure: Measure) -> str:
    """How long a model was trained, and what that changed on the rows that its step was chosen on."""
    before, after = (quality_text(value) for value in distilled["quality"][measure.name])
    return (
        f"What is left was trained for {distilled['steps']:,} steps towards the unpruned model; on the rows that the "
        f"step was chosen on, {in_words(measure.name)} went from {before} to {after}."
    )


def with_interval(value: float, interval: Sequence[float] | None, sign: str = "") -> str:
    """A value, or a change if `sign` is +, with its 95 % interval where that is known."""
    around = f" ({' to '.join(quality_text(end, sign) for end in interval)})" if interval else ""
    return quality_text(value, sign) + around


def choices_table(choices: Sequence[Choice], first: Step, measure: Measure) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of the steps that a user may prefer, after the unpruned model."""
    size = [f"{first.parameters:,}", megabytes(first.bytes)]
    rows = [["unpruned", "0", *size, "1", with_interval(measure.of(first), first.interval), ""]]
    for choice in choices:
        gone = "" if choice.removed is None else f"{choice.removed:,}"
        size = [f"{choice.parameters:,}", megabytes(choice.bytes)]
        quality = with_interval(choice.quality, choice.interval)
        rows.append([choice.name, gone, *size, _speed(choice), quality, take_option(choice)])
    quality = f"{measure.name.replace('_', ' ')} (95 % interval)"
    return ["choice", "units gone", "parameters", "MB", "speed", quality, "take it with"], rows


def _speed(choice: Choice) -> str:
    """How many times faster: measured, else as promised, which is marked."""
    if choice.measured:
        return f"{choice.measured:.2f}x"
    return f"~{choice.promised:.2f}x" if choice.promised else ""


def take_option(choice: Choice) -> str:
    """The option of `gnorm prune --from-run` that takes a choice."""
    return f"--at {take_name(choice)}"


def take_name(choice: Choice) -> str:
    """What `Run.at` takes a choice by: the first of its names."""
    name = choice.name.split(AND)[0]
    losses = LOSSES | RELATIVE_LOSSES
    return f"drop={losses[name]:g}" if name in losses and name != FREE else name
