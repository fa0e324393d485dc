"""The paper's score normalised by layer, against slow gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import EVERY_FAMILY, tiny_model
from scores.test_outputs import BATCHES, model_in
from twins import slow_gradient_norms

import greedy_gnorm as gg
from greedy_gnorm.model.sites import find_sites


@EVERY_FAMILY
@pytest.mark.parametrize("state", ["whole", "cut"])
def test_products_are_divided_by_their_norm_in_the_layer(family, state):
    model = model_in(family, state)
    products = slow_gradient_norms(model, BATCHES).prod(0)
    expected = products / np.sqrt(np.nansum(products**2, axis=1, keepdims=True))
    np.testing.assert_allclose(gg.score(model, BATCHES, score="gnorm-plus").values, expected, rtol=1e-9)


@pytest.mark.parametrize("state", ["whole", "cut"])
def test_order_within_a_layer_stays_and_norms_are_one(family, state):
    model = model_in(family, state)
    plain, plus = (gg.score(model, BATCHES, score=name, units="both") for name in ("gnorm", "gnorm-plus"))
    for site, one, other in zip(find_sites(model), plain.keys, plus.keys, strict=True):
        left = np.array(site.survivors, dtype=int)
        assert np.array_equal(np.argsort(one[left]), np.argsort(other[left]))
        if len(left):
            assert np.sqrt(np.nansum(plus.vectors[site.index] ** 2)) == pytest.approx(1)
    assert list(plus.parts) == list(plain.parts)


def test_tiny_gradients_do_not_underflow():
    model = tiny_model("bert", dtype=torch.float64)
    with torch.no_grad():
        model.classifier.weight.mul_(1e-140)
        model.classifier.bias.zero_()
    tiny = gg.score(model, BATCHES, score="gnorm-plus").values
    assert (gg.score(model, BATCHES, score="gnorm").values == 0).all(), "the products underflow"
    with torch.no_grad():
        model.classifier.weight.mul_(1e140)
    np.testing.assert_allclose(tiny, gg.score(model, BATCHES, score="gnorm-plus").values, rtol=1e-6)


def test_a_layer_without_gradients_is_removed_first():
    model = tiny_model("bert")
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.output.dense.weight.zero_()
    order = gg.score(model, BATCHES, score="gnorm-plus").order()
    assert [unit.site for unit in order[:4]] == [1] * 4
