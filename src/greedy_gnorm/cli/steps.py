"""The steps of a run or of a comparison as they are made: a bar on a terminal, one line for each step elsewhere."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import Any

from greedy_gnorm.cli.progress import Bar, Progress
from greedy_gnorm.cli.terminal import duration
from greedy_gnorm.pruning.run import sites_of, units_of
from greedy_gnorm.records.journal import RUN_FILE, Journal, read_header
from greedy_gnorm.tasks.task import measure_of
from greedy_gnorm.units import Step, quality_text, unit_name


class StepDisplay:
    """Shows each step of the run in a folder; `part` is its name in a comparison."""

    def __init__(self, folder: Path, progress: Progress, part: str = "") -> None:
        self.folder = folder
        self.progress = progress
        self.part = part
        self.timed: tuple[float, int] | None = None
        self.first: Step | None = None
        self.bar = Bar(part)

    def __call__(self, step: Step, gone: int, limit: int) -> None:
        if self.progress.quiet:
            return
        measure, bar = measure_of(self.header), self.bar
        joint = units_of(self.header) != "heads"
        bar.name = self.part or ("Rounds" if joint else "Pruning heads")
        bar.done, bar.total = gone, limit
        left = "" if self.part else self._time_left(gone, limit)
        words = [
            self._work_left(step) if joint else "",
            f"{measure.name} {quality_text(measure.of(step))}",
            left,
        ]
        text = f"round {step.step}/{limit}"
        if not joint:
            heads = ", ".join(unit_name(sites_of(self.header), head) for head in step.removed) or "none"
            text = f"step {step.step}  heads {gone}/{limit}  removed {heads}"
        bar.state = "  ".join(filter(None, [f"{gone}/{limit}", *words]))
        self.progress.bar = bar if step.stop is None else None
        self.progress.line("  ".join(filter(None, [self.part, text, *words, self.progress.whole if self.part else ""])))

    @cached_property
    def header(self) -> dict[str, Any]:
        """The run's record, which is there before its first step."""
        return read_header(self.folder / RUN_FILE)

    def _work_left(self, step: Step) -> str:
        """The share of the multiplications that is left; a run that goes on has its first step in its journal."""
        self.first = self.first or (step if step.step == 0 else Journal.read(self.folder).steps[0])
        before, after = self.first.cost.multiplications, step.cost.multiplications
        return f"{after / before:.1%} of the multiplications" if before and after else ""

    def _time_left(self, gone: int, limit: int) -> str:
        """An upper bound from the pace since the first step seen: a rule may stop earlier."""
        now = time.monotonic()
        if self.timed is None or gone == self.timed[1]:
            self.timed = (now, gone)
            return ""
        seconds = (now - self.timed[0]) / (gone - self.timed[1]) * (limit - gone)
        return f"at most {duration(seconds)} left"


class PartDisplay:
    """Shows a comparison in a folder: the parts one after another, and how long all of them may still take."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self.progress = progress
        self.part: object = None
        self.display: StepDisplay | None = None

    def __call__(self, part: object, step: Step, gone: int, limit: int) -> None:
        if self.display is None or part != self.part:
            self.part = part
            self.display = StepDisplay(self.folder / "parts" / str(part), self.progress, str(part))
        self.display(step, gone, limit)
