"""What the layers of a model computed for a batch, kept for the next pass over it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from greedy_gnorm.model.sites import Sites


@dataclass(frozen=True)
class KeptLayers:
    """What the layers of a model left in their last pass over one batch, and the state each was in."""

    inputs: Any  # the batch's own tensors: they name the entry, and holding them keeps the name unique
    states: Sequence[Hashable]
    layers: list[Any]


class Cache:
    """The last passes over some batches, within a budget of bytes; what does not fit is simply not kept."""

    def __init__(self, budget: int = 0) -> None:
        self.budget = budget
        self._kept: dict[tuple[int, bool], KeptLayers] = {}
        self._bytes: dict[tuple[int, bool], int] = {}

    def get(self, inputs: Any, *, graph: bool) -> KeptLayers | None:
        """The last pass over these inputs, with or without a graph for gradients."""
        return self._kept.get((id(inputs), graph))

    def knows(self, inputs: Any, *, graph: bool) -> bool:
        """Whether the size of this pass is known, so that it need not be measured again."""
        return (id(inputs), graph) in self._bytes

    def keep(self, layers: KeptLayers, *, graph: bool, size: int = 0) -> bool:
        """Keep a pass if it fits; one that was kept once stays, for models only shrink."""
        name = (id(layers.inputs), graph)
        if name not in self._bytes:
            fits = sum(self._bytes.values()) + size <= self.budget
            self._bytes[name] = size if fits else 0
            if fits:
                self._kept[name] = layers
            return fits
        if name in self._kept:
            self._kept[name] = layers
        return name in self._kept


def cache_of(sites: Sites) -> Cache:
    """The cache of a model's passes."""
    if sites.cache is None:
        sites.cache = Cache(sites.savings.kept_bytes)
    cache: Cache = sites.cache
    return cache
