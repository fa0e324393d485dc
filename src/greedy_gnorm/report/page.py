"""What a report page is about: a run, a comparison, or several runs; from the journals alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from greedy_gnorm.comparison.analysis import read_experiment, read_parts
from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.pruning.choices import Choice
from greedy_gnorm.pruning.curves import curve, knee_of, mean_over_curve
from greedy_gnorm.pruning.methods import GREEDY, JOINT
from greedy_gnorm.pruning.run import measure_of, sites_of
from greedy_gnorm.records.journal import EXPERIMENT_FILE, RUN_FILE, Journal
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
from greedy_gnorm.report.tables import Precision, stored_precision
from greedy_gnorm.units import UNIT_WORDS, Measure, SiteInfo, Step

FLAGSHIPS = (GREEDY, JOINT)
"""The methods that come first and are drawn strongest: of heads, and of heads and neurons."""


@dataclass(frozen=True)
class PageRun:
    """A run on the page: its label, the line of the charts that it belongs to, its record."""

    label: str
    line: str
    journal: Journal

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

        A finished walk towards a budget that chose no step is summed up at half of the cost.
        """
        if self.solution is None and self.finished and self.is_compression:
            return at_half(self.steps)
        return self.steps[-1 if self.solution is None else self.solution]

    @property
    def is_compression(self) -> bool:
        """Whether the run works towards a budget."""
        return is_compression(self.journal.header)

    @property
    def kept(self) -> list[Kept]:
        """The units that are left, by kind."""
        return kept_units(self.journal.header, self.steps)

    @property
    def choices(self) -> list[Choice]:
        """The steps that a user may prefer."""
        return choices_of(self.journal.header)

    @property
    def test(self) -> dict[str, Any] | None:
        """The quality on test rows, if the run measured it."""
        test: dict[str, Any] | None = self.journal.header.get("result", {}).get("test")
        return test

    @property
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


def model_title(model: Mapping[str, Any]) -> str:
    """A short name for the model of a record: a name on the hub as it is, the last part of a folder's path."""
    name = str(model["name"])
    return name if model.get("on_hub") else Path(os.path.abspath(name)).name or name


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
    return Page([PageRun(name, name, journal) for name, journal in zip(names, journals, strict=True)])


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
