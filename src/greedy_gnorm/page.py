"""What a report page is about: a run, a comparison, or several runs; from the journals alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from greedy_gnorm.comparison import EXPERIMENT, mean_over_curve, read_experiment, read_parts
from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.heads import Step
from greedy_gnorm.journal import HEADER, Journal
from greedy_gnorm.rules import curve, knee
from greedy_gnorm.strategies import GREEDY


@dataclass(frozen=True)
class Shown:
    """A run on the page: what it is called, the line it belongs to, its record."""

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
        """The chosen step: the run's own, or the knee of a finished walk that chose none; None before the end."""
        if "result" in self.journal.header:
            return int(self.journal.header["result"]["solution"])
        return knee(curve(self.steps)) if self.finished else None

    @property
    def latency(self) -> list[dict[str, Any]]:
        """Measured before and after, where the run has it."""
        return list(self.journal.header.get("result", {}).get("latency", []))


@dataclass(frozen=True)
class Page:
    """What is on one page: a run, a comparison (with its header), or several runs."""

    runs: list[Shown]
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
    def quality(self) -> str:
        return str(self.header["quality"])

    @property
    def best(self) -> Shown:
        """The run that the top of the page speaks of: Greedy-Gnorm's, else the one with the highest curve."""
        first = {run.line: run for run in reversed(self.runs)}
        if len(first) == 1 or GREEDY in first:
            return first.get(GREEDY, self.runs[0])
        return max(first.values(), key=lambda run: mean_over_curve(curve(run.steps)) if run.steps[1:] else -np.inf)


def read_page(folders: Sequence[Path]) -> Page:
    """What the folders hold."""
    if len(folders) == 1 and (folders[0] / EXPERIMENT).exists():
        parts = read_parts(folders[0])
        header = read_experiment(folders[0])
        runs = [
            Shown(f"{method}, run {place + 1}" if len(journals) > 1 else method, method, journal)
            for method, journals in parts.items()
            for place, journal in enumerate(journals)
        ]
        return Page(runs, header)
    journals = [_run(folder) for folder in folders]
    measures = sorted({str(journal.header["quality"]) for journal in journals})
    if len(measures) > 1:
        raise RunFolderError(f"These runs can't be on one page: some measure {measures[0]}, others {measures[1]}.")
    names = _labels(journals)
    return Page([Shown(name, name, journal) for name, journal in zip(names, journals, strict=True)])


def _run(folder: Path) -> Journal:
    if (folder / EXPERIMENT).exists():
        raise RunFolderError(f"{folder} holds a comparison, which has a page of its own: name it alone.")
    if not (folder / HEADER).exists():
        raise RunFolderError(f"{folder} holds no run and no comparison (no {HEADER}, no {EXPERIMENT}).")
    journal = Journal.read(folder)
    if not journal.steps:
        raise RunFolderError(f"The run in {folder} has no step yet.")
    return journal


def _labels(journals: Sequence[Journal]) -> list[str]:
    """The methods where they tell the runs apart, else with their folders."""
    methods = [str(journal.header["config"]["method"]) for journal in journals]
    if len(set(methods)) == len(methods):
        return methods
    return [f"{method} ({journal.folder})" for method, journal in zip(methods, journals, strict=True)]
