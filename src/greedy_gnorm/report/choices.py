"""The table of choices, which opens the page and the card: the steps of a run that a user may prefer."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from greedy_gnorm.pruning.choices import LOSSES
from greedy_gnorm.report.page import PageRun
from greedy_gnorm.report.page_tables import signed
from greedy_gnorm.report.tables import in_words, megabytes, with_interval
from greedy_gnorm.units import Measure

SOLUTION, KNEE = "solution", "knee"


@dataclass(frozen=True)
class ChoiceRow:
    """A row of the table: the name, the step, and the cells after the name."""

    name: str
    step: int
    cells: list[str]
    is_solution: bool = False


def choice_columns(run: PageRun, measure: Measure) -> list[str]:
    """The columns of the table of choices."""
    gone = [f"{kept.words} gone" for kept in run.kept]
    return ["choice", *gone, "parameters", f"MB ({run.precision.name})", "speed", in_words(measure.name), "change"]


def choice_rows(run: PageRun, measure: Measure) -> list[ChoiceRow]:
    """The unpruned model, then the choices of a run in the order of their steps; the solution is one of them."""
    if not run.choices:
        return []
    names = {choice.step: choice.name for choice in reversed(run.choices)}
    intervals = {choice.step: choice.interval for choice in run.choices}
    if run.solution:
        names.setdefault(run.solution, SOLUTION)
    names[0] = "unpruned"
    return [_row(run, measure, step, names[step], intervals.get(step)) for step in sorted(names)]


def _row(run: PageRun, measure: Measure, place: int, name: str, interval: Sequence[float] | None) -> ChoiceRow:
    step, speed = run.steps[place], run.speeds[place]
    cells = [
        *(f"{kept.gone(place):,}" for kept in run.kept),
        f"{step.parameters:,}",
        megabytes(step.bytes),
        str(speed) if place and speed else "",
        with_interval(measure.of(step), interval),
        signed(measure.of(step) - measure.of(run.steps[0]), measure) if place else "",
    ]
    return ChoiceRow(name, place, cells, is_solution=place > 0 and place == run.solution)


def take_command(folder: Path, row: ChoiceRow) -> str:
    """The command that writes a choice of a run as a model."""
    if row.name in LOSSES:
        where = f"--at drop={LOSSES[row.name]:g}"
    else:
        where = "--at knee" if row.name == KNEE else f"--at-step {row.step}"
    out = shlex.quote(f"{folder}-step-{row.step}")
    return f"gnorm prune --from-run {shlex.quote(str(folder))} {where} --out {out}"
