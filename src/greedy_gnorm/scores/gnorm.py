"""The paper's score, as it is and normalised by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from greedy_gnorm.scores.registry import score
from greedy_gnorm.units import ATTENTION, FFN, Scores, Vector

if TYPE_CHECKING:
    from greedy_gnorm.data.batches import Batches
    from greedy_gnorm.model.sites import Sites
    from greedy_gnorm.tasks.objectives import Objective


@score(
    "gnorm",
    about="the product of the norms of the Q, K and V gradients; for a neuron, of its row and column",
    paper="Guo and Sheridan 2026",
    cost="1 forward, 1 backward",
    objective="logit-norm",
    kinds=(ATTENTION, FFN),
)
def gnorm(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The product of the mean norms of the unit's gradients, ordered by the sum of their logarithms.

    A unit with one query head of each group has no key and value of its own: its score is the norm of its queries.
    """
    from greedy_gnorm.passes.gradients import gradient_norms, norms_of

    norms = gradient_norms(sites, batches, objective)
    by_site = [np.stack([norms[name][site.index] for name in norms_of(site)]) for site in sites]  # (3, heads) each
    with np.errstate(divide="ignore"):  # a head without gradient has the logarithm -inf and is removed first
        logs = [np.log(stacked).sum(0) for stacked in by_site]
    return Scores([stacked.prod(0) for stacked in by_site], logs, norms)


@score(
    "gnorm-plus",
    about="the score gnorm of the loss, with labels drawn from the unpruned model, normalised by layer",
    paper="Guo and Sheridan 2026; Michel et al. 2019",
    cost="1 forward, 1 backward, 1 forward before the run",
    objective="loss",
    kinds=(ATTENTION, FFN),
    draws_labels=True,
)
def gnorm_plus(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The product of the mean norms of the unit's gradients, divided by the l2 norm of these products in its layer.

    The norm of the logits can stay the same while the answer changes; for labels drawn from the unpruned model, the
    loss is the divergence from it, up to a constant, on average. Gradients are smaller in some layers than in others,
    and a product of three of them much smaller: without the division, whole layers are removed first. It is made in
    logarithms, in which the products can't underflow.
    """
    found = gnorm(sites, batches, objective)
    logs = [_normalised(vector) for vector in found.keys]
    return Scores([np.exp(vector) for vector in logs], logs, found.parts)


def _normalised(logs: Vector) -> Vector:
    """The logarithms of values that are divided by their l2 norm; NaN is left out."""
    largest = np.nanmax(logs, initial=-np.inf)
    if largest == -np.inf:  # no unit is left, or none has a gradient
        return logs
    normalised: Vector = logs - largest - np.log(np.nansum(np.exp(2 * (logs - largest)))) / 2
    return normalised
