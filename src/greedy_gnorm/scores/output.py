"""Scores by what a unit adds to the hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greedy_gnorm.scores.registry import score
from greedy_gnorm.units import ATTENTION, FFN, Scores, Vector

if TYPE_CHECKING:
    from torch import Tensor

    from greedy_gnorm.data.batches import Batch, Batches
    from greedy_gnorm.model.sites import Site, Sites
    from greedy_gnorm.tasks.objectives import Objective


@score(
    "output-norm",
    about="the norm of what the unit adds to the hidden states",
    paper="Kobayashi et al. 2020",
    cost="1 forward",
    kinds=(ATTENTION, FFN),
)
def output_norm(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The mean over sentences and tokens of the norm of the unit's output times its output weights.

    It is summed over applications. Hidden states are larger in some layers than in others, and a thousand neurons add
    less than the sum of their norms: the score ranks units within a kind.
    """
    return Scores(output_norms(sites, batches))


def output_norms(sites: Sites, batches: Batches) -> list[Vector]:
    """The mean over sentences and tokens of the norm of what each unit adds, one vector per site."""
    import torch

    from greedy_gnorm.model.modes import evaluating
    from greedy_gnorm.passes.contexts import contexts
    from greedy_gnorm.passes.means import row_means
    from greedy_gnorm.tasks.task import task_of

    factors = [_factors(site) for site in sites]

    def per_row(batch: Batch) -> list[Tensor]:
        totals = [torch.zeros(len(batch), len(site.survivors), dtype=torch.float64) for site in sites]

        def add(site: Site, context: Tensor) -> None:
            mask = batch.joined(batch.real_tokens(context.shape[1]))  # (B, T)
            exact = context.to(torch.promote_types(context.dtype, torch.float32))
            units = site.by_unit(batch.joined(exact))  # (B, T, units, size)
            added = torch.einsum("btus,uks->btuk", units, factors[site.index].to(units))
            norms = torch.linalg.vector_norm(added, dim=-1, dtype=torch.float64)  # (B, T, units)
            totals[site.index] += ((norms * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)).cpu()

        with contexts(sites, add):
            task_of(sites.model).outputs(sites.model, batch)
        return totals

    with evaluating(sites.model), torch.no_grad():
        return sites.expand(row_means(sites, batches, per_row))


def _factors(site: Site) -> Tensor:
    """For each unit a matrix R, (units, least of size and d, size), with |R c| = |c W| for each of its outputs c.

    It is the triangle of a QR decomposition of the unit's output weights W, and smaller than these.
    """
    import torch

    from greedy_gnorm.scores.baselines import out_by_in

    weights = site.by_unit(out_by_in(site.output).double())  # (d, units, size)
    factors: Tensor = torch.linalg.qr(weights.transpose(0, 1), mode="r").R
    return factors
