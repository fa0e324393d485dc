"""The paper's score of the loss with drawn labels, normalised by layer, against slow gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import EVERY_FAMILY, tiny_model
from scores.test_drawn_labels import UNLABELLED, drawn
from scores.test_outputs import BATCHES, model_in
from twins import slow_gradient_norms

import greedy_gnorm as gg
from greedy_gnorm.model.sites import find_sites


@EVERY_FAMILY
@pytest.mark.parametrize("state", ["whole", "cut"])
def test_products_are_divided_by_their_norm_in_the_layer(family, state):
    model = model_in(family, state)
    products = slow_gradient_norms(model, drawn(model, UNLABELLED), "loss").prod(0)
    expected = products / np.sqrt(np.nansum(products**2, axis=1, keepdims=True))
    np.testing.assert_allclose(gg.score(model, UNLABELLED, score="gnorm-plus").values, expected, rtol=1e-9)


@pytest.mark.parametrize("state", ["whole", "cut"])
def test_order_within_a_layer_stays_and_norms_are_one(family, state):
    model = model_in(family, state)
    plain = gg.score(model, drawn(model, BATCHES), score="gnorm", objective="loss", units="both")
    plus = gg.score(model, BATCHES, score="gnorm-plus", units="both")
    for site, one, other in zip(find_sites(model), plain.keys, plus.keys, strict=True):
        left = np.array(site.survivors, dtype=int)
        assert np.array_equal(np.argsort(one[left]), np.argsort(other[left]))
        if len(left):
            assert np.sqrt(np.nansum(plus.vectors[site.index] ** 2)) == pytest.approx(1)
    assert list(plus.parts) == list(plain.parts)


def test_tiny_gradients_do_not_underflow():
    model = tiny_model("bert", dtype=torch.float64)
    found = {}
    for scale in (1e-120, 1e-10):  # the logits are 0 in effect, so the drawn labels and the gradients' directions agree
        with torch.no_grad():
            model.classifier.bias.zero_()
            model.classifier.weight.copy_(scale * tiny_model("bert", dtype=torch.float64).classifier.weight)
        found[scale] = gg.score(model, UNLABELLED, score="gnorm-plus").values
        underflow = gg.score(model, UNLABELLED, score="gnorm").values == 0
        assert underflow.all() if scale < 1e-100 else not underflow.any()
    np.testing.assert_allclose(found[1e-120], found[1e-10], rtol=1e-6)


def test_a_layer_without_gradients_is_removed_first():
    model = tiny_model("bert")
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.output.dense.weight.zero_()
    order = gg.score(model, BATCHES, score="gnorm-plus").order()
    assert [unit.site for unit in order[:4]] == [1] * 4
