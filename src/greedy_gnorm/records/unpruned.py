"""The model that a recorded run started from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import load, weights_fingerprint
from greedy_gnorm.model.families import GROUP_QUERIES, WHOLE
from greedy_gnorm.model.groups import set_group_queries
from greedy_gnorm.records.journal import Journal


def unpruned_source(journal: Journal, model: str | Path | None) -> str | Path:
    """The folder or name of the model that a run pruned; `model` is where it is now, if it was moved."""
    if model is None and journal.header["model"].get("in_memory"):
        raise GnormError(
            f"The run in {journal.folder} pruned a model given in Python: save that model and name its folder."
        )
    return model or str(journal.header["model"]["name"])


def load_unpruned(journal: Journal, source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the model that a run pruned; a model with other weights is refused."""
    model = load(source, trust_remote_code=trust_remote_code)
    was, now = journal.header["model"]["weights"], weights_fingerprint(model)
    if was != now:
        raise GnormError(
            f"{source} is not the model of the run in {journal.folder}: the fingerprint of its weights is {now}, "
            f"not {was}."
        )
    set_group_queries(model.config, journal.header["model"].get(GROUP_QUERIES, WHOLE))
    return model
