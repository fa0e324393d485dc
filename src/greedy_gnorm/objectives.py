"""Objectives: one differentiable number per sentence, whose gradients are what the scores look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from greedy_gnorm.batches import Batch
from greedy_gnorm.errors import DataError, UnsupportedModel
from greedy_gnorm.problems import problem_of
from greedy_gnorm.registry import Registry

ObjectiveFunction = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Objective:
    """A named function (model, batch) -> (B,), and whether it reads the labels."""

    name: str
    about: str
    needs_labels: bool
    function: ObjectiveFunction

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.needs_labels and batch.labels is None:
            raise DataError(f"The objective {self.name!r} needs labels, and these rows have none.")
        return self.function(model, batch)


OBJECTIVES: Registry[Objective] = Registry("objective")


def objective(name: str, *, about: str, needs_labels: bool) -> Callable[[ObjectiveFunction], ObjectiveFunction]:
    """Register a function as an objective."""

    def register(function: ObjectiveFunction) -> ObjectiveFunction:
        OBJECTIVES.add(name, Objective(name, about, needs_labels, function))
        return function

    return register


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """The model's logits, (B, labels)."""
    logits: Any = getattr(model(**batch.inputs), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else None
        raise UnsupportedModel(
            f"{type(model).__name__} gives logits of shape {shape}; a sequence classifier gives (rows, labels)."
        )
    return logits


@objective("logit-norm", about="the l2 norm of the logits (the paper's choice)", needs_labels=False)
def logit_norm(model: nn.Module, batch: Batch) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(logits_of(model, batch), dim=-1)
    return norms


@objective("loss", about="the task's loss", needs_labels=True)
def loss(model: nn.Module, batch: Batch) -> Tensor:
    assert batch.labels is not None
    return row_losses(logits_of(model, batch), batch.labels, problem_of(model).name)


def row_losses(logits: Tensor, labels: Tensor, problem: str) -> Tensor:
    """The loss of each row, (B,), as transformers defines it for the problem."""
    if problem == "regression":
        return functional.mse_loss(logits, labels.to(logits).view_as(logits), reduction="none").mean(-1)
    if problem == "multi_label_classification":
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none").mean(-1)
    return functional.cross_entropy(logits, labels, reduction="none")
