"""The table of choices, which opens the page and the card: the steps of a run that a user may prefer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from greedy_gnorm.pruning.choices import Choice, change_of
from greedy_gnorm.report.page import PageRun
from greedy_gnorm.report.page_tables import signed
from greedy_gnorm.report.tables import in_words, megabytes, take_option, with_interval
from greedy_gnorm.units import Measure

SOLUTION = "solution"


@dataclass(frozen=True)
class ChoiceRow:
    """A row of the table: the name, the step, the cells after the name, and the option that takes it."""

    name: str
    step: int
    cells: list[str]
    option: str
    is_solution: bool

    def command(self, folder: Path) -> str:
        """The command that writes this choice of the run in a folder as a model."""
        out = shlex.quote(f"{folder}-step-{self.step}")
        return f"gnorm prune --from-run {shlex.quote(str(folder))} {self.option} --out {out}"


def choice_columns(run: PageRun, measure: Measure) -> list[str]:
    """The columns of the table of choices."""
    gone = [f"{kept.words} gone" for kept in run.kept]
    quality = f"{in_words(measure.name)} (95 % interval)"
    return ["choice", *gone, "parameters", f"MB ({run.precision.name})", "speed", quality, "change"]


def choice_rows(run: PageRun, measure: Measure) -> list[ChoiceRow]:
    """The unpruned model, then the choices of a run in the order of their steps; the solution is one of them."""
    choices = {choice.step: choice for choice in run.choices}
    places = sorted({0, *choices, run.solution or 0})
    return [_row(run, measure, place, choices.get(place)) for place in places]


def _row(run: PageRun, measure: Measure, place: int, choice: Choice | None) -> ChoiceRow:
    step, speed = run.steps[place], run.speeds[place]
    interval = step.interval if choice is None or choice.interval is None else choice.interval
    cells = [
        *(f"{kept.gone(place):,}" for kept in run.kept),
        f"{step.parameters:,}",
        megabytes(step.bytes),
        str(speed) if place and speed else "",
        with_interval(measure.of(step), interval),
        _change(run, measure, place) if place else "",
    ]
    if choice is not None:
        return ChoiceRow(choice.name, place, cells, take_option(choice), place == run.solution)
    return ChoiceRow(SOLUTION if place else "unpruned", place, cells, f"--at-step {place}", place > 0)


def _change(run: PageRun, measure: Measure, place: int) -> str:
    """The change from the unpruned model, with its paired interval where that is known."""
    change = signed(measure.of(run.steps[place]) - measure.of(run.steps[0]), measure)
    around = change_of(run.steps, place, run.journal.header["data"]["evaluation"]["rows"])
    # A loss stays marked as one
    return change if around is None else type(change)(f"{change} ({around[0]:+.3f} to {around[1]:+.3f})")
