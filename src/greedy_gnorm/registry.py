"""A registry for each kind of extension: it refuses duplicates and lists its names when one is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from greedy_gnorm.errors import GnormError

T = TypeVar("T")


def suggestion(name: str, names: Iterable[str]) -> str:
    """` Did you mean ...?` with the name that was probably meant, or nothing.

    A small slip comes first (`greedy-gnrom`), then a name that shares a word (`gnorm`), then a larger slip.
    """
    known = list(names)
    words = set(name.split("-"))
    close = [
        *difflib.get_close_matches(name, known, n=1, cutoff=0.8),
        *(each for each in known if words & set(each.split("-"))),
        *difflib.get_close_matches(name, known, n=1),
    ]
    return f" Did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """Items of one kind (scores, objectives, ...) by name, in the order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> T:
        """Register an item under a name that is not taken."""
        if name in self._items:
            raise ValueError(f"the {self.kind} {name!r} is already registered")
        self._items[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            hint = suggestion(name, self._items)
            raise GnormError(f"Unknown {self.kind} {name!r}.{hint} Choose from: {', '.join(self._items)}.")
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
