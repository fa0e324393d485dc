"""Scores that need no pass through the model: what any other score has to beat."""

from __future__ import annotations

import numpy as np
import torch

from greedy_gnorm.batches import Batches
from greedy_gnorm.heads import HeadScores
from greedy_gnorm.objectives import Objective
from greedy_gnorm.scores.registry import score
from greedy_gnorm.sites import Sites, weight_of


@score("random", about="a uniform number from the seed", paper="-", cost="none")
def random(sites: Sites, batches: Batches, objective: Objective) -> HeadScores:
    """A uniform number per head, from the batches' seed."""
    draws = np.random.default_rng(batches.seed).random(sites.shape)
    return HeadScores(draws).without(sites.removed())


@score("magnitude", about="the norm of the head's Q, K, V and O weights", paper="Han et al. 2015", cost="none")
@torch.no_grad()
def magnitude(sites: Sites, batches: Batches, objective: Objective) -> HeadScores:
    """The l2 norm of the head's blocks of all four projections."""
    rows = []
    for site in sites:
        projections = [weight_of(linear) for linear in site.projections.values()]
        blocks = [*projections, weight_of(site.output).mT]  # (D, d) each
        squares = sum(block.double().square().sum(1) for block in blocks)
        assert isinstance(squares, torch.Tensor)
        rows.append(squares.view(-1, site.head_size).sum(1).sqrt().tolist())
    return HeadScores(sites.expand(rows))
