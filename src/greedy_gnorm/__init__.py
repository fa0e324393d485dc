"""Make Hugging Face transformers smaller and faster without retraining, with a record of what it costs."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greedy_gnorm.api import compare, compress, prune, score, take_step
    from greedy_gnorm.deployment.bench import bench
    from greedy_gnorm.deployment.evaluation import evaluate
    from greedy_gnorm.errors import DataError, GnormError, NonFiniteScore, RunFolderError, UnsupportedModel
    from greedy_gnorm.model.checkpoint import load
    from greedy_gnorm.model.sites import find_sites
    from greedy_gnorm.model.surgery import remove_heads
    from greedy_gnorm.pruning.run import Run
    from greedy_gnorm.report.writer import write_report
    from greedy_gnorm.units import Scores, Step, Unit

    Head, HeadScores = Unit, Scores

__version__ = version("greedy-gnorm")

_HOMES = {
    "compare": "api",
    "compress": "api",
    "prune": "api",
    "score": "api",
    "take_step": "api",
    "bench": "deployment.bench",
    "evaluate": "deployment.evaluation",
    "DataError": "errors",
    "GnormError": "errors",
    "NonFiniteScore": "errors",
    "RunFolderError": "errors",
    "UnsupportedModel": "errors",
    "load": "model.checkpoint",
    "find_sites": "model.sites",
    "remove_heads": "model.surgery",
    "Run": "pruning.run",
    "write_report": "report.writer",
    "Scores": "units",
    "Step": "units",
    "Unit": "units",
}
"""Public names and their modules; imported when first used, because torch and transformers take seconds."""

_FORMER_NAMES = {"Head": "Unit", "HeadScores": "Scores"}
"""Names of 0.1.0 that still work."""


def __getattr__(name: str) -> Any:
    current = _FORMER_NAMES.get(name, name)
    if current not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[current]}"), current)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


__all__ = [
    "DataError",
    "GnormError",
    "Head",
    "HeadScores",
    "NonFiniteScore",
    "Run",
    "RunFolderError",
    "Scores",
    "Step",
    "Unit",
    "UnsupportedModel",
    "bench",
    "compare",
    "compress",
    "evaluate",
    "find_sites",
    "load",
    "prune",
    "remove_heads",
    "score",
    "take_step",
    "write_report",
]
