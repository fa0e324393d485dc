"""predictions.json: what the unpruned and the pruned model predict for the test rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.records.schema import predictions_fault

PREDICTIONS_FILE = "predictions.json"


def read_predictions(folder: Path) -> dict[str, Any] | None:
    """The predictions of a run, or None where it recorded none."""
    path = folder / PREDICTIONS_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} can't be read: {error}.") from error
    fault = predictions_fault(content)
    if fault is not None:
        raise RunFolderError(f"{path} is damaged: {fault}.")
    found: dict[str, Any] = content
    return found
