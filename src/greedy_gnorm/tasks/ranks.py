"""Rank correlations: Spearman's for many samples of rows at once, as scipy's takes one at a time, and Kendall's."""

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


FEW = 64
"""Of so few entries, all pairs are compared."""


def kendall(first: Vector, second: Vector) -> float:
    """Kendall's tau-b of two columns, (N,), to the digits of scipy.stats, which takes a second or more to load.

    NaN where a column is constant or has a NaN.
    """
    if np.isnan(first).any() or np.isnan(second).any():
        return float("nan")
    order = np.lexsort((second, first))  # where the first are equal, the second ascend, and no pair is swapped
    columns = np.stack([first, second])[:, order]
    changes = columns[:, 1:] != columns[:, :-1]
    pairs = len(first) * (len(first) - 1) // 2
    tied = [_equal_pairs(first), _equal_pairs(second)]
    if pairs in tied:
        return float("nan")
    both = _pairs(np.diff(np.flatnonzero(np.r_[True, changes.any(axis=0), True])))
    balance = pairs - sum(tied) + both - 2 * _swapped_pairs(columns[1])
    tau = balance / np.sqrt(pairs - tied[0]) / np.sqrt(pairs - tied[1])
    return float(min(1.0, max(-1.0, tau)))


def _equal_pairs(values: Vector) -> int:
    return _pairs(np.unique(values, return_counts=True)[1])


def _pairs(counts: NDArray[np.int64]) -> int:
    """The pairs within groups of these sizes."""
    return int((counts * (counts - 1) // 2).sum())


def _swapped_pairs(values: Vector) -> int:
    """How many pairs have the larger value first: those within each half, and those across."""
    if len(values) <= FEW:
        return int(np.triu(values[:, None] > values, 1).sum())
    left, right = np.array_split(values, 2)
    larger = len(left) - np.searchsorted(np.sort(left), right, side="right")
    return _swapped_pairs(left) + _swapped_pairs(right) + int(larger.sum())
