"""The fast gradient norms against a backward pass per sentence on the unpadded sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import EVERY_FAMILY, shared, tiny_batch, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from twins import slow_gradient_norms

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes import gradients
from greedy_gnorm.passes.gradients import Inputs, gradient_norms, gram_is_cheaper, unit_norms
from greedy_gnorm.tasks.objectives import LOGITS, OBJECTIVES, Objective
from greedy_gnorm.units import Scores, Unit, as_matrix

FORMS = {"by cost": gram_is_cheaper, "gram": lambda *sizes: True, "direct": lambda *sizes: False}


def fast(model, batches, objective="logit-norm"):
    norms = gradient_norms(find_sites(model, "heads"), ready_batches(batches), OBJECTIVES[objective])
    return np.stack([as_matrix(norms[name]) for name in ("q", "k", "v") if name in norms])


def relative_error(ours, theirs):
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    return np.nanmax(np.abs(ours / theirs - 1))


@EVERY_FAMILY
@pytest.mark.parametrize("objective", ["logit-norm", "loss"])
@pytest.mark.parametrize("form", FORMS)
def test_every_family_matches_its_twin(family, form, objective, monkeypatch):
    monkeypatch.setattr(gradients, "gram_is_cheaper", FORMS[form])
    model = tiny_model(family, dtype=torch.float64)
    batches = [tiny_batch(seed=1), tiny_batch(rows=3, seed=2, longest=7)]
    assert relative_error(fast(model, batches, objective), slow_gradient_norms(model, batches, objective)) <= 1e-9

    gg.remove_heads(model, {0: [1, 2]})
    if len(find_sites(model, "heads")) > 1:
        gg.remove_heads(model, {1: [0, 1, 2, 3]})
    assert relative_error(fast(model, batches, objective), slow_gradient_norms(model, batches, objective)) <= 1e-9


def test_eager_and_sdpa_agree(family):
    model, batches = tiny_model(family, dtype=torch.float64), [tiny_batch()]
    model.set_attn_implementation("eager")
    eager = fast(model, batches)
    model.set_attn_implementation("sdpa")
    assert relative_error(fast(model, batches), eager) <= 1e-9


def test_a_row_does_not_depend_on_its_batch(family):
    model, batch = tiny_model(family, dtype=torch.float64), tiny_batch(rows=6)
    alone = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(6)]
    assert relative_error(fast(model, alone), fast(model, [batch])) <= 1e-9


def test_the_model_is_left_as_it_was():
    model = tiny_model("bert").train()
    model.bert.embeddings.requires_grad_(False)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    fast(model, [tiny_batch()])

    def broken(model, batch):
        model(**batch.inputs)
        raise RuntimeError("stop")

    failing = Objective("broken", "", False, False, LOGITS, broken)
    with pytest.raises(RuntimeError, match="stop"):
        gradient_norms(find_sites(model, "heads"), ready_batches([tiny_batch()]), failing)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == wanted[name]
        assert parameter.grad is None
        assert torch.equal(parameter, weights[name])
    for module in model.modules():
        assert module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_it_works_where_gradients_are_switched_off():
    model, batches = tiny_model("bert"), [tiny_batch()]
    expected = fast(model, batches)
    with torch.no_grad():
        assert np.array_equal(fast(model, batches), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("length", "inputs", "outputs", "gram"),
    [(32, 96, 96, True), (70, 96, 96, True), (96, 96, 96, False), (40, 96, 32, True), (64, 96, 32, False)],
)
def test_the_cheaper_form_is_chosen(length, inputs, outputs, gram):
    """Multiplications are counted by torch; the means of the Gram form, a few more tokens, are left out."""

    def counted(form):
        rows = Inputs([torch.randn(1, length, inputs)], torch.ones(1, length))
        with FlopCounterMode(display=False) as counter:
            for _ in range(3):
                unit_norms(rows, torch.randn(1, length, outputs), outputs, gram=form)
        means = 2 * length * inputs + inputs + 3 * (2 * length + 1) * outputs
        return counter.get_total_flops() // 2 - (means if form else 0)

    assert gram_is_cheaper(length, inputs, outputs) is gram is (counted(True) < counted(False))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200])
def test_half_of_the_gram_matrix_gives_the_same_norms(length):
    chance = torch.Generator().manual_seed(length)
    rows = Inputs([torch.randn(2, length, 12, generator=chance, dtype=torch.float64)], torch.ones(2, length))
    gradient = torch.randn(2, length, 8, generator=chance, dtype=torch.float64)
    direct = (rows.rows.mT @ gradient).square().view(2, 12, 2, 4).sum((1, 3)).sqrt()
    torch.testing.assert_close(unit_norms(rows, gradient, 4, gram=True), direct, rtol=1e-11, atol=0)


@pytest.mark.parametrize("form", ["gram", "direct"])
def test_vanishing_gradients_do_not_underflow(form):
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 5, 8, generator=chance)
    gradient = torch.randn(2, 5, 6, generator=chance)
    gram, mask = form == "gram", torch.ones(2, 5)
    expected = unit_norms(Inputs([inputs.double()], mask), gradient.double(), 3, gram=False)
    factors = torch.tensor([1e-30, 1e-30, 1e-30, 1e20, 1e20, 1e20])
    ours = unit_norms(Inputs([inputs], mask), gradient * factors, 3, gram=gram)
    torch.testing.assert_close(ours, expected * torch.tensor([1e-30, 1e20], dtype=torch.float64), rtol=1e-5, atol=0)
    assert unit_norms(Inputs([inputs], mask), torch.zeros(2, 5, 6), 3, gram=gram).eq(0).all()


def alike(ratio, applications=1, rows=4, tokens=24, width=32, padding=6):
    """Tokens whose mean is `ratio` times as long as their deviations; gradients that sum to about nothing."""
    chance = torch.Generator().manual_seed(1)
    parts = []
    for _ in range(applications):
        deviations = torch.randn(rows, tokens, width, generator=chance, dtype=torch.float64)
        mean = torch.randn(rows, 1, width, generator=chance, dtype=torch.float64)
        parts.append(ratio * mean + deviations)
    gradient = torch.randn(rows, applications * tokens, 12, generator=chance, dtype=torch.float64)
    mask = torch.ones(rows, tokens)
    mask[1:, tokens - padding :] = 0
    for part in parts:
        part[1:, tokens - padding :] *= -3  # whatever stands at padding is far from the mean
    steps = gradient.view(rows, applications, tokens, 12) * mask[:, None, :, None]
    centred = steps - mask[:, None, :, None] * steps.sum(2, keepdim=True) / mask.sum(1)[:, None, None, None]
    return [part.float() for part in parts], centred.reshape(rows, -1, 12).float(), mask


@pytest.mark.parametrize("applications", [1, 3])
@pytest.mark.parametrize("ratio", [1.0, 17.3, 300.0, 3e4])
def test_tokens_that_are_alike_lose_no_more_digits_than_in_the_direct_form(ratio, applications):
    """The bound: 4 rounding errors of float32 (6e-8 each) times |mean| / |deviation|; 17.3^2 is 300."""
    parts, gradient, mask = alike(ratio, applications)
    exact = unit_norms(Inputs([part.double() for part in parts], mask), gradient.double(), 3, gram=False)
    errors = {
        gram: float((unit_norms(Inputs(parts, mask), gradient, 3, gram=gram) / exact - 1).abs().max())
        for gram in (True, False)
    }
    bound = 4 * 2.0**-24 * max(ratio, 1)
    assert errors[True] <= bound, errors
    stacked = torch.cat(parts, 1)
    plain = (gradient * (stacked @ stacked.mT @ gradient)).view(len(gradient), -1, 4, 3).sum((1, 3)).clamp_min(0).sqrt()
    if ratio > 10:
        assert float((plain / exact - 1).abs().max()) > bound, "without centring the bound does not hold"


def test_ranking_is_by_logarithms_and_ties_by_place():
    values = np.array([[0.0, 0.0, np.nan], [0.0, 2.0, 1.0]])
    logs = np.array([[-900.0, -1000.0, np.nan], [-900.0, 0.7, 0.0]])
    assert Scores(values, logs).order() == [Unit(0, 1), Unit(0, 0), Unit(1, 0), Unit(1, 2), Unit(1, 1)]
    assert Scores(values).order() == [Unit(0, 0), Unit(0, 1), Unit(1, 0), Unit(1, 2), Unit(1, 1)]
    assert Scores(values).order(highest_first=True)[:2] == [Unit(1, 1), Unit(1, 2)]


def test_products_below_float64_still_rank():
    model = tiny_model("bert", dtype=torch.float64)
    whole = gg.score(model, [tiny_batch()])
    with torch.no_grad():
        model.classifier.weight *= 1e-130
        model.classifier.bias *= 1e-130
    tiny = gg.score(model, [tiny_batch()])
    assert np.nanmax(tiny.values) == 0
    assert tiny.order() == whole.order()


def test_a_nan_stops_with_the_site_and_the_batch_named():
    model = tiny_model("bert")
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.value.weight[0, 0] = float("nan")
    with pytest.raises(gg.NonFiniteScore, match=r"layer 0 \(bert.encoder.layer.0.attention\).*batch 0 \(rows 0, 1"):
        gg.score(model, [tiny_batch()])


def test_objectives_that_need_labels_say_so():
    batch = tiny_batch()
    batch.pop("labels")
    with pytest.raises(gg.DataError, match="requires labels"):
        gg.score(tiny_model("bert"), [batch], objective="loss")


def test_half_precision_is_scored_in_float32_unless_told_otherwise():
    model, batches = tiny_model("bert", dtype=torch.bfloat16), [tiny_batch()]
    half = gg.score(model, batches, dtype="bfloat16")
    full = gg.score(model, batches)
    again = gg.score(tiny_model("bert", dtype=torch.bfloat16).float(), batches)
    assert model.dtype == torch.bfloat16
    assert np.array_equal(full.values, again.values)
    assert not np.allclose(half.values, full.values, rtol=1e-3)


def test_trained_heads_match_in_float32(minilm):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    texts = [json.loads(line)["text"] for line in shared("data/tweets.jsonl").open(encoding="utf-8")][:12]
    batches = [dict(tokenizer(texts[start : start + 6], padding=True, return_tensors="pt")) for start in (0, 6)]
    for batch in batches:
        batch["labels"] = torch.zeros(6, dtype=torch.long)
    model = gg.load(minilm, dtype=torch.float32)
    gg.remove_heads(model, {0: [3], 2: [0, 5, 11]})
    exact = slow_gradient_norms(gg.load(minilm, dtype=torch.float64), batches)
    exact_pruned_model = gg.load(minilm, dtype=torch.float64)
    gg.remove_heads(exact_pruned_model, {0: [3], 2: [0, 5, 11]})
    assert relative_error(fast(gg.load(minilm, dtype=torch.float32), batches), exact) <= 1e-4
    assert relative_error(fast(model, batches), slow_gradient_norms(exact_pruned_model, batches)) <= 1e-4
