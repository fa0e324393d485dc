"""Scores that do not run the model: baselines that any other score should beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from greedy_gnorm.scores.registry import score
from greedy_gnorm.units import ATTENTION, FFN, Scores

if TYPE_CHECKING:
    import torch

    from greedy_gnorm.data.batches import Batches
    from greedy_gnorm.model.sites import Sites
    from greedy_gnorm.tasks.objectives import Objective


@score("random", about="a uniform random number", paper="-", cost="none", kinds=(ATTENTION, FFN))
def random(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """A uniform random number for each unit, from the seed of the batches."""
    draws = np.random.default_rng(batches.seed).random(sum(site.total for site in sites))
    ends = np.cumsum([site.total for site in sites])[:-1]
    return Scores(np.split(draws, ends)).without(sites.removed())


@score(
    "magnitude",
    about="the norm of the head's Q, K, V and O weights; of the neuron's row and column",
    paper="Han et al. 2015",
    cost="none",
    kinds=(ATTENTION, FFN),
)
def magnitude(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The l2 norm of the unit's blocks in all projections."""
    import torch

    rows = []
    for site in sites:
        linears = site.inputs
        blocks = [
            _row_squares(site.part(part, out_by_in(linears[path]).mT).mT).view(-1, site.sizes[part])
            for part, path in site.parts.items()
        ]
        blocks.append(site.by_unit(_row_squares(out_by_in(site.output).mT)))  # (units, size) each
        squares = torch.zeros(len(site.survivors), max(block.shape[1] for block in blocks), dtype=torch.float64)
        for block in blocks:
            squares[:, : block.shape[1]] += block.cpu()
        rows.append(squares.sum(1).sqrt().tolist())
    return Scores(sites.expand(rows))


def _row_squares(weights: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row, in float64."""
    return weights.double().square().sum(1)


def out_by_in(linear: torch.nn.Module) -> torch.Tensor:
    """The weight of a Linear or Conv1D with its outputs as rows, without its graph."""
    from transformers.pytorch_utils import Conv1D

    from greedy_gnorm.model.sites import weight_of

    weight = weight_of(linear).detach()
    return weight.mT if isinstance(linear, Conv1D) else weight
