"""Scores that use only attention maps: entropy and confidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from greedy_gnorm.errors import GnormError
from greedy_gnorm.scores.registry import score
from greedy_gnorm.units import Scores, Vector

if TYPE_CHECKING:
    from torch import Tensor

    from greedy_gnorm.data.batches import Batch, Batches
    from greedy_gnorm.model.sites import Site, Sites
    from greedy_gnorm.tasks.objectives import Objective

VARIANTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "A": lambda a, eps: -a.xlogy(a),  # 0 log 0 is 0
    "B": lambda a, eps: -a * (a + eps).log(),
    "C": lambda a, eps: -(a + eps) * (a + eps).log(),
}


@score("entropy", about="the entropy of the attention", paper="Voita et al. 2019", cost="1 forward")
def entropy(sites: Sites, batches: Batches, objective: Objective, *, variant: str = "C", eps: float = 1e-7) -> Scores:
    """The mean over sentences and query tokens of the entropy of the attention, summed over applications.

    Query heads that share a key and a value are one unit; their entropies are averaged.
    """
    if variant not in VARIANTS:
        raise GnormError(f"The entropy score has no variant {variant!r}. Choose from: {', '.join(VARIANTS)}.")

    def per_query(weights: Tensor, keys: Tensor) -> Tensor:
        return (VARIANTS[variant](weights, eps) * keys[:, None, None, :]).sum(-1)

    return Scores(_mean_over_queries(sites, batches, per_query))


@score("confidence", about="the largest attention of a token", paper="Voita et al. 2019", cost="1 forward")
def confidence(sites: Sites, batches: Batches, objective: Objective) -> Scores:
    """The mean over sentences, query tokens and applications of the largest attention.

    Query heads that share a key and a value are one unit; their values are averaged.
    """

    def per_query(weights: Tensor, keys: Tensor) -> Tensor:
        return weights.amax(-1)

    totals = _mean_over_queries(sites, batches, per_query)
    return Scores([total / site.applications for site, total in zip(sites, totals, strict=True)])


def _mean_over_queries(sites: Sites, batches: Batches, per_query: Callable[[Tensor, Tensor], Tensor]) -> list[Vector]:
    """The mean over sentences and tokens of `per_query(maps, key mask)`, (B, H, T), summed over applications."""
    import torch

    from greedy_gnorm.model.modes import evaluating
    from greedy_gnorm.passes.maps import attention_maps
    from greedy_gnorm.passes.means import row_means

    def per_row(batch: Batch) -> list[Tensor]:
        totals = [torch.zeros(len(batch), len(site.survivors), dtype=torch.float64) for site in sites]

        def add(site: Site, weights: Tensor) -> Tensor:
            mask = batch.real_tokens(weights.shape[-1])  # (B, T)
            rows = per_query(weights.float(), mask) * mask[:, None, :]  # (B, H, T)
            sums = batch.by_row(rows.double().sum(-1)).sum(1)  # (B, H)
            totals[site.index] += site.by_unit(sums / batch.joined(mask).sum(-1, keepdim=True)).mean(-1).cpu()
            return weights

        with attention_maps(sites, add):
            sites.model(**batch.inputs)
        return totals

    with evaluating(sites.model), torch.no_grad():
        return sites.expand(row_means(sites, batches, per_row))
