"""Scores by trying: the quality lost when a head goes, alone or after others."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from greedy_gnorm.batches import Batches
from greedy_gnorm.errors import GnormError
from greedy_gnorm.evaluate import evaluate
from greedy_gnorm.gates import gates
from greedy_gnorm.heads import Head, HeadScores, Matrix
from greedy_gnorm.objectives import Objective
from greedy_gnorm.problems import problem_of
from greedy_gnorm.scores.registry import score
from greedy_gnorm.sites import Sites

CONFIDENCE = 1.96
"""Standard errors to each side that hold 95 % of a normal distribution."""


@score(
    "leave-one-out",
    about="the quality lost when the head alone goes",
    paper="Michel et al. 2019",
    cost="a forward per head",
    needs_labels=True,
    many_passes=True,
)
def leave_one_out(sites: Sites, batches: Batches, objective: Objective) -> HeadScores:
    """Quality with all heads less quality without this one, on the scoring rows."""
    whole = quality_without(sites, batches, ())
    return HeadScores(
        sites.expand(
            [
                [whole - quality_without(sites, batches, [Head(site.index, index)]) for index in site.survivors]
                for site in sites
            ]
        )
    )


@score(
    "shapley",
    about="the quality a head adds, averaged over orders of removal, with a 95 % interval",
    paper="Held and Yang 2022",
    cost="up to permutations x heads forwards",
    needs_labels=True,
    many_passes=True,
)
def shapley(
    sites: Sites, batches: Batches, objective: Objective, *, permutations: int = 10, tolerance: float = 0.01
) -> HeadScores:
    """Truncated Monte Carlo: in random orders, what each head's going costs; `half_width` is its 95 % interval's half.

    Once quality is within the tolerance of that without any head, the heads that follow are taken to cost nothing.
    """
    if permutations < 2:
        raise GnormError(f"Shapley values need at least 2 permutations, not {permutations}.")
    random = np.random.default_rng(batches.seed)
    heads = sites.survivors()
    whole, empty = quality_without(sites, batches, ()), quality_without(sites, batches, heads)
    samples = np.zeros((permutations, len(heads)))
    for sample in samples:
        gone: list[Head] = []
        before = whole
        for place in random.permutation(len(heads)):
            if abs(before - empty) <= tolerance:
                break
            gone.append(heads[place])
            after = quality_without(sites, batches, gone)
            sample[place] = before - after
            before = after
    means = samples.mean(0)
    half_widths = CONFIDENCE * samples.std(0, ddof=1) / np.sqrt(permutations)
    return HeadScores(_placed(sites, heads, means), None, {"half_width": _placed(sites, heads, half_widths)})


def quality_without(sites: Sites, batches: Batches, heads: Collection[Head]) -> float:
    """The quality on these rows with the heads gated to zero."""
    closed: dict[int, torch.Tensor] = {}
    for site in sites:
        gate = torch.tensor([0.0 if Head(site.index, index) in heads else 1.0 for index in site.survivors])
        if len(gate) and not gate.all():
            closed[site.index] = gate
    with gates(sites, closed):
        return evaluate(sites, batches)[problem_of(sites.model).quality]


def _placed(sites: Sites, heads: list[Head], values: Matrix) -> Matrix:
    matrix = np.full(sites.shape, np.nan)
    for head, value in zip(heads, values, strict=True):
        matrix[head] = value
    return matrix
