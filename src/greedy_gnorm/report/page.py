"""What a report page is about: a run, a comparison, or several runs; from the journals alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from greedy_gnorm.comparison.analysis import read_experiment, read_parts
from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.pruning.choices import Choice
from greedy_gnorm.pruning.curves import curve, knee_of, mean_over_curve
from greedy_gnorm.pruning.run import sites_of
from greedy_gnorm.records.journal import EXPERIMENT_FILE, RUN_FILE, Journal
from greedy_gnorm.records.predictions import read_predictions
from greedy_gnorm.report.compression import (
    Kept,
    at_half,
    choices_of,
    cost_part,
    is_compression,
    kept_units,
    percent_left,
    work_curve,
)
from greedy_gnorm.report.looks import FLAGSHIPS
from greedy_gnorm.report.names import title
from greedy_gnorm.report.tables import Precision, stored_precision
from greedy_gnorm.tasks.task import TASKS, measure_of
from greedy_gnorm.units import UNIT_WORDS, Measure, SiteInfo, Step


@dataclass(frozen=True)
class Speed:
    """The speed of a step relative to the unpruned model."""

    times: float
    is_measured: bool

    def __str__(self) -> str:
        return f"{self.times:.2f} {'measured' if self.is_measured else 'estimated'}"


def _estimated_speed(step: Step, first: Step) -> Speed | None:
    """By the times that the run measured for each width, or by multiplications; None where it counted neither."""
    for part in ("milliseconds", "multiplications"):
        before, after = (getattr(each.cost, part) for each in (first, step))
        if before and after:
            return Speed(before / after, is_measured=False)
    return None


@dataclass(frozen=True)
class PageRun:
    """A run on the page: its label, the line of the charts that it belongs to, its record."""

    label: str
    line: str
    journal: Journal
    predictions: dict[str, Any] | None = None

    @property
    def steps(self) -> list[Step]:
        return self.journal.steps

    @property
    def finished(self) -> bool:
        return self.steps[-1].stop is not None

    @property
    def solution(self) -> int | None:
        """The chosen step: the run's own, or the knee of a finished walk that chose none; None while unfinished.

        Walks towards a budget have no knee.
        """
        if "result" in self.journal.header:
            return int(self.journal.header["result"]["solution"])
        if self.is_compression:
            return None
        return knee_of(self.steps, measure_of(self.journal.header)) if self.finished else None

    @property
    def summarized(self) -> Step:
        """The step that the top of the page is about: the solution, or the last one while unfinished.

        Where the model was trained, the quality is that after training. A finished walk towards a budget that chose no
        step is summed up at half of the cost.
        """
        if self.solution is None and self.finished and self.is_compression:
            return at_half(self.steps)
        step = self.steps[-1 if self.solution is None else self.solution]
        if self.distilled is None:
            return step
        trained = {name: after for name, (_, after) in self.distilled["quality"].items()}
        return replace(step, quality=trained, interval=None, right=None)

    @property
    def distilled(self) -> dict[str, Any] | None:
        """How long the result was trained, and its quality before and after, if it was."""
        found: dict[str, Any] | None = self.journal.header.get("result", {}).get("distilled")
        return found

    @property
    def is_compression(self) -> bool:
        """Whether the run works towards a budget."""
        return is_compression(self.journal.header)

    @cached_property
    def kept(self) -> list[Kept]:
        """The units that are left, by kind."""
        return kept_units(self.journal.header, self.steps)

    @cached_property
    def choices(self) -> list[Choice]:
        """The steps that a user may prefer."""
        return choices_of(self.journal.header)

    @property
    def test(self) -> dict[str, Any] | None:
        """The quality on test rows, if the run measured it."""
        test: dict[str, Any] | None = self.journal.header.get("result", {}).get("test")
        return test

    @cached_property
    def sites(self) -> list[SiteInfo]:
        return sites_of(self.journal.header)

    @property
    def precision(self) -> Precision:
        """What the sizes of the run are counted in."""
        return stored_precision(self.journal.header, self.steps[0])

    @property
    def latency(self) -> list[dict[str, Any]]:
        """The measurements before and after, if the run has any."""
        return list(self.journal.header.get("result", {}).get("latency", []))

    @property
    def shown_latency(self) -> dict[str, Any] | None:
        """The measurement that the top of the page shows: the shape that choices are timed with, else the first."""
        return self.latency[-1 if self.choices else 0] if self.latency else None

    @cached_property
    def speeds(self) -> list[Speed | None]:
        """How many times as fast as the unpruned model each step is: measured where it was, else estimated."""
        found = [_estimated_speed(step, self.steps[0]) for step in self.steps]
        for choice in self.choices:
            if choice.measured is not None:
                found[choice.step] = Speed(choice.measured, is_measured=True)
        if self.solution is not None and (latency := self.shown_latency):
            found[self.solution] = Speed(latency["before_ms"] / latency["after_ms"], is_measured=True)
        return found


@dataclass(frozen=True)
class Page:
    """What is on one page: a run, a comparison (with its header), or several runs."""

    runs: list[PageRun]
    experiment: dict[str, Any] | None = None

    @property
    def curves(self) -> dict[str, list[list[Step]]]:
        curves: dict[str, list[list[Step]]] = {}
        for run in self.runs:
            curves.setdefault(run.line, []).append(run.steps)
        return curves

    @property
    def header(self) -> dict[str, Any]:
        return self.experiment or self.runs[0].journal.header

    @property
    def measure(self) -> Measure:
        return measure_of(self.header)

    @property
    def quality(self) -> str:
        return self.measure.name

    @property
    def measures(self) -> list[Measure]:
        """Everything that was measured after each step of all runs; the leading measure comes first."""
        others = [name for name in self.runs[0].steps[0].quality if name != self.quality]
        shared = [name for name in others if all(name in run.steps[0].quality for run in self.runs)]
        return [self.measure, *(measure_named(name) for name in shared)]

    @property
    def title(self) -> str:
        """The short names of the models and of the data."""
        titles = list(dict.fromkeys(title(run.journal.header) for run in self.runs))
        return ", ".join(titles) if len(titles) <= 3 else f"{len(self.runs)} runs"

    @property
    def best(self) -> PageRun:
        """The run that the top of the page is about: that of a flagship, else the one with the best curve."""
        first = {run.line: run for run in reversed(self.runs)}
        flagship = next((name for name in FLAGSHIPS if name in first), None)
        if len(first) == 1 or flagship is not None:
            return self.runs[0] if flagship is None else first[flagship]
        return max(first.values(), key=self._height)

    def _height(self, run: PageRun) -> float:
        """The mean of a run's curve, with a sign such that more is better."""
        if not run.steps[1:]:
            return -np.inf
        points = work_curve(run.steps, self.measure, self.part) if self.joint else curve(run.steps, self.measure)
        return self.measure.worth(mean_over_curve(points))

    @property
    def joint(self) -> bool:
        """Whether the runs are shown against the cost that is left, because some of them work towards a budget."""
        return any(run.is_compression for run in self.runs)

    @property
    def part(self) -> str:
        """The part of the cost that runs towards a budget are shown against."""
        return cost_part(run.steps for run in self.runs)

    def work(self, run: PageRun) -> list[float]:
        """How much of that part of the cost is left after each step of a run, in per cent."""
        return percent_left(run.steps, self.part)

    @property
    def kinds(self) -> list[str]:
        """The words for the kinds of units of these runs, heads first."""
        found = {kept.words for run in self.runs for kept in run.kept}
        return [words for word in UNIT_WORDS.values() if (words := f"{word}s") in found]


