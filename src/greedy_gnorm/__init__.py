"""Prune attention heads from Hugging Face transformer models: Greedy-Gnorm, exact and fast."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greedy_gnorm.checkpoint import load
    from greedy_gnorm.errors import DataError, GnormError, NonFiniteScore, RunFolderError, UnsupportedModel
    from greedy_gnorm.experiment import compare
    from greedy_gnorm.heads import Head, HeadScores, Step
    from greedy_gnorm.outcome import Run
    from greedy_gnorm.replay import take_step
    from greedy_gnorm.report import write_report
    from greedy_gnorm.run import prune, score
    from greedy_gnorm.sites import find_sites
    from greedy_gnorm.surgery import remove_heads

# Public names and where they live; loaded when first used, for torch and transformers take seconds
_ROOMS = {
    "load": "checkpoint",
    "DataError": "errors",
    "GnormError": "errors",
    "NonFiniteScore": "errors",
    "RunFolderError": "errors",
    "UnsupportedModel": "errors",
    "compare": "experiment",
    "Head": "heads",
    "HeadScores": "heads",
    "Step": "heads",
    "Run": "outcome",
    "take_step": "replay",
    "write_report": "report",
    "prune": "run",
    "score": "run",
    "find_sites": "sites",
    "remove_heads": "surgery",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


__all__ = [
    "DataError",
    "GnormError",
    "Head",
    "HeadScores",
    "NonFiniteScore",
    "Run",
    "RunFolderError",
    "Step",
    "UnsupportedModel",
    "compare",
    "find_sites",
    "load",
    "prune",
    "remove_heads",
    "score",
    "take_step",
    "write_report",
]
