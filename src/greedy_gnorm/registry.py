"""A registry for each kind of extension: it refuses duplicates and lists its names when one is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from greedy_gnorm.errors import GnormError

T = TypeVar("T")


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
            close = difflib.get_close_matches(name, self._items, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise GnormError(f"Unknown {self.kind} {name!r}.{hint} Choose from: {', '.join(self._items)}.")
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
