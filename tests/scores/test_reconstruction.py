"""Reconstruction scores against lstsq: the order of removal, the errors that add up, and the known limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import EVERY_FAMILY, tiny_batch, tiny_model
from scores.test_outputs import check, model_in
from twins import slow_reconstruction

import greedy_gnorm as gg
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes import systems
from greedy_gnorm.scores import SCORES, elimination
from greedy_gnorm.scores.elimination import eliminate
from greedy_gnorm.units import in_order

BATCHES = [tiny_batch(rows=6, seed=1), tiny_batch(rows=3, seed=2, longest=7)]


@EVERY_FAMILY
@pytest.mark.parametrize("state", ["whole", "cut"])
@pytest.mark.parametrize("score", ["reconstruction", "reconstruction-loss"])
def test_scores_are_the_errors_of_lstsq_unit_after_unit(family, state, score, monkeypatch):
    monkeypatch.setattr(elimination, "AT_ONCE", 10)  # several updates of the whole matrices
    model = model_in(family, state)
    scores = gg.score(model, BATCHES, score=score, units="both", score_options={"ridge": 0.02})
    expected = slow_reconstruction(model, BATCHES, 0.02, weighted=score == "reconstruction-loss")
    check(model, scores, [added for added, _ in expected])
    for site, alone, (_, wanted) in zip(find_sites(model), scores.parts["alone"], expected, strict=True):
        np.testing.assert_allclose(alone[site.survivors], wanted, rtol=1e-9)


def system(tokens=60, units=8, size=2, outputs=5, seed=0):
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, units * size, generator=chance, dtype=torch.float64)
    inputs[:, size : 2 * size] += 2 * inputs[:, :size]  # two units that nearly return the same
    return inputs.mT @ inputs / tokens, torch.randn(units * size, outputs, generator=chance, dtype=torch.float64)


@pytest.mark.parametrize("at_once", [1, 6, 64])
def test_added_errors_sum_up_to_that_of_the_schur_complement(at_once, monkeypatch):
    monkeypatch.setattr(elimination, "AT_ONCE", at_once)
    gram, weight = system()
    found = eliminate(gram, weight, 2, 1e-12)
    inverse = torch.linalg.inv(gram)
    for count in range(1, 9):
        gone = [2 * unit + part for unit in found.order[:count] for part in range(2)]
        error = torch.trace(weight[gone].mT @ torch.linalg.solve(inverse[gone][:, gone], weight[gone]))
        assert sum(found.added[:count]) == pytest.approx(float(error), rel=1e-8)
    assert sorted(found.order) == list(range(8))


def test_of_two_units_that_return_the_same_the_first_is_free():
    gram, weight = system(units=6, size=1)
    gram[1], weight[1] = gram[0], weight[0]
    gram[:, 1] = gram[:, 0]
    found = eliminate(gram, weight, 1, 1e-9)
    assert set(found.order[:1]) <= {0, 1}
    assert found.added[0] < 1e-6
    assert max(found.alone[:2]) < 1e-6, "alone, each of them is"
    other = 1 - found.order[0]
    assert found.added[found.order.index(other)] > 0.1


def test_units_that_return_nothing_are_removed_first():
    gram, weight = system(size=1)
    gram[3] = gram[:, 3] = 0
    assert eliminate(gram, weight, 1, 0.01).order[0] == 3
    nothing = eliminate(torch.zeros_like(gram), weight, 1, 0.01)
    assert nothing.order == list(range(8))
    assert nothing.added == [0] * 8


def test_scores_do_not_depend_on_batches_or_on_how_many_layers_fit(monkeypatch):
    model = tiny_model("bert", dtype=torch.float64)
    rows = [tiny_batch(rows=8, seed=4)]
    halves = [{name: tensor[part] for name, tensor in rows[0].items()} for part in (slice(0, 3), slice(3, None))]
    for score in ("reconstruction", "reconstruction-loss"):
        whole = gg.score(model, rows, score=score, units="both").vectors
        apart = gg.score(model, halves, score=score, units="both").vectors
        monkeypatch.setattr(systems, "MEMORY", 10_000)
        in_turn = gg.score(model, rows, score=score, units="both", savings="none").vectors
        for one, two, three in zip(whole, apart, in_turn, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-9)
            np.testing.assert_allclose(one, three, rtol=1e-9)


def test_which_of_them_compare_heads_and_neurons():
    assert not SCORES["reconstruction"].comparable
    assert SCORES["reconstruction-loss"].comparable
    assert not SCORES["reconstruction"].asks_for_labels(None)


@pytest.mark.parametrize("score", ["reconstruction", "reconstruction-loss"])
def test_a_ridge_of_nothing_and_activations_without_end_are_refused(score):
    with pytest.raises(gg.GnormError, match="larger than 0, not 0"):
        gg.score(tiny_model("bert"), BATCHES, score=score, score_options={"ridge": 0})
    few = [tiny_batch(rows=1, longest=3)]
    with pytest.raises(gg.GnormError, match=r"layer 0 \(.*\) is singular with the ridge 1e-30: use a larger one"):
        gg.score(tiny_model("bert"), few, score=score, units="ffn", score_options={"ridge": 1e-30})
    model = tiny_model("bert")
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.value.weight[0, 0] = torch.inf
    with pytest.raises(gg.NonFiniteScore, match=r"layer [012] "):
        gg.score(model, BATCHES, score=score)


def test_values_in_order():
    values = in_order([1.0, 0.5, 0.5, 3.0, -1.0])
    assert values == sorted(set(values))
    np.testing.assert_allclose(values, [1, 1, 1, 3, 3])
    assert in_order([]) == []
