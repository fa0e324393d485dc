"""Savings: exact ways to compute less. Each can be switched off; orders and scores stay the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from greedy_gnorm.errors import GnormError

MEBIBYTE = 2**20


def _saving(about: str) -> Any:
    return field(default=True, metadata={"about": about})


@dataclass(frozen=True)
class Savings:
    """Which savings are on, and how many bytes may be kept between passes."""

    kept_layers: bool = _saving("layers below a change are not run again")
    first_token: bool = _saving("the last layer computes what the classifier reads, its first token")
    gram: bool = _saving("gradient norms by X X^T where that is cheaper than forming the gradients")
    kept_bytes: int = 0

    @classmethod
    def names(cls) -> list[str]:
        """Those that can be switched."""
        return [saving.name.replace("_", "-") for saving in fields(cls) if saving.metadata]

    @classmethod
    def named(cls, text: str, megabytes: int = 0) -> Savings:
        """`all`, `none`, or the names of those that are on: kept-layers,gram."""
        known = cls.names()
        names = [name.strip() for name in text.split(",")]
        chosen = known if names == ["all"] else [] if names == ["none"] else names
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise GnormError(f"Unknown saving {unknown[0]!r}. Write all, none, or some of: {', '.join(known)}.")
        on = {name.replace("-", "_"): name in chosen for name in known}
        return replace(cls(**on), kept_bytes=megabytes * MEBIBYTE)


@dataclass(frozen=True)
class Runs:
    """What the layers of a model left in their last pass over one batch, and the state each was in."""

    inputs: Any  # the batch's own tensors: they name the entry, and holding them keeps the name unique
    states: Sequence[Hashable]
    layers: list[Any]


class Kept:
    """The last runs of some batches, within a budget of bytes; what does not fit is simply not kept."""

    def __init__(self, budget: int = 0) -> None:
        self.budget = budget
        self._runs: dict[tuple[int, bool], Runs] = {}
        self._bytes: dict[tuple[int, bool], int] = {}

    def runs(self, inputs: Any, *, graph: bool) -> Runs | None:
        """The last pass over these inputs, with or without a graph for gradients."""
        return self._runs.get((id(inputs), graph))

    def knows(self, inputs: Any, *, graph: bool) -> bool:
        """Whether the size of these runs has been looked at, so that it need not be measured again."""
        return (id(inputs), graph) in self._bytes

    def keep(self, runs: Runs, *, graph: bool, size: int = 0) -> bool:
        """Keep these runs if they fit; runs once kept stay so, for models only shrink."""
        name = (id(runs.inputs), graph)
        if name not in self._bytes:
            fits = sum(self._bytes.values()) + size <= self.budget
            self._bytes[name] = size if fits else 0
            if fits:
                self._runs[name] = runs
            return fits
        if name in self._runs:
            self._runs[name] = runs
        return name in self._runs
