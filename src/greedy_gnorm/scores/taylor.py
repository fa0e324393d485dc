"""Scores by first-order effects of a gate on the head's output, or of its attention map."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from greedy_gnorm.scores.registry import score
from greedy_gnorm.units import ATTENTION, FFN, Scores, Vector

if TYPE_CHECKING:
    from torch import Tensor

    from greedy_gnorm.data.batches import Batch, Batches
    from greedy_gnorm.model.sites import Sites
    from greedy_gnorm.tasks.objectives import Objective

ONE_BACKWARD = "1 forward, 1 backward"


@score(
    "michel",
    about="the effect of a gate on the unit, normalised by layer",
    paper="Michel et al. 2019",
    cost=ONE_BACKWARD,
    objective="loss",
    kinds=(ATTENTION, FFN),
)
def michel(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The mean absolute derivative of the gate; the scores of each site are divided by their l2 norm."""
    raw = _gate_effects(sites, batches, objective, abs)
    norms = [np.sqrt(np.nansum(np.square(vector))) for vector in raw]
    return Scores([vector / norm if norm > 0 else vector for vector, norm in zip(raw, norms, strict=True)])


@score(
    "michel-raw",
    about="the effect of a gate on the unit",
    paper="Michel et al. 2019",
    cost=ONE_BACKWARD,
    objective="loss",
    kinds=(ATTENTION, FFN),
    comparable=True,
)
def michel_raw(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The mean absolute derivative of the gate."""
    return Scores(_gate_effects(sites, batches, objective, abs))


@score(
    "fisher",
    about="the squared effect of a gate on the unit",
    paper="Kwon et al. 2022",
    cost=ONE_BACKWARD,
    objective="loss",
    kinds=(ATTENTION, FFN),
    comparable=True,
)
def fisher(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The mean squared derivative of the gate.

    Where every token is a sample of its own, as in language models, there is a gate at each token and the squares are
    added: a few blocks of text are too few samples for the squares of sums.
    """
    from greedy_gnorm.tasks.task import task_of

    if task_of(sites.model).tokens_alike:
        return _gate_squares(sites, batches, objective)
    return Scores(_gate_effects(sites, batches, objective, lambda effect: effect.square()))


@score(
    "kl-fisher",
    about="the squared effect of a gate on the unit, with labels drawn from the unpruned model",
    paper="Kwon et al. 2022",
    cost=f"{ONE_BACKWARD}, 1 forward before the run",
    objective="loss",
    kinds=(ATTENTION, FFN),
    comparable=True,
    draws_labels=True,
)
def kl_fisher(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The mean squared derivative of the gate, for labels drawn from the unpruned model's own distribution.

    For such labels the loss is the divergence from the unpruned model, up to a constant, on average: half of the score
    is how much the divergence grows, to second order, when a gate of the unpruned model closes. No labels are needed.

    Where layers share a module, each of its applications has a gate, and the squares are added: in the derivative of
    one gate for all of them, large effects of opposite signs would cancel. Language models have one at each token.
    """
    return _gate_squares(sites, batches, objective)


def _gate_squares(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The mean squared derivatives of gates at every application, or at every token if each is a sample of its own."""
    from greedy_gnorm.passes.gradients import gate_squares
    from greedy_gnorm.tasks.task import task_of

    each_token = task_of(sites.model).tokens_alike
    return Scores(_means(sites, batches, lambda batch: gate_squares(sites, batch, objective, each_token=each_token)))


def _gate_effects(
    sites: Sites, batches: Batches, objective: Objective, size: Callable[[Tensor], Tensor]
) -> list[Vector]:
    from greedy_gnorm.passes.gradients import gate_gradients

    def per_row(batch: Batch) -> list[Tensor]:
        return [size(derivative) for derivative in gate_gradients(sites, batch, objective)]

    return _means(sites, batches, per_row)


def _means(sites: Sites, batches: Batches, per_row: Callable[[Batch], list[Tensor]]) -> list[Vector]:
    from greedy_gnorm.model.modes import frozen
    from greedy_gnorm.passes.means import row_means

    with frozen(sites.model):
        return sites.expand(row_means(sites, batches, per_row))


@score(
    "tis",
    about="attention times its gradient",
    paper="Zhong et al. 2024",
    cost=f"{ONE_BACKWARD} (eager)",
    objective="loss",
)
def tis(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The mean absolute inner product of the attention map and its gradient, summed over applications.

    Query heads that share a key and a value are one unit; their products are summed, as by one gate.
    """
    import torch

    from greedy_gnorm.model.modes import frozen
    from greedy_gnorm.passes.gradients import map_gradients
    from greedy_gnorm.passes.means import row_means

    def per_row(batch: Batch) -> list[Tensor]:
        maps = map_gradients(sites, batch, objective, lambda site, number, weights: weights)
        rows = []
        for site, applications in zip(sites, maps, strict=True):
            total = torch.zeros(len(batch), len(site.survivors), dtype=torch.float64)
            for weights, gradient in applications:
                sums = batch.by_row((weights.double() * gradient.double()).sum((2, 3))).sum(1)  # (B, H)
                total += site.by_unit(sums).sum(-1).cpu()
            rows.append(total.abs())
        return rows

    with frozen(sites.model):
        return Scores(sites.expand(row_means(sites, batches, per_row)))
