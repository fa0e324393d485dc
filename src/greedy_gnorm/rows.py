"""Means over sentences of what each head shows on each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greedy_gnorm.batches import Batch, Batches
from greedy_gnorm.distributed import of_all
from greedy_gnorm.errors import NonFiniteScore
from greedy_gnorm.sites import Sites

PerRow = Callable[[Batch], Sequence[Tensor]]
"""For one batch, a tensor (..., B, survivors) per site."""


def row_means(sites: Sites, batches: Batches, per_row: PerRow) -> list[NDArray[np.float64]]:
    """The mean over all rows, (..., survivors) per site, summed in float64; a NaN or infinity stops with its place.

    Where several processes have a share of the rows each, the mean is over the rows of all.
    """
    sums: list[NDArray[np.float64]] = []
    problem = None
    for number, batch in enumerate(batches):
        values = per_row(batch)
        problem = problem or _not_finite(sites, values, number, batch)
        totals = [value.double().sum(-2).cpu().numpy() for value in values]
        sums = [total + more for total, more in zip(sums, totals, strict=True)] if sums else totals
    shares = of_all((batches.rows, [total.tolist() for total in sums], problem))
    for _, _, found in shares:
        if found is not None:
            raise NonFiniteScore(found)
    rows = sum(count for count, _, _ in shares)
    parts = [[np.array(total) for total in share] for _, share, _ in shares if share]
    return [sum(site, start=np.zeros(())) / rows for site in zip(*parts, strict=True)]


def _not_finite(sites: Sites, values: Sequence[Tensor], number: int, batch: Batch) -> str | None:
    for site, value in zip(sites, values, strict=True):
        if not torch.isfinite(value).all():
            return (
                f"The score at {site} is NaN or infinite in batch {number} (rows {_some(batch.rows)} of the "
                f"scoring data). Look for NaN in the model's weights, or score with --dtype float32."
            )
    return None


def _some(rows: tuple[int, ...], most: int = 5) -> str:
    return ", ".join(map(str, rows[:most])) + (", ..." if len(rows) > most else "")
