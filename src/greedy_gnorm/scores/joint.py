"""Fisher scores of sets: what closing several gates at once does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from greedy_gnorm.errors import NonFiniteScore
from greedy_gnorm.scores.registry import score
from greedy_gnorm.scores.taylor import ONE_BACKWARD
from greedy_gnorm.units import ATTENTION, FFN, Matrix, Scores, Vector, in_order

if TYPE_CHECKING:
    from greedy_gnorm.data.batches import Batches
    from greedy_gnorm.model.sites import Sites
    from greedy_gnorm.tasks.objectives import Objective


@score(
    "fisher-joint",
    about="the squared effect that a gate on the unit adds to those of the units with lower scores",
    paper="Kwon et al. 2022",
    cost=f"{ONE_BACKWARD}, and the products of the units of a layer",
    objective="loss",
    kinds=(ATTENTION, FFN),
    comparable=True,
)
def fisher_joint(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """What the unit adds to the Fisher information of the units removed before it, in the order that adds the least.

    With the derivative g_xu of sentence x by the gate of unit u, a set R of units has the mean over x of (sum over R of
    g_xu)^2: effects that add up count more, effects that cancel out count less. Heads are ordered over all layers,
    neurons within their layer. The part `alone` is the Fisher score. Units that were removed in earlier steps are no
    part of the present model, and of no set. Every row is one sample, so language models need many.
    """
    from greedy_gnorm.passes.gradients import gate_table

    effects = gate_table(sites, batches, objective)
    if not all(np.isfinite(table).all() for table in effects):
        raise NonFiniteScore("The derivatives by gates are NaN or infinite on scoring rows. Check the model's weights.")
    heads = [site.index for site in sites if site.kind == ATTENTION]
    groups = [heads] * bool(heads) + [[site.index] for site in sites if site.kind == FFN]
    values = [np.zeros(len(site.survivors)) for site in sites]
    for group in groups:
        ordered = joint_scores(np.concatenate([effects[index] for index in group], axis=1))
        ends = np.cumsum([len(values[index]) for index in group])[:-1]
        for index, part in zip(group, np.split(ordered, ends), strict=True):
            values[index] = part
    alone = [np.square(table).mean(0) for table in effects]
    return Scores(sites.expand(values), parts={"alone": sites.expand(alone)})


def joint_scores(effects: Matrix) -> Vector:
    """A score for each unit, from the effects of all units on each row, (rows, units).

    What a unit adds may be less than what the one before it did; its score is then a little higher all the same.
    """
    products = effects.T @ effects / len(effects)
    own, shared = products.diagonal().copy(), np.zeros(len(products))
    order: list[int] = []
    added: list[float] = []
    for _ in range(len(products)):
        grows = own + 2 * shared  # the mean of (effects so far + effect of a unit)^2 - (effects so far)^2
        unit = int(grows.argmin())
        order.append(unit)
        added.append(float(grows[unit]))
        own[unit] = np.inf
        shared += products[unit]
    scores = np.zeros(len(products))
    scores[order] = in_order(added)
    return scores
