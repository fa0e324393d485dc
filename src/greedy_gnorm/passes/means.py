"""Means over rows of a value for each unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.errors import NonFiniteScore
from greedy_gnorm.model.sites import Sites
from greedy_gnorm.passes.processes import gather, gather_tensors
from greedy_gnorm.phases import counted
from greedy_gnorm.units import Vector

PerRow = Callable[[Batch], Sequence[Tensor]]
"""Takes a batch and returns a tensor (..., B, survivors) for each site."""


def row_means(sites: Sites, batches: Batches, per_row: PerRow) -> list[Vector]:
    """The mean over the rows of all processes, (..., survivors) for each site, summed in float64.

    Raises NonFiniteScore, with the layer and the rows, if a value is NaN or infinite.
    """
    sums: list[Tensor] = []
    for batch in counted(batches.items, "Scoring", "batch"):
        totals = [value.double().sum(-2) for value in per_row(batch)]
        sums = [total + more for total, more in zip(sums, totals, strict=True)] if sums else totals
    sums = [total.cpu() for total in sums]  # only now: a GPU would have to wait after each batch
    finite = all(bool(torch.isfinite(total).all()) for total in sums)
    problem = None if finite else _find_non_finite(sites, batches, per_row)
    shares = gather([batches.rows, [list(total.shape) for total in sums], problem])
    for _, _, found in shares:
        if found is not None:
            raise NonFiniteScore(found)
    rows = sum(count for count, _, _ in shares)
    shapes = next(shapes for _, shapes, _ in shares if shapes)
    flat = torch.cat([total.flatten() for total in sums]) if sums else torch.zeros(0, dtype=torch.float64)
    whole: Tensor = sum((share for share in gather_tensors(flat) if len(share)), torch.zeros((), dtype=torch.float64))
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    return [part.reshape(shape) / rows for part, shape in zip(np.split(whole.numpy(), ends), shapes, strict=True)]


def _find_non_finite(sites: Sites, batches: Batches, per_row: PerRow) -> str:
    """Where the first value is that is not finite, found by computing all of them again."""
    for number, batch in enumerate(batches):
        for site, value in zip(sites, per_row(batch), strict=True):
            if not torch.isfinite(value).all():
                return (
                    f"The score in {site} is NaN or infinite in batch {number} (rows {_first_rows(batch.rows)} of the "
                    f"scoring data). Check the model's weights for NaN, or score with --dtype float32."
                )
    return "The sum of the scores over all rows is infinite. Score with --dtype float64."


def _first_rows(rows: tuple[int, ...], most: int = 5) -> str:
    return ", ".join(map(str, rows[:most])) + (", ..." if len(rows) > most else "")
