"""What the program is doing right now: long work names its phases, and a display may listen.

Phases lie inside one another, such as the batches of an evaluation within the permutations of a score. Without a
listener they cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


class Phase:
    """A piece of work by name; `total` counts its parts, if they are known, and `unit` is what one is called.

    `share` is how much of the work is done, from 0 to 1, where parts differ too much in length to be counted.
    """

    def __init__(self, name: str, total: int | None = None, unit: str = "") -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0
        self.share: float | None = None
        self.started = time.monotonic()

    def advance(self) -> None:
        """One more part is done."""
        self.done += 1
        _tell()

    def reached(self, share: float) -> None:
        """So much of the work is done."""
        self.share = share
        _tell()

    @property
    def place(self) -> str:
        """`batch 3 of 12`: the part that is worked on."""
        return "" if self.total is None else f"{self.unit} {min(self.done + 1, self.total)} of {self.total}".lstrip()

    @property
    def seconds(self) -> float:
        """How long the phase has lasted."""
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float | None:
        """How long the phase will last at the pace so far, if that can be said."""
        share = self.share if self.share is not None else self.done / self.total if self.total else 0.0
        return self.seconds * (1 - share) / share if share > 0 else None


Listener = Callable[[Sequence[Phase]], None]
"""Called with the phases that are under way, the outermost first, whenever one begins, advances or ends."""

_current: list[Phase] = []
_listeners: list[Listener] = []


@contextmanager
def phase(name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
    """Name the work inside the block."""
    work = Phase(name, total, unit)
    _current.append(work)
    _tell()
    try:
        yield work
    finally:
        _current.remove(work)
        _tell()


def counted(items: Sequence[Item], name: str, unit: str) -> Iterator[Item]:
    """Go through items in a phase that counts them; an item is done when the next one is asked for."""
    with phase(name, len(items), unit) as work:
        for item in items:
            yield item
            work.advance()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell this listener about the phases inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _tell() -> None:
    for listener in _listeners:
        listener(tuple(_current))
