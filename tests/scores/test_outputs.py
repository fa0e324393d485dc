"""Scores by what units return, of heads and neurons, each against a slow, obvious version."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import EVERY_FAMILY, tiny_batch, tiny_model
from twins import slow_output_norms

import greedy_gnorm as gg
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.units import Unit

BATCHES = [tiny_batch(seed=1), tiny_batch(rows=3, seed=2, longest=7)]
STATES = pytest.mark.parametrize("state", ["whole", "cut"])


def model_in(family, state):
    """A model in float64, whole or without some heads, some neurons and one feed-forward."""
    model = tiny_model(family, dtype=torch.float64)
    if state == "cut":
        sites = find_sites(model)
        remove(sites, [Unit(0, 1), *(Unit(1, index) for index in range(0, 24, 3))])
        if len(sites) > 2:
            remove(sites, [Unit(sites[-1].index, index) for index in range(sites[-1].total)])
    return model


def check(model, scores, expected, rtol=1e-9):
    for site, vector, wanted in zip(find_sites(model), scores.vectors, expected, strict=True):
        np.testing.assert_allclose(vector[site.survivors], wanted, rtol=rtol)
        assert np.isnan(np.delete(vector, site.survivors)).all()


@EVERY_FAMILY
@STATES
def test_output_norm_is_the_norm_of_what_a_unit_adds(family, state):
    model = model_in(family, state)
    check(model, gg.score(model, BATCHES, score="output-norm", units="both"), slow_output_norms(model, BATCHES))
