"""Rank correlation for many samples of rows at once: scipy's takes one at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.units import Vector


def spearman(first: Vector, second: Vector, weights: NDArray[np.int64]) -> Vector:
    """Spearman's correlation of two columns, (N,), in R samples of their entries, (R,); 0 where a column is constant.

    `weights`, (R, N), says how often each entry is drawn. Equal values share the mean of their ranks.
    """
    places = [np.unique(values, return_inverse=True)[1] for values in (first, second)]
    found = np.zeros(len(weights))
    for sample, times in enumerate(weights.astype(np.float64)):
        ranks = [_centred_ranks(place, times) for place in places]
        spreads = [times @ np.square(each) for each in ranks]
        if min(spreads) > 0:
            found[sample] = (times * ranks[0]) @ ranks[1] / np.sqrt(spreads[0] * spreads[1])
    return found


def _centred_ranks(places: NDArray[np.int64], times: Vector) -> Vector:
    """The rank of each entry minus the mean rank, where entries at equal places are equal and each occurs so often."""
    counts = np.bincount(places, times)
    ends = np.cumsum(counts)
    ranks: Vector = (ends - counts / 2 - ends[-1] / 2)[places]
    return ranks
