"""Scores that look at nothing: what any other score has to beat."""

from __future__ import annotations

import numpy as np

from greedy_gnorm.batches import Batches
from greedy_gnorm.heads import HeadScores
from greedy_gnorm.objectives import Objective
from greedy_gnorm.scores.registry import score
from greedy_gnorm.sites import Sites


@score("random", paper="-", cost="none", uses_objective=False)
def random(sites: Sites, batches: Batches, objective: Objective) -> HeadScores:
    """A uniform number per head, from the batches' seed."""
    draws = np.random.default_rng(batches.seed).random(sites.shape)
    return HeadScores(draws).without(sites.removed())
