"""Objectives: a differentiable number for each row, whose gradients the scores use.

They can be listed and checked without torch, which takes seconds to load: it is imported where it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from greedy_gnorm.errors import DataError, UnsupportedModel
from greedy_gnorm.registry import Registry
from greedy_gnorm.tasks.task import task_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from greedy_gnorm.data.batches import Batch, Batches

ObjectiveFunction: TypeAlias = "Callable[[nn.Module, Batch], Tensor]"

LOGITS, ANYTHING = "logits", "anything"
"""What an objective reads: the logits of one call of the model, or anything from any number of calls."""


@dataclass(frozen=True)
class Objective:
    """A named function (model, batch) -> (B,), what it reads from the model, and whether it needs labels.

    Passes skip whatever does not affect the logits if the objective reads `logits`. One that uses anything else (hidden
    states, attention maps, a second call of the model) must declare `anything`.
    """

    name: str
    about: str
    needs_labels: bool
    needs_reference: bool
    reads: str
    function: ObjectiveFunction

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.needs_labels and batch.labels is None:
            raise DataError(f"The objective {self.name!r} requires labels, but these rows have none.")
        if self.needs_reference and batch.reference is None:
            raise DataError(f"The objective {self.name!r} requires the unpruned model's logits for each row.")
        return self.function(model, batch)


OBJECTIVES: Registry[Objective] = Registry("objective")


def objective(
    name: str, *, about: str, reads: str = ANYTHING, needs_labels: bool = False, needs_reference: bool = False
) -> Callable[[ObjectiveFunction], ObjectiveFunction]:
    """Register a function as an objective."""
    if reads not in (LOGITS, ANYTHING):
        raise ValueError(f"an objective reads {LOGITS!r} or {ANYTHING!r}, not {reads!r}")

    def register(function: ObjectiveFunction) -> ObjectiveFunction:
        OBJECTIVES.add(name, Objective(name, about, needs_labels, needs_reference, reads, function))
        return function

    return register


@objective("logit-norm", about="the l2 norm of the logits (the paper's choice)", reads=LOGITS)
def logit_norm(model: nn.Module, batch: Batch) -> Tensor:
    task = task_of(model)
    return task.row_norms(task.outputs(model, batch), batch)


@objective("loss", about="the task's loss", reads=LOGITS, needs_labels=True)
def loss(model: nn.Module, batch: Batch) -> Tensor:
    assert batch.labels is not None
    task = task_of(model)
    outputs = task.outputs(model, batch)
    return task.row_losses(outputs, batch.labels.to(outputs.device))


@objective("gold-probability", about="the probability of the correct class", reads=LOGITS, needs_labels=True)
def gold_probability(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = _classes(model, batch)
    return logits.softmax(-1).gather(1, labels[:, None])[:, 0]


@objective("margin", about="the correct class's logit minus the largest other logit", reads=LOGITS, needs_labels=True)
def margin(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = _classes(model, batch)
    right = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -math.inf)
    return right - others.amax(-1)


def _classes(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and class numbers, for objectives that require one correct class per row."""
    logits = _class_logits(model, batch)
    assert batch.labels is not None
    return logits, batch.labels.to(logits.device)


def _class_logits(model: nn.Module, batch: Batch) -> Tensor:
    task = task_of(model)
    if not task.one_class:
        raise UnsupportedModel(
            f"This objective requires one correct class per row, but the task is {task.name}: use --objective loss."
        )
    return task.outputs(model, batch)


@objective(
    "kl",
    about="the divergence from the unpruned model's output (zero until a head is removed)",
    reads=LOGITS,
    needs_reference=True,
)
def kl(model: nn.Module, batch: Batch) -> Tensor:
    logits = _class_logits(model, batch)
    assert batch.reference is not None
    return task_of(model).row_divergences(logits, batch.reference, batch)


def with_reference(model: nn.Module, batches: Batches) -> Batches:
    """The same batches with this model's outputs as the reference of each row."""
    import torch

    from greedy_gnorm.model.modes import evaluating

    task = task_of(model)
    with evaluating(model), torch.no_grad():
        items = tuple(replace(batch, reference=task.outputs(model, batch)) for batch in batches)
    return replace(batches, items=items)
