"""Scores by reconstruction: what the rest of a layer can't make up for when a unit is removed.

Let X be the inputs of a layer's output projection at real tokens, centred if it has a bias, and W its weights. If the
units R are removed and the weights of the others are fitted again, what is lost for each token is

    |X W - X_S W'|^2 + lam |W - W'|^2  =  tr W_R' (P_RR)^-1 W_R,   P = (X'X + lam I)^-1,   lam = ridge * mean diagonal,

the error of the optimal brain surgeon. Units are removed one after another, each time the one that adds the least
error: of two units that return the same, the first one costs nothing and the second one all. The scores are those of
the present model: after each step, they are those of the units that are left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from greedy_gnorm.errors import GnormError
from greedy_gnorm.scores.registry import score
from greedy_gnorm.units import ATTENTION, FFN, Scores, in_order

if TYPE_CHECKING:
    from greedy_gnorm.data.batches import Batches
    from greedy_gnorm.model.sites import Site, Sites
    from greedy_gnorm.passes.systems import System
    from greedy_gnorm.tasks.objectives import Objective

SOLVING = "and for each layer a system that takes time by the cube of its width"


@score(
    "reconstruction",
    about="the error left after the unit is removed and the output projection fitted again, unit after unit",
    paper="Hassibi and Stork 1993",
    cost=f"1 forward (several if layers are wide), {SOLVING}",
    kinds=(ATTENTION, FFN),
)
def reconstruction(sites: Sites, batches: Batches, objective: Objective, *, ridge: float = 0.01) -> Scores:
    """The squared error for each token that the unit adds when it is removed after those with lower scores.

    The part `alone` is the error of removing only this unit. Errors grow with the hidden states, which are larger in
    some layers than in others: the score ranks units within a kind.
    """
    from greedy_gnorm.passes.systems import output_systems

    _check(ridge)
    return _scores(sites, output_systems(sites, batches), ridge)


@score(
    "reconstruction-loss",
    about="the same error, with tokens and directions weighted by the squared gradients of the loss",
    paper="Hassibi and Stork 1993",
    cost=f"1 forward, 1 backward (several if layers are wide), {SOLVING}",
    objective="loss",
    kinds=(ATTENTION, FFN),
    comparable=True,
)
def reconstruction_loss(sites: Sites, batches: Batches, objective: Objective, *, ridge: float = 0.01) -> Scores:
    """The mean over sentences of sum_tj g_tj^2 e_tj^2 for the error e that the unit adds, as in `reconstruction`.

    g is the gradient at the result of the output projection. With g_tj^2 replaced by the product of its sums over
    tokens and over directions, the error is that of a system whose tokens are weighted by sum_j g_tj^2 and whose
    results are weighted by sum_t g_tj^2 / sum_tj g_tj^2. It estimates the squared change of the loss, as Fisher scores
    do, so heads and neurons of all layers can be compared.
    """
    from greedy_gnorm.passes.systems import weighted_systems

    _check(ridge)
    return _scores(sites, weighted_systems(sites, batches, objective), ridge)


def _check(ridge: float) -> None:
    if not ridge > 0:
        raise GnormError(f"The ridge must be larger than 0, not {ridge:g}.")


def _scores(sites: Sites, systems: Iterable[tuple[Site, System]], ridge: float) -> Scores:
    import torch

    from greedy_gnorm.scores.elimination import eliminate

    vectors, alone = ([np.full(site.total, np.nan) for site in sites] for _ in range(2))
    for site, system in systems:
        try:
            found = eliminate(*system, ridge)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise GnormError(f"The system of {site} is singular with the ridge {ridge:g}: use a larger one.") from error
        survivors = np.array(site.survivors)
        vectors[site.index][survivors[found.order]] = in_order(found.added)
        alone[site.index][survivors] = found.alone
    return Scores(vectors, parts={"alone": alone})
