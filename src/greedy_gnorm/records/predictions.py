"""predictions.json: what the unpruned and the pruned model of a run predict on its test rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.records import schema
from greedy_gnorm.records.files import write_json

PREDICTIONS_FILE = "predictions.json"


def write_predictions(folder: Path, content: Mapping[str, Any]) -> None:
    """Write them into the folder of a run."""
    write_json(folder / PREDICTIONS_FILE, content)


def read_predictions(folder: Path) -> dict[str, Any] | None:
    """The predictions of the run in this folder, checked; None if it has none."""
    path = folder / PREDICTIONS_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        fault = schema.predictions_fault(content)
    except (OSError, ValueError, RecursionError) as error:
        fault = str(error)
    if fault is not None:
        raise RunFolderError(f"{path} is damaged, or not the file of a run: {fault}.")
    return dict(content)
