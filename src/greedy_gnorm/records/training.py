"""The checkpoint of a training, in the folder of its run until the run is finished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.records.files import RESUME, write_bytes, writing_to

if TYPE_CHECKING:
    from torch import Tensor

TRAINING_FILE = "distillation.safetensors"


class KeptTraining:
    """One file: weights, moments, and in its header the step and the state of what is trained.

    Tensors are stored as they are: a training that goes on from here ends with the same bits.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / TRAINING_FILE

    def load(self, state: Mapping[str, Any], like: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]] | None:
        """The step and the tensors that were kept, if they are those of a training in this state."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                about = file.metadata() or {}
                if json.loads(about["state"]) != dict(state):
                    return None
                step, tensors = int(about["step"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
            raise self._damaged(error) from error
        shapes, expected = ({name: tensor.shape for name, tensor in some.items()} for some in (tensors, like))
        if shapes != expected:
            raise self._damaged("its tensors are not those of the model")
        if not 0 < step <= state["steps"]:
            raise self._damaged(f"it is after step {step}")
        return step, tensors

    def save(self, state: Mapping[str, Any], step: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace the file."""
        from safetensors.torch import save

        content = save(dict(tensors), {"step": str(step), "state": json.dumps(dict(state))})
        with writing_to(self.path, RESUME):
            write_bytes(self.path, content)

    def clear(self) -> None:
        """Delete the file: the run is finished."""
        with writing_to(self.path):
            self.path.unlink(missing_ok=True)

    def _damaged(self, why: object) -> RunFolderError:
        return RunFolderError(f"{self.path} is damaged ({why}): delete it; the training starts again.")
