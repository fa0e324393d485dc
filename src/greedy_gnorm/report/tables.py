"""Tables as people read them: parameters by module, measured speed; as CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from greedy_gnorm.model.sizes import MEGABYTE, Counts
from greedy_gnorm.units import Latency

FLOAT32 = 4


@dataclass(frozen=True)
class ModuleSize:
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


SIZE_COLUMNS = ("Layer", "Params before", "Share % before", "MB before", "Params after", "Share % after", "MB after")


def size_table(before: Counts, after: Counts) -> list[ModuleSize]:
    """Rows of the table from the counts of the same model before and after."""
    totals = before[0][1], after[0][1]
    return [ModuleSize(name, old, new, *totals) for (name, old), (_, new) in zip(before, after, strict=True)]


def table_cells(rows: Sequence[ModuleSize], quality: tuple[str, float, float] | None = None) -> list[list[str]]:
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
