"""Objectives: one differentiable number per sentence, whose gradients are what the scores look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from greedy_gnorm.batches import Batch, Batches
from greedy_gnorm.errors import DataError, UnsupportedModel
from greedy_gnorm.modes import evaluating
from greedy_gnorm.problems import problem_of
from greedy_gnorm.registry import Registry

ObjectiveFunction = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Objective:
    """A named function (model, batch) -> (B,), and whether it reads the labels."""

    name: str
    about: str
    needs_labels: bool
    needs_reference: bool
    function: ObjectiveFunction

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.needs_labels and batch.labels is None:
            raise DataError(f"The objective {self.name!r} needs labels, and these rows have none.")
        if self.needs_reference and batch.reference is None:
            raise DataError(f"The objective {self.name!r} needs the unpruned model's own logits beside the rows.")
        return self.function(model, batch)


OBJECTIVES: Registry[Objective] = Registry("objective")


def objective(
    name: str, *, about: str, needs_labels: bool = False, needs_reference: bool = False
) -> Callable[[ObjectiveFunction], ObjectiveFunction]:
    """Register a function as an objective."""

    def register(function: ObjectiveFunction) -> ObjectiveFunction:
        OBJECTIVES.add(name, Objective(name, about, needs_labels, needs_reference, function))
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


@objective("logit-norm", about="the l2 norm of the logits (the paper's choice)")
def logit_norm(model: nn.Module, batch: Batch) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(logits_of(model, batch), dim=-1)
    return norms


@objective("loss", about="the task's loss", needs_labels=True)
def loss(model: nn.Module, batch: Batch) -> Tensor:
    assert batch.labels is not None
    logits = logits_of(model, batch)
    return row_losses(logits, batch.labels.to(logits.device), problem_of(model).name)


@objective("gold-probability", about="the probability of the right class", needs_labels=True)
def gold_probability(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = _one_class(model, batch)
    return logits.softmax(-1).gather(1, labels[:, None])[:, 0]


@objective("margin", about="the right class's logit less the best other", needs_labels=True)
def margin(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = _one_class(model, batch)
    right = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return right - others.amax(-1)


def _one_class(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and class numbers, for objectives that make sense with one right class only."""
    problem = problem_of(model).name
    if problem != "single_label_classification":
        raise UnsupportedModel(f"This objective needs one right class a row; the model's problem is {problem}.")
    assert batch.labels is not None
    logits = logits_of(model, batch)
    return logits, batch.labels.to(logits.device)


@objective(
    "kl", about="the distance to the unpruned model's output (no gradient until a head is gone)", needs_reference=True
)
def kl(model: nn.Module, batch: Batch) -> Tensor:
    logits, problem = logits_of(model, batch), problem_of(model).name
    if problem != "single_label_classification":
        raise UnsupportedModel(f"The objective 'kl' compares class probabilities; the model's problem is {problem}.")
    assert batch.reference is not None
    reference = batch.reference.to(logits).log_softmax(-1)
    return functional.kl_div(logits.log_softmax(-1), reference, reduction="none", log_target=True).sum(-1)


def with_reference(model: nn.Module, batches: Batches) -> Batches:
    """The same batches with this model's logits beside the rows."""
    with evaluating(model), torch.no_grad():
        items = tuple(replace(batch, reference=logits_of(model, batch)) for batch in batches)
    return replace(batches, items=items)


def row_losses(logits: Tensor, labels: Tensor, problem: str) -> Tensor:
    """The loss of each row, (B,), as transformers defines it for the problem."""
    if problem == "regression":
        return functional.mse_loss(logits, labels.to(logits).view_as(logits), reduction="none").mean(-1)
    if problem == "multi_label_classification":
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none").mean(-1)
    return functional.cross_entropy(logits, labels, reduction="none")
