"""Callbacks that log the steps of a run to an experiment tracker: pass one of them as `on_step`.

They log every measure of quality, the cost, the units that are missing in the model and the seconds, by step.
In a comparison, the names begin with the walk, such as `greedy-gnorm-0/quality/accuracy`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from greedy_gnorm.errors import GnormError
from greedy_gnorm.units import Step

Log = Callable[[dict[str, float], int], None]


def tensorboard(folder: str | Path) -> Callable[..., None]:
    """Log to an event file in this folder, for TensorBoard."""
    _require("tensorboard", "TensorBoard")
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return _callback(log)


def mlflow() -> Callable[..., None]:
    """Log to the active run of MLflow, which starts one if there is none."""
    package = _require("mlflow", "MLflow")
    return _callback(lambda numbers, step: package.log_metrics(numbers, step=step))


def wandb() -> Callable[..., None]:
    """Log to the active run of Weights & Biases: call `wandb.init` first."""
    package = _require("wandb", "Weights & Biases")
    return _callback(lambda numbers, step: package.log(numbers, step=step))


def numbers_of(step: Step) -> dict[str, float]:
    """What is logged of a step, by name."""
    numbers: dict[str, float] = {f"quality/{name}": value for name, value in step.quality.items()}
    numbers |= {f"cost/{name}": value for name, value in step.cost.to_json().items()}
    if step.scores is not None:  # all but the first step; a unit without a score was removed before
        units = sum(site.units for site in step.scores.sites)
        numbers["units_removed"] = units - len(step.scores.units()) + len(step.removed)
    return {**numbers, "seconds": sum(step.seconds.values())}


def _callback(log: Log) -> Callable[..., None]:
    """An `on_step` of a run or of a comparison, whose calls begin with the walk."""

    def on_step(*call: Any) -> None:
        *walk, step, _, _ = call
        prefix = f"{walk[0]}/" if walk else ""
        log({prefix + name: value for name, value in numbers_of(step).items()}, step.step)

    return on_step


def _require(package: str, tracker: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise GnormError(f"Logging to {tracker} requires the package {package}: pip install {package}") from error
