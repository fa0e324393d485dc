"""DeBERTa's relative positions in every configuration: norms of each row, cuts, copies, costs, the refit."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from conftest import tiny_batch, tiny_model
from twins import slow_gradient_norms

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.gates import gates
from greedy_gnorm.model.modeling_pruned import Variant
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import dense
from greedy_gnorm.passes import gradients
from greedy_gnorm.passes.calibration import Calibration
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.passes.speed import multiplications
from greedy_gnorm.pruning.costs import Costs, Shape
from greedy_gnorm.recovery.least_squares import SOLVERS, Recovery
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.units import as_matrix

CONFIGURATIONS = {
    "maps of their own": {"share_att_key": False, "position_buckets": -1, "max_relative_positions": 9},
    "a map for keys alone": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "queries that nothing reads": {"pos_att_type": ["c2p"]},
    "written in one": {"pos_att_type": "p2c|c2p", "position_biased_input": True, "type_vocab_size": 2},
    "a convolution after the first layer": {"conv_kernel_size": 3},
    "none": {"relative_attention": False, "pos_att_type": None},
}
BATCHES = [tiny_batch(seed=1), tiny_batch(rows=1, seed=4, longest=8), tiny_batch(rows=3, seed=2, longest=5)]
CUT = {0: [1, 2], 1: [0, 1, 2, 3]}


@pytest.fixture(params=CONFIGURATIONS)
def changes(request):
    return CONFIGURATIONS[request.param]


def logits(model):
    inputs = {name: tensor for name, tensor in tiny_batch().items() if name != "labels"}
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("gram", [True, False])
def test_norms_match_a_backward_pass_per_unpadded_row(changes, gram, monkeypatch):
    monkeypatch.setattr(gradients, "gram_is_cheaper", lambda *sizes: gram)
    model = tiny_model("deberta-v2", dtype=torch.float64, **changes)
    for _ in range(2):
        norms = gradient_norms(find_sites(model, "heads"), ready_batches(BATCHES), OBJECTIVES["logit-norm"])
        ours = np.stack([as_matrix(norms[name]) for name in ("q", "k", "v")])
        np.testing.assert_allclose(ours, slow_gradient_norms(model, BATCHES), rtol=1e-9)
        if model.config.to_dict().get("pruned_heads") is None:
            gg.remove_heads(model, CUT)


def test_positions_make_a_difference_to_the_norms():
    """Without them the test above would prove nothing about positions."""
    model = tiny_model("deberta-v2", dtype=torch.float64)
    exact = slow_gradient_norms(model, BATCHES)
    model.deberta.encoder.rel_embeddings.weight.data.zero_()
    model.deberta.encoder.LayerNorm.bias.data.zero_()
    without = slow_gradient_norms(model, BATCHES)
    assert (np.abs(without / exact - 1)[:2] > 1e-3).all()


def test_removed_equals_gated_equals_reloaded(changes, tmp_path):
    model = tiny_model("deberta-v2", **changes)
    sites = find_sites(model, "heads")
    closed = {site: torch.tensor([float(head not in CUT[site]) for head in range(4)]) for site in CUT}
    with gates(sites, closed):
        gated = logits(model)
    gg.remove_heads(model, CUT)
    torch.testing.assert_close(logits(model), gated, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(gg.load(tmp_path)), logits(model))
    torch.testing.assert_close(logits(dense(model)), gated, rtol=1e-5, atol=1e-5)


def test_costs_are_those_of_the_cut_model(changes):
    model = tiny_model("deberta-v2", **changes)
    costs = Costs(find_sites(model), 4, Shape(1, 10, 100))
    assert costs.of(find_sites(model)).multiplications == multiplications(model, 10)
    gg.remove_heads(model, CUT)
    assert costs.of(find_sites(model)).multiplications == multiplications(model, 10)
    assert costs.of(find_sites(model)).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_fitting_brings_the_outputs_closer(changes):
    model = tiny_model("deberta-v2", **changes)
    rows = [{name: t for name, t in tiny_batch(rows=40, seed=seed).items() if name != "labels"} for seed in (1, 2)]
    recovery = Recovery(
        "least-squares", SOLVERS["least-squares"], Calibration(find_sites(copy.deepcopy(model)), ready_batches(rows))
    )
    pruned = copy.deepcopy(model)
    gg.remove_heads(pruned, {1: [0, 2]})
    before = (logits(pruned) - logits(model)).square().mean()
    recovery(find_sites(pruned))
    assert (logits(pruned) - logits(model)).square().mean() < before


@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
def test_modules_that_lost_heads_are_copied_and_pickled_and_turn_back(family):
    model = tiny_model(family)
    plain = [type(module) for module in model.modules()]
    gg.remove_heads(model, CUT)
    expected = logits(model)
    assert sum(isinstance(module, Variant) for module in model.modules()) == 2
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), expected)
        gg.remove_heads(again, {0: [3], 2: [0]})
        assert sum(isinstance(module, Variant) for module in again.modules()) == 3
    assert torch.equal(logits(model), expected)
    assert [type(module) for module in dense(model).modules()] == plain
