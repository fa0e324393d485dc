"""Results inside a score that takes many passes, kept so that an interruption does not lose them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from greedy_gnorm.model.sites import Sites


class Kept(Protocol):
    """The results of the scoring that is under way, by name; plain JSON values."""

    def begin(self, state: Mapping[str, Any]) -> None:
        """Start or continue the scoring of a model in this state."""

    def result(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result that was kept under this name, else the computed one, which is then kept."""

    def clear(self) -> None:
        """Forget all results: the scores that they belong to are recorded."""


def kept_result(sites: Sites, name: str, compute: Callable[[], Any]) -> Any:
    """A result of a score on this model, from an earlier session if that computed it; equal to the bit."""
    keeper: Kept | None = sites.kept
    return compute() if keeper is None else keeper.result(name, compute)
