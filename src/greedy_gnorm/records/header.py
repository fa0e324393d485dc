"""The content of run.json before the first step."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.sets import EVALUATION, SCORING, TEST
from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import configuration_fingerprint, weights_fingerprint
from greedy_gnorm.model.families import GROUP_QUERIES, recorded_group_queries
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.sizes import parameter_count
from greedy_gnorm.passes.processes import gather, world_size
from greedy_gnorm.pruning.costs import Costs
from greedy_gnorm.pruning.methods import METHODS, objective_for
from greedy_gnorm.pruning.prepare import quality_measure, units_for
from greedy_gnorm.records.journal import differences, identity
from greedy_gnorm.records.schema import SCHEMA
from greedy_gnorm.scores import score_with
from greedy_gnorm.settings import Settings


def run_header(
    model: nn.Module, source: Any, rows: Mapping[str, tuple[Any, Batches]], given: Settings, costs: Costs | None = None
) -> dict[str, Any]:
    """run.json before the first step; `source` is the model as the caller gave it, `rows` is that of `Prepared`."""
    config: Any = model.config
    sites, measure = find_sites(model, units_for(given)), quality_measure(model, given, rows[EVALUATION][1])
    return {
        "schema": SCHEMA,
        "model": {
            **describe_source(source),
            **({"on_hub": True} if isinstance(source, str | Path) and not Path(source).exists() else {}),
            "type": config.model_type,
            **({GROUP_QUERIES: recorded_group_queries(config)} if hasattr(config, GROUP_QUERIES) else {}),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "weights": weights_fingerprint(model),
            "configuration": configuration_fingerprint(config),
            "parameters": parameter_count(model),
            "sites": [asdict(info) for info in sites.infos],
            "removed": [list(unit) for unit in sites.removed()],
        },
        **asked_for(rows, given),
        "quality": measure.name,
        "higher_is_better": measure.higher_is_better,
        **({"shape": costs.shape._asdict()} if costs is not None and costs.shape is not None else {}),
        **({"times": costs.times.to_json()} if costs is not None and costs.times is not None else {}),
        "versions": versions(),
        "processes": world_size(),
        "threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def asked_for(rows: Mapping[str, tuple[Any, Batches]], given: Settings) -> dict[str, Any]:
    """The part of the header that differs between runs on one model."""
    data = {name: describe_rows(*part) for name, part in rows.items()}
    score = score_with(METHODS[given.method].score, given.score_options)
    config = {**given.to_json(), "objective": objective_for(score, given).name}
    return {"data": data, "config": config, "seed": given.seed}


def describe_source(given: Any, word: str = "name") -> dict[str, Any]:
    """Where a model or data came from: a path or name, or the type of an object in memory."""
    if isinstance(given, str | Path):
        return {word: str(given)}
    return {word: type(given).__name__, "in_memory": True}


def describe_rows(source: Any, batches: Batches) -> dict[str, Any]:
    """Rows as the header describes them; `tokens` are those of all rows, `longest` those of the longest one."""
    lengths = batches.lengths()
    return {
        **describe_source(source, "source"),
        "rows": batches.data_rows,
        "batches": len(batches),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "truncated": batches.truncated,
        "fingerprint": batches.fingerprint,
    }


def sources_of(header: Mapping[str, Any]) -> tuple[str, str | None]:
    """The data of a recorded run, and the evaluation data where that was given too."""
    data = header["data"]
    scoring, last = (data[use]["source"] for use in (SCORING, TEST if TEST in data else EVALUATION))
    return scoring, None if last == scoring else last


def versions() -> dict[str, str]:
    """The versions of the packages that a run's numbers depend on."""
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


def check_processes_agree(header: dict[str, Any]) -> None:
    """Refuse processes whose inputs differ: machines have their own files, and the batches are dealt out in order."""
    first, *others = gather({**identity(header), "tokens_per_batch": header["config"]["tokens_per_batch"]})
    for rank, other in enumerate(others, start=1):
        for name, was, now in differences(first, other):
            raise GnormError(
                f"Processes 0 and {rank} work on different things: {name} is {was!r} and {now!r}. Give every process "
                f"the same model, data and settings."
            )
