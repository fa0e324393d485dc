"""What run.json says of a run before its first step."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greedy_gnorm.batches import Batches
from greedy_gnorm.checkpoint import configuration_fingerprint, weights_fingerprint
from greedy_gnorm.config import Settings
from greedy_gnorm.distributed import count
from greedy_gnorm.measure import parameter_count
from greedy_gnorm.opening import objective_for
from greedy_gnorm.problems import problem_of
from greedy_gnorm.scores import score_with
from greedy_gnorm.sites import find_sites
from greedy_gnorm.strategies import STRATEGIES


def run_header(model: nn.Module, source: dict[str, Any], data: dict[str, Any], given: Settings) -> dict[str, Any]:
    """What run.json says before the first step; `source` is what `told_source` says of the model."""
    config: Any = model.config
    sites = find_sites(model)
    return {
        "model": {
            **source,
            "type": config.model_type,
            "weights": weights_fingerprint(model),
            "configuration": configuration_fingerprint(config),
            "parameters": parameter_count(model),
            "shape": list(sites.shape),
            "sites": [site.name for site in sites],
            "applications": [site.applications for site in sites],
            "removed": [list(head) for head in sites.removed()],
        },
        **asked_for(data, given),
        "quality": problem_of(model).quality,
        "versions": versions(),
        "processes": count(),
        "threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def asked_for(data: dict[str, Any], given: Settings) -> dict[str, Any]:
    """The part of the header that differs between runs on one model."""
    score = score_with(STRATEGIES[given.method].score, given.score_options)
    config = {**given.to_json(), "objective": objective_for(score, given).name}
    return {"data": data, "config": config, "seed": given.seed}


def told_source(given: Any, word: str = "name") -> dict[str, Any]:
    """Where a model or data came from: a path or name, or the kind of an object, which no command can name."""
    if isinstance(given, str | Path):
        return {word: str(given)}
    return {word: type(given).__name__, "in_memory": True}


def described(source: Any, batches: Batches) -> dict[str, Any]:
    """Rows as the header tells them."""
    return {
        **told_source(source, "source"),
        "rows": batches.rows,
        "batches": len(batches),
        "truncated": batches.truncated,
        "fingerprint": batches.fingerprint,
    }


def versions() -> dict[str, str]:
    """What the numbers of a run depend on."""
    packages: Sequence[str] = (
        "greedy-gnorm",
        "torch",
        "transformers",
        "tokenizers",
        "datasets",
        "numpy",
        "scikit-learn",
    )
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
