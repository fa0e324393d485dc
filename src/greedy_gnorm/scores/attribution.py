"""Self-attention attribution: the attention map times its gradient, integrated from no attention to full attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from greedy_gnorm.errors import GnormError
from greedy_gnorm.phases import counted
from greedy_gnorm.scores.registry import score
from greedy_gnorm.units import Scores

if TYPE_CHECKING:
    from torch import Tensor

    from greedy_gnorm.data.batches import Batch, Batches
    from greedy_gnorm.model.sites import Site, Sites
    from greedy_gnorm.tasks.objectives import Objective


@score(
    "attribution",
    about="attention times its gradient, integrated from no attention of the layer to all of it",
    paper="Hao et al. 2020",
    cost="layers x steps forwards and backwards (eager)",
    objective="gold-probability",
    many_passes=True,
)
def attribution(sites: Sites, batches: Batches, objective: Objective, *, steps: int = 20) -> Scores:
    """The mean over sentences of the largest entry of the head's attribution map, summed over applications.

    Query heads that share a key and a value are one unit; their largest entries are averaged.
    """
    import torch

    from greedy_gnorm.model.modes import frozen
    from greedy_gnorm.passes.kept import kept_result
    from greedy_gnorm.passes.means import row_means

    if steps < 1:
        raise GnormError(f"The attribution score requires at least 1 step, not {steps}.")

    def at_site(site: Site, batch: Batch) -> Tensor:
        rows = " ".join(map(str, batch.rows))
        entries = kept_result(
            sites,
            f"site {site.index}, rows {rows}",
            lambda: _largest_entries(sites, site, batch, objective, steps).tolist(),
        )
        return torch.tensor(entries, dtype=torch.float64)

    def per_row(batch: Batch) -> list[Tensor]:
        return [at_site(site, batch) for site in counted(sites, "Integrating", "layer")]

    with frozen(sites.model):
        return Scores(sites.expand(row_means(sites, batches, per_row)))


def _largest_entries(sites: Sites, site: Site, batch: Batch, objective: Objective, steps: int) -> Tensor:
    """The largest attribution of each sentence and head of a site, (B, survivors), summed over applications."""
    import torch

    total = torch.zeros(len(batch), len(site.survivors), dtype=torch.float64)
    if not site.survivors:
        return total
    for application in range(site.applications):
        sums: Tensor | None = None
        for step in range(1, steps + 1):
            scaled, gradient = _scaled_map(sites, site, application, step / steps, batch, objective)
            # scaled is step / steps times the map, so this adds map * gradient / steps
            part = scaled.double() * gradient.double() / step
            sums = part if sums is None else sums + part
        assert sums is not None
        mask = batch.real_tokens(sums.shape[-1])
        real = (mask[:, None, :, None] * mask[:, None, None, :]).bool()  # (B, 1, T, T)
        largest = batch.by_row(sums.masked_fill(~real, -math.inf).amax((2, 3))).amax(1)  # (B, H)
        total += site.by_unit(largest).mean(-1).cpu()
    return total


def _scaled_map(
    sites: Sites, site: Site, application: int, factor: float, batch: Batch, objective: Objective
) -> tuple[Tensor, Tensor]:
    """The attention map of all heads of a site, scaled by a factor, and its gradient."""
    from greedy_gnorm.passes.gradients import map_gradients

    def change(other: Site, number: int, weights: Tensor) -> Tensor:
        return weights * factor if other is site and number == application else weights

    return map_gradients(sites, batch, objective, change)[site.index][application]
