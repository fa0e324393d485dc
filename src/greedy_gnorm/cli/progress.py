"""Progress on stderr: a status that redraws itself on a terminal, rare lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from greedy_gnorm.cli.terminal import duration, err, say
from greedy_gnorm.phases import Phase, listening

PATIENCE = 30.0
"""Seconds without a line after which a phase is named where the output is no terminal."""
BAR = 30


class Bar:
    """A piece of work that is counted, such as the steps of a run: how far it is, and what there is to say about it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = 0
        self.total: int | None = None
        self.state = ""


class Progress:
    """Shows the phases that are under way inside the block, and the bar of a run."""

    def __init__(self, *, quiet: bool = False, patience: float = PATIENCE) -> None:
        self.quiet = quiet
        self.patience = patience
        self.phases: Sequence[Phase] = ()
        self.bar: Bar | None = None
        self._spoken = time.monotonic()
        self._spinner = Spinner("line" if not err.encoding.lower().startswith("utf") else "dots")
        self._live: Live | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Progress:
        if not self.quiet:
            self._stack.enter_context(listening(self._heard))
            if err.is_terminal:
                self._live = Live(
                    console=err, get_renderable=self._drawn, transient=True, refresh_per_second=8, redirect_stdout=False
                )
                self._stack.enter_context(self._live)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def line(self, text: str) -> None:
        """A line of its own, where there is no status to redraw."""
        if not self.quiet and self._live is None:
            say(text)
            self._spoken = time.monotonic()

    @property
    def whole(self) -> str:
        """Where the outermost counted phase is, and how long it may still take: `part 3 of 35, about 12 min left`."""
        counted = next((each for each in self.phases if each.total is not None), None)
        return "" if counted is None else ", ".join(filter(None, [counted.place, _left(counted)]))

    def _heard(self, phases: Sequence[Phase]) -> None:
        self.phases = phases
        if self._live is None and phases and time.monotonic() - self._spoken > self.patience:
            self.line(" - ".join(_in_words(each) for each in phases))

    def _drawn(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for each in self.phases:
            table.add_row(*_row(each.name, each.done, each.total, self._spinner, [each.place, _left(each)]))
        if self.bar is not None:
            table.add_row(*_row(self.bar.name, self.bar.done, self.bar.total, self._spinner, [self.bar.state]))
        return Group(table)


def _row(
    name: str, done: int, total: int | None, spinner: RenderableType, words: Sequence[str]
) -> tuple[RenderableType, ...]:
    bar = spinner if total is None else ProgressBar(total=max(total, 1), completed=done, width=BAR)
    return Text(name), bar, Text("  ".join(filter(None, words)))


def _in_words(phase: Phase) -> str:
    parts = [phase.place, duration(phase.seconds), _left(phase)]
    return f"{phase.name}: {', '.join(filter(None, parts))}"


def _left(phase: Phase) -> str:
    seconds = phase.seconds_left
    return "" if seconds is None or phase.seconds < 1 else f"about {duration(seconds)} left"
