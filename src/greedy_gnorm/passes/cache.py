"""A cache for what the layers of a model computed for a batch, for the next pass over that batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from greedy_gnorm.model.sites import Sites


@dataclass(frozen=True)
class CachedPass:
    """What the layers of a model computed in the last pass over a batch, and the state that each was in."""

    inputs: Any  # the batch's tensors; their id is the key, which stays unique while they are referenced here
    states: Sequence[Hashable]
    layers: list[Any]


class Cache:
    """The last passes over some batches, within a budget of bytes; a pass that does not fit is not stored.

    A cache that is not used `between_steps` stores none: its budget is for the pass that is going on.
    """

    def __init__(self, budget: int = 0, *, between_steps: bool = True) -> None:
        self.budget = budget
        self._between_steps = between_steps
        self._passes: dict[tuple[int, bool], CachedPass] = {}
        self._bytes: dict[tuple[int, bool], int] = {}

    @property
    def room(self) -> int:
        """The bytes that are left of the budget."""
        return self.budget - sum(self._bytes.values())

    def get(self, inputs: Any, *, graph: bool) -> CachedPass | None:
        """The last pass over these inputs, with or without a graph for gradients."""
        return self._passes.get((id(inputs), graph))

    def knows_size(self, inputs: Any, *, graph: bool) -> bool:
        """Whether the size of this pass has been measured."""
        return (id(inputs), graph) in self._bytes

    def store(self, cached: CachedPass, *, graph: bool, size: float = 0) -> bool:
        """Store a pass if it fits; one that fitted before fits again, because models only shrink."""
        key = (id(cached.inputs), graph)
        if key not in self._bytes:
            fits = self._between_steps and size <= self.room
            self._bytes[key] = int(size) if fits else 0
            if fits:
                self._passes[key] = cached
            return fits
        if key in self._passes:
            self._passes[key] = cached
        return key in self._passes


def cache_of(sites: Sites) -> Cache:
    """The cache of a model's passes."""
    if sites.cache is None:
        sites.cache = Cache(sites.savings.kept_bytes, between_steps=sites.savings.between_steps)
    cache: Cache = sites.cache
    return cache
