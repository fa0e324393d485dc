"""Scores by trial: the quality lost when a head is removed, alone or after others."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from greedy_gnorm.errors import GnormError
from greedy_gnorm.phases import counted
from greedy_gnorm.scores.registry import score
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import Scores, Unit, Vector

if TYPE_CHECKING:
    from greedy_gnorm.data.batches import Batches
    from greedy_gnorm.model.sites import Sites
    from greedy_gnorm.tasks.objectives import Objective

CONFIDENCE = 1.96
"""The half width of a 95 % interval of a normal distribution, in standard errors."""


@score(
    "leave-one-out",
    about="the quality lost when only this head is removed",
    paper="Michel et al. 2019",
    cost="1 forward per head",
    needs_labels=True,
    many_passes=True,
)
def leave_one_out(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """Quality with all heads minus quality without this one, on the scoring rows."""
    whole, heads = quality_without(sites, batches, ()), sites.survivors()
    losses = [whole - quality_without(sites, batches, [head]) for head in counted(heads, "Removing one", "head")]
    return Scores(_as_vectors(sites, heads, np.array(losses)))


@score(
    "shapley",
    about="the quality that a head adds, averaged over orders of removal, with a 95 % interval",
    paper="Held and Yang 2022",
    cost="up to permutations x heads forwards",
    needs_labels=True,
    many_passes=True,
)
def shapley(
    sites: Sites, batches: Batches, objective: Objective, *, permutations: int = 10, tolerance: float = 0.01
) -> Scores:
    """Truncated Monte Carlo: the mean loss of removing a head, in random orders, and the `half_width` of its interval.

    Once quality is within the tolerance of that without any head, the remaining heads count as free.
    """
    if permutations < 2:
        raise GnormError(f"Shapley values require at least 2 permutations, not {permutations}.")
    random = np.random.default_rng(batches.seed)
    heads = sites.survivors()
    whole, empty = quality_without(sites, batches, ()), quality_without(sites, batches, heads)
    samples = np.zeros((permutations, len(heads)))
    for sample in counted(list(samples), "Removing all", "permutation"):
        gone: list[Unit] = []
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
    return Scores(_as_vectors(sites, heads, means), None, {"half_width": _as_vectors(sites, heads, half_widths)})


def quality_without(sites: Sites, batches: Batches, heads: Collection[Unit]) -> float:
    """The quality on these rows with the heads gated to zero, negated if lower is better."""
    from greedy_gnorm.passes.kept import kept_result

    name = " ".join(f"{head.site}.{head.index}" for head in sorted(heads)) or "none"
    quality: float = kept_result(sites, f"without {name}", lambda: _quality_without(sites, batches, heads))
    return quality


def _quality_without(sites: Sites, batches: Batches, heads: Collection[Unit]) -> float:
    from greedy_gnorm.model.gates import closed
    from greedy_gnorm.passes.evaluation import evaluate

    with closed(sites, heads):
        measure = task_of(sites.model).measure()
        return measure.worth(evaluate(sites, batches)[measure.name])


def _as_vectors(sites: Sites, heads: list[Unit], values: Vector) -> list[Vector]:
    vectors = [np.full(site.total, np.nan) for site in sites]
    for head, value in zip(heads, values, strict=True):
        vectors[head.site][head.index] = value
    return vectors
