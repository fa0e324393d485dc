"""Kendall's correlation of ranks, compared with scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from greedy_gnorm.tasks.ranks import FEW, kendall


@pytest.mark.parametrize("size", [2, 3, 31, FEW, FEW + 1, 1000])
@pytest.mark.parametrize("values", [2, 10, None], ids=["many ties", "some ties", "no ties"])
def test_tau_has_the_digits_of_scipy(size, values):
    chance = np.random.default_rng(size)
    for _ in range(10):
        first, noise = chance.normal(size=(2, size))
        second = first + noise
        if values is not None:
            first, second = (np.floor(values * each) / values for each in (first, second))
        for other in (second, -second, first, noise):
            expected = stats.kendalltau(first, other).statistic
            np.testing.assert_array_equal(kendall(first, other), expected)


def test_infinite_values_have_ranks_and_missing_ones_do_not():
    first = np.array([-np.inf, 1.0, 2.0, np.inf])
    assert kendall(first, first) == 1
    assert kendall(first, first[::-1]) == -1
    assert np.isnan(kendall(first, np.array([1.0, np.nan, 2.0, 3.0])))
    assert np.isnan(kendall(first, np.ones(4)))
