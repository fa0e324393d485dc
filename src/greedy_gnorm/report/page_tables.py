"""The tables of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from greedy_gnorm.comparison.analysis import Comparison, knee_heads
from greedy_gnorm.pruning.run import units_at_start
from greedy_gnorm.report.compression import axis_title, counted
from greedy_gnorm.report.page import Page, PageRun, measure_named
from greedy_gnorm.report.tables import comparison_tables, measure_title, megabytes, test_table, with_interval
from greedy_gnorm.report.verdict import measurement
from greedy_gnorm.units import Measure, quality_text, removed_by, unit_name


class Table(NamedTuple):
    """Title, columns and cells; the first column names the row."""

    title: str
    columns: list[str]
    cells: list[list[str]]


class Worse(str):
    """A cell that shows a loss of quality."""


def signed(change: float, measure: Measure, form: str | None = None) -> str:
    """A change of quality as a cell, marked where it is a loss."""
    text = quality_text(change, "+") if form is None else f"{change:{form}}"
    return Worse(text) if measure.worth(change) < 0 and float(text) else text


def tests(page: Page) -> Table | None:
    """The quality of a run on rows that no decision was made on."""
    (run, *others) = page.runs
    if others or run.test is None:
        return None
    columns, cells = test_table(run.test, page.measure)
    for (name, (before, after)), row in zip(run.test["quality"].items(), cells, strict=True):
        measure = page.measure if name == page.quality else measure_named(name)
        row[-1] = Worse(row[-1]) if measure.worth(after - before) < 0 else row[-1]
    return Table(f"{run.test['rows']:,} test rows, with 95 % intervals", ["measure", *columns[1:]], cells)


def comparison(page: Page) -> list[Table]:
    """The tables of a comparison or of several runs."""
    if page.experiment is not None:
        compared = Comparison(page.header, page.curves)
        by = "the multiplications left" if compared.joint else "heads removed"
        titles = {
            "comparison": f"{measure_title(page.measure)} by share of {by}",
            "solutions": "At the knee of the curve, sizes as float32",
        }
        return [Table(titles[name], *table) for name, table in comparison_tables(compared).items()]
    if len(page.runs) > 1 and page.joint:
        return [Table("The runs", _joint_columns(page), [_joint_row(run, page) for run in page.runs])]
    if len(page.runs) > 1:
        return [Table("The runs", _run_columns(page.quality), [_run_row(run, page.measure) for run in page.runs])]
    return []


def latency(page: Page) -> Table | None:
    """Every measurement of the solutions."""
    several = len(page.runs) > 1
    rows = [
        [
            f"{run.label}: {measurement(row)}" if several else measurement(row),
            *(f"{row[side]:.2f}" for side in ("before_ms", "after_ms")),
            f"{row['before_ms'] / row['after_ms']:.2f}",
        ]
        for run in page.runs
        for row in run.latency
    ]
    columns = ["measured with", "before", "after", "times faster"]
    return Table("Measured speed of the solution in milliseconds per batch", columns, rows) if rows else None


def sizes(run: PageRun) -> Table:
    """What the solution, or the last step while unfinished, has left of each part of the cost."""
    first, chosen = run.steps[0], run.summarized
    rows = [
        ["parameters", f"{first.parameters:,}", f"{chosen.parameters:,}", chosen.parameters / first.parameters],
        [f"MB ({run.precision.name})", megabytes(first.bytes), megabytes(chosen.bytes), chosen.bytes / first.bytes],
    ]
    before, after = first.cost.multiplications, chosen.cost.multiplications
    if before and after:
        rows.append(["multiplications of a row", f"{before:,}", f"{after:,}", after / before])
    return Table("Size", ["part", "before", "after", "left"], [[*map(str, row[:3]), f"{row[3]:.1%}"] for row in rows])


def _run_columns(quality: str) -> list[str]:
    """The columns of the table of several runs, which may be stored in different precisions."""
    sides = [f"{name} {side}" for name in (quality, "MB") for side in ("before", "after")]
    return ["run", "heads", "removed", *sides, "stored as", "heads gone at the knee", "ended"]


def _run_row(run: PageRun, measure: Measure) -> list[str]:
    chosen = run.steps[-1 if run.solution is None else run.solution]
    sides = (run.steps[0], chosen)
    return [
        run.label,
        str(units_at_start(run.journal.header)),
        str(len(removed_by(run.steps[: chosen.step + 1]))),
        *(with_interval(measure.of(step), step.interval) for step in sides),
        *(megabytes(step.bytes) for step in sides),
        run.precision.name,
        str(knee_heads(run.steps, measure)),
        run.steps[-1].stop or "unfinished",
    ]


def _joint_columns(page: Page) -> list[str]:
    """The columns of the table of several runs, some of which work towards a budget."""
    sides = [f"{name} {side}" for name in (page.quality, "MB") for side in ("before", "after")]
    gone = [f"{words} removed" for words in page.kinds]
    return ["run", *gone, f"{page.part} left", *sides, "stored as", "ended"]


def _joint_row(run: PageRun, page: Page) -> list[str]:
    chosen, sides = run.summarized, (run.steps[0], run.summarized)
    kinds = {kept.words: f"{kept.gone(chosen.step):,} of {kept.total:,}" for kept in run.kept}
    return [
        run.label,
        *(kinds.get(words, "-") for words in page.kinds),
        f"{page.work(run)[chosen.step]:.1f} %",
        *(with_interval(page.measure.of(step), step.interval) for step in sides),
        *(megabytes(step.bytes) for step in sides),
        run.precision.name,
        run.steps[-1].stop or "unfinished",
    ]


def step_table(run: PageRun) -> Table:
    """Every step, with everything that was measured."""
    if run.is_compression:
        return _round_table(run)
    cells, gone, sites = [], 0, run.sites
    for step in run.steps:
        gone += len(step.removed)
        cells.append(
            [
                str(step.step),
                str(gone),
                ", ".join(unit_name(sites, unit) for unit in step.removed) or "-",
                *map(quality_text, step.quality.values()),
                f"{step.parameters:,}",
                megabytes(step.bytes),
                f"{sum(step.seconds.values()):.2f}",
            ]
        )
    size = f"MB ({run.precision.name})"
    columns = ["step", "heads gone", "removed", *run.steps[0].quality, "parameters", size, "seconds"]
    return Table(f"{len(run.steps) - 1} steps as a table", columns, cells)


def _round_table(run: PageRun) -> Table:
    """The steps of a run towards a budget: units by number, since a round removes hundreds of them."""
    alone = Page([run])
    kinds, work = run.kept, alone.work(run)
    cells = [
        [
            str(step.step),
            *(f"{kept.gone(step.step):,}" for kept in kinds),
            counted(kinds, step.step) or "-",
            *map(quality_text, step.quality.values()),
            f"{work[step.step]:.1f}",
            f"{step.parameters:,}",
            megabytes(step.bytes),
            f"{sum(step.seconds.values()):.2f}",
        ]
        for step in run.steps
    ]
    gone = [f"{kept.words} gone" for kept in kinds]
    left = axis_title(alone.part).lower()
    size = f"MB ({run.precision.name})"
    columns = ["step", *gone, "removed", *run.steps[0].quality, left, "parameters", size, "seconds"]
    return Table(f"{len(run.steps) - 1} steps as a table", columns, cells)


MOST_EXAMPLES = 48
"""How many rows with another prediction a page shows."""


@dataclass(frozen=True)
class Predictions:
    """What the page says of predictions.json: scores of each class, confusions, and rows whose prediction changed."""

    sentence: str
    per_class: Table
    confusions: list[Table]
    examples: list[dict[str, Any]]
    note: str

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Predictions:
        """From a checked file."""
        if "changed" not in content:
            return cls("", _per_class(content), [], [], "")
        rows, count, shown = content["rows"], content["changed_count"], content["changed"][:MOST_EXAMPLES]
        if not count:
            note = "No prediction changed."
        elif not shown:
            note = "The run stored no examples of them (--no-examples)."
        elif len(shown) < count:
            note = f"{len(shown)} of them:"
        else:
            note = "These are all of them:"
        sentence = f"The pruned model predicts another class for {count:,} of {rows:,} test rows" + (
            f" ({count / rows:.1%})." if rows else "."
        )
        return cls(sentence, _per_class(content), list(_confusions(content)), shown, note)


def _per_class(content: Mapping[str, Any]) -> Table:
    """Precision, recall and F1 of each class after pruning, each with its change."""
    names = ("precision", "recall", "f1")
    cells = []
    for each in content["per_class"]:
        values = [each["class"], f"{each['rows']:,}"]
        for name in names:
            before, after = each["before"][name], each["after"][name]
            values += [f"{after:.3f}", signed(after - before, Measure(name), "+.3f")]
        cells.append(values)
    columns = [column for name in names for column in (name.capitalize(), "change")]
    by = ", judged by what the unpruned model predicts" if content.get("labels") == "own" else ""
    return Table(
        f"Each class after pruning, with the change{by}", ["class", content.get("counted", "rows"), *columns], cells
    )


def _confusions(content: Mapping[str, Any]) -> Iterator[Table]:
    truth = "the unpruned model's" if content.get("labels") == "own" else "true"
    for side, title in (("before", "Unpruned model"), ("after", "Pruned model")):
        cells = [
            [name, *(f"{count:,}" for count in row)]
            for name, row in zip(content["classes"], content["confusion"][side], strict=True)
        ]
        yield Table(f"{title}: {truth} classes down, predicted classes across", ["class", *content["classes"]], cells)
