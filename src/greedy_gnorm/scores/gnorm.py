"""The paper's score."""

from __future__ import annotations

import numpy as np

from greedy_gnorm.batches import Batches
from greedy_gnorm.gradients import gradient_norms
from greedy_gnorm.heads import HeadScores
from greedy_gnorm.objectives import Objective
from greedy_gnorm.passes import PROJECTIONS
from greedy_gnorm.scores.registry import score
from greedy_gnorm.sites import Sites


@score(
    "gnorm",
    about="the product of the norms of the Q, K and V gradients",
    paper="Guo and Sheridan 2026",
    cost="1 forward, 1 backward",
    objective="logit-norm",
)
def gnorm(sites: Sites, batches: Batches, objective: Objective) -> HeadScores:
    """The product of the mean norms of the head's Q, K and V gradients; ordered by the sum of their logarithms."""
    norms = gradient_norms(sites, batches, objective)
    stacked = np.stack([norms[name] for name in PROJECTIONS])
    with np.errstate(divide="ignore"):  # a head without any gradient has the logarithm -inf: the first to go
        logs = np.log(stacked).sum(0)
    return HeadScores(stacked.prod(0), logs, norms)
