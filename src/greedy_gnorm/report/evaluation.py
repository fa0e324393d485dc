"""Tables of two models on the same rows: measures, classes, what is confused, predictions that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from greedy_gnorm.report.tables import as_csv, as_markdown, with_interval

Content = Mapping[str, Any]
"""eval.json."""
Cells = tuple[list[str], list[list[str]]]
"""Columns and rows."""
SIDES = ("before", "after")
KEYS = ("precision", "recall", "f1")


def measure_table(content: Content) -> Cells:
    """Each measure before and after with 95 % intervals, and its change; agreement is that of the pruned model."""
    cells = []
    for name, (before, after) in content["quality"].items():
        known = content["intervals"].get(name, {})
        change = with_interval(after - before, known.get("change"), "+")
        if name == "agreement":  # of the unpruned model with itself
            cells.append([name, "", with_interval(after, known.get("after")), ""])
        else:
            sides = zip((before, after), SIDES, strict=True)
            cells.append([name, *(with_interval(value, known.get(side)) for value, side in sides), change])
    return [f"{content['rows']:,} rows (95 % interval)", *SIDES, "change"], cells


def class_table(content: Content) -> Cells:
    """Precision, recall and F1 of each class, before and after."""
    names = {"f1": "F1"}
    columns = [
        "class",
        content["counted"],
        *(f"{names.get(key, key)} {side}" for key in KEYS for side in SIDES),
        "change of F1",
    ]
    cells = [
        [
            row["class"],
            f"{row['rows']:,}",
            *(f"{row[side][key]:.3f}" for key in KEYS for side in SIDES),
            f"{row['after']['f1'] - row['before']['f1']:+.3f}",
        ]
        for row in content["per_class"]
    ]
    return columns, cells


def confusion_table(content: Content, side: str) -> Cells:
    """How many rows of each class, one to a line, were predicted as each class."""
    matrix = content["confusion"][side]
    cells = [
        [name, *(f"{count:,}" for count in counts)] for name, counts in zip(content["classes"], matrix, strict=True)
    ]
    return [f"{side}: label \\ predicted", *content["classes"]], cells


def changed_table(content: Content) -> Cells:
    """The rows whose prediction changed."""
    cells = [
        [
            row["text"] if row["text_pair"] is None else f"{row['text']} / {row['text_pair']}",
            row["label"] or "",
            *(f"{row[side]['label']} ({row[side]['probability']:.2f})" for side in SIDES),
        ]
        for row in content["changed"]
    ]
    return ["text", "label", *SIDES], cells


def changed_title(content: Content) -> str:
    """How many predictions changed, and how many of these rows are shown."""
    count, shown = content["changed_count"], len(content["changed"])
    some = f"; the {shown} largest changes:" if 0 < shown < count else ":" if shown else "."
    return f"The prediction changed for {count:,} of {content['rows']:,} rows ({count / content['rows']:.1%}){some}"


def evaluation_markdown(content: Content) -> str:
    """All tables in one file."""
    parts = [f"# {content['pruned']} compared with {content['unpruned']}\n", as_markdown(*measure_table(content))]
    if content["per_class"]:
        parts.append(as_markdown(*_escaped(class_table(content))))
    if content["confusion"] is not None:
        parts += [as_markdown(*_escaped(confusion_table(content, side))) for side in SIDES]
        parts.append(f"{changed_title(content)}\n")
    if content["changed"]:
        parts.append(as_markdown(*_escaped(changed_table(content))))
    return "\n".join(parts)


def _escaped(table: Cells) -> Cells:
    """Names and texts of users in one line each, without bars, which divide the cells."""

    def line(cells: Sequence[str]) -> list[str]:
        return [" ".join(cell.split()).replace("|", "\\|") for cell in cells]

    return line(table[0]), [line(row) for row in table[1]]


def evaluation_csv(content: Content) -> dict[str, str]:
    """Tables of plain numbers by name: measures, classes, and the confusion with one line for each pair of classes."""
    rows = []
    for name, values in content["quality"].items():
        known = content["intervals"].get(name, {})
        ends = [known.get(part, ("", "")) for part in (*SIDES, "change")]
        rows.append([name, *map(repr, values), *(str(end) for interval in ends for end in interval)])
    ends_of = [f"{part}_{end}" for part in (*SIDES, "change") for end in ("low", "high")]
    tables = {"measures": as_csv(["measure", *SIDES, *ends_of], rows)}
    if content["per_class"]:
        rows = [
            [row["class"], str(row["rows"]), *(repr(row[side][key]) for key in KEYS for side in SIDES)]
            for row in content["per_class"]
        ]
        tables["classes"] = as_csv(
            ["class", content["counted"], *(f"{key}_{side}" for key in KEYS for side in SIDES)], rows
        )
    if content["confusion"] is not None:
        classes, both = content["classes"], [content["confusion"][side] for side in SIDES]
        rows = [
            [label, predicted, *(str(matrix[first][second]) for matrix in both)]
            for first, label in enumerate(classes)
            for second, predicted in enumerate(classes)
        ]
        tables["confusion"] = as_csv(["label", "predicted", *SIDES], rows)
    return tables