def measure_named(name: str) -> Measure:
    """A measure beside the leading one, with the direction that a task gives it."""
    known = (each for task in TASKS for each in TASKS[task].metrics)
    return next((each for each in known if each.name == name), Measure(name))


def read_page(folders: Sequence[Path]) -> Page:
    """The page of a comparison, a run or several runs in these folders."""
    if len(folders) == 1 and (folders[0] / EXPERIMENT_FILE).exists():
        parts = read_parts(folders[0])
        header = read_experiment(folders[0])
        runs = [
            PageRun(f"{method}, run {place + 1}" if len(journals) > 1 else method, method, journal)
            for method, journals in parts.items()
            for place, journal in enumerate(journals)
        ]
        return Page(runs, header)
    journals = [_run(folder) for folder in folders]
    measures = sorted({measure_of(journal.header).name for journal in journals})
    if len(measures) > 1:
        raise RunFolderError(f"These runs can't be on one page: some measure {measures[0]}, others {measures[1]}.")
    names = _labels(journals)
    predictions = read_predictions(folders[0]) if len(folders) == 1 else None
    return Page([PageRun(name, name, journal, predictions) for name, journal in zip(names, journals, strict=True)])


def _run(folder: Path) -> Journal:
    if (folder / EXPERIMENT_FILE).exists():
        raise RunFolderError(f"{folder} holds a comparison, which has a page of its own: give only this folder.")
    if not (folder / RUN_FILE).exists():
        raise RunFolderError(f"{folder} holds no run and no comparison (no {RUN_FILE}, no {EXPERIMENT_FILE}).")
    journal = Journal.read(folder)
    if not journal.steps:
        raise RunFolderError(f"The run in {folder} has no step yet.")
    return journal


def _labels(journals: Sequence[Journal]) -> list[str]:
    """The methods where they differ, else methods with folders."""
    methods = [str(journal.header["config"]["method"]) for journal in journals]
    if len(set(methods)) == len(methods):
        return methods
    return [f"{method} ({journal.folder})" for method, journal in zip(methods, journals, strict=True)]
