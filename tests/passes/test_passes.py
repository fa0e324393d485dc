"""Every saving, on and off: the same orders, scores and quality; and what is kept stays in its budget."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import LABEL_NAMES, shared, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from transformers import DynamicCache
from twins import predictions, shape, unpadded

import greedy_gnorm as gg
from greedy_gnorm.data.batches import bucketed, ready_batches
from greedy_gnorm.model.families import FAMILIES
from greedy_gnorm.model.gates import gates
from greedy_gnorm.model.modes import frozen
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import remove, remove_heads
from greedy_gnorm.passes import layers as passes
from greedy_gnorm.passes.gradients import gate_gradients, gradient_norms
from greedy_gnorm.settings import MEBIBYTE, Savings
from greedy_gnorm.tasks.objectives import ANYTHING, LOGITS, OBJECTIVES, Objective, objective
from greedy_gnorm.units import Unit, as_matrix

LOGIT_NORM = OBJECTIVES["logit-norm"]
SCORING = [tiny_batch(seed=1), tiny_batch(rows=3, seed=2, longest=7)]
EVALUATION = [tiny_batch(rows=7, seed=5), tiny_batch(rows=2, seed=6, longest=6)]
WAYS = ["none", "kept-layers", "first-token", "gram", ["kept-layers", "first-token"], "all"]
SAME_ROWS = pytest.mark.filterwarnings("ignore:.*scoring rows are also evaluation rows")
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


def pruned(model, savings, cache_memory=64, scoring=SCORING, evaluation=EVALUATION, **settings):
    settings = {"stop": "all", "dtype": "float32", **settings}
    return gg.prune(model, scoring, eval_data=evaluation, savings=savings, cache_memory=cache_memory, **settings).steps


def same(ours, theirs, rtol=1e-5):
    assert [step.removed for step in ours] == [step.removed for step in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.quality == pytest.approx(dict(other.quality), rel=rtol, abs=1e-7)
        if one.scores is not None:
            np.testing.assert_allclose(one.scores.values, other.scores.values, rtol=rtol)


def walks_agree(model, **settings):
    settings = {"dtype": "float64", **settings}
    plain = pruned(model, "none", **settings)
    for savings in WAYS[1:]:
        same(pruned(model, savings, **settings), plain, rtol=1e-9)
    same(pruned(model, "all", cache_memory=0, **settings), plain, rtol=1e-9)


def test_a_walk_is_the_same_with_each_saving_on_and_off(family):
    """Down to the last head for BERT, over more than one layer for the others."""
    walks_agree(tiny_model(family), stop="all" if family == "bert" else "heads=4")


@pytest.mark.parametrize("method", ["michel-greedy", "leave-one-out"])
@pytest.mark.parametrize("family", ["bert", "albert", "distilbert"])
def test_other_passes_are_the_same_with_each_saving_on_and_off(family, method):
    """Gradients at the heads' outputs, and outputs with gates: scores look at a model in three ways."""
    walks_agree(tiny_model(family, num_hidden_layers=2), method=method)


@pytest.mark.parametrize("method", ["greedy-gnorm", "fisher-greedy"])
def test_how_much_is_kept_changes_no_bit(family, method):
    model = tiny_model(family, num_hidden_layers=2)
    kept, nothing = (pruned(model, "all", cache_memory=memory, method=method) for memory in (64, 0))
    assert [step.removed for step in kept] == [step.removed for step in nothing]
    for one, other in zip(kept, nothing, strict=True):
        assert one.quality == other.quality
        assert one.scores is None or np.array_equal(one.scores.values, other.scores.values, equal_nan=True)


@SAME_ROWS
def test_one_forward_serves_score_and_quality_where_the_rows_coincide(monkeypatch):
    model = tiny_model("bert")
    plain = pruned(model, "none", scoring=EVALUATION, dtype="float64")
    layers, forwards = [], type(model.bert.encoder.layer[0]).forward

    def counted(self, *arguments, **options):
        layers.append(self)
        return forwards(self, *arguments, **options)

    monkeypatch.setattr(type(model.bert.encoder.layer[0]), "forward", counted)
    same(pruned(model, "all", scoring=EVALUATION, dtype="float64"), plain, rtol=1e-9)
    together = len(layers)
    layers.clear()
    pruned(model, "all", dtype="float64")
    apart = len(layers)
    layers.clear()
    pruned(model, "none", dtype="float64")
    # Two batches to score and to evaluate, twelve heads, three layers; and two rows to count multiplications
    assert len(layers) == (2 * (12 + 13) + 2) * 3
    assert together < apart < len(layers)


def test_only_the_changed_layer_and_those_above_run_again():
    model = tiny_model("roberta")
    sites = find_sites(model, "heads").use(Savings(kept_bytes=MEBIBYTE))
    batches = ready_batches([tiny_batch()])
    ran: list[int] = []
    for place, layer in enumerate(sites.layers):
        own = layer.module.forward
        layer.module.forward = lambda *a, place=place, own=own, **k: (ran.append(place), own(*a, **k))[1]
    for head, expected in (((2, 0), [2]), ((0, 1), [0, 1, 2]), ((1, 3), [1, 2]), ((1, 0), [1, 2])):
        gradient_norms(sites, batches, LOGIT_NORM)
        predictions(sites, batches)
        ran.clear()
        gradient_norms(sites, batches, LOGIT_NORM)
        predictions(sites, batches)
        assert ran == []
        remove(sites, [Unit(*head)])
        gradient_norms(sites, batches, LOGIT_NORM)
        assert ran == expected


def test_a_gate_counts_as_a_change():
    model = tiny_model("bert", dtype=torch.float64)
    sites = find_sites(model, "heads").use(Savings(kept_bytes=MEBIBYTE))
    batches = ready_batches([tiny_batch()])
    whole, _ = predictions(sites, batches)
    with gates(sites, {1: torch.tensor([1.0, 0.0, 1.0, 1.0])}):
        gated, _ = predictions(sites, batches)
    again, _ = predictions(sites, batches)
    assert torch.equal(whole, again)
    remove_heads(model, {1: [1]})
    torch.testing.assert_close(predictions(find_sites(model, "heads"), batches)[0], gated)
    assert not torch.allclose(whole, gated)


def test_what_is_kept_stays_within_the_budget_and_is_measured():
    model = tiny_model("bert")
    batches = ready_batches([tiny_batch(seed=seed) for seed in range(6)])
    roomy = find_sites(model, "heads").use(Savings(kept_bytes=64 * MEBIBYTE))
    gradient_norms(roomy, batches, LOGIT_NORM)
    size = sum(roomy.cache._bytes.values())
    assert all(roomy.cache.get(batch.inputs, graph=True) for batch in batches)
    # At least the activations a backward pass can't do without, per token and layer, and not a multiple of them
    tokens = sum(batch.inputs["input_ids"].numel() for batch in batches)
    assert 3 * tokens * 4 * (16 * 4 + 24) < size < 3 * tokens * 4 * (16 * 12 + 24 * 4 + 12 * 4 * 4)

    tight = find_sites(model, "heads").use(Savings(kept_bytes=size // 2))
    gradient_norms(tight, batches, LOGIT_NORM)
    assert 0 < sum(tight.cache._bytes.values()) <= size // 2
    kept = [tight.cache.get(batch.inputs, graph=True) is not None for batch in batches]
    assert True in kept
    assert False in kept


def test_the_first_token_alone_is_computed_where_the_classifier_reads_nothing_else(family, monkeypatch):
    model = tiny_model(family, dtype=torch.float64)
    first = FAMILIES[model.config.model_type].first_token(model.config)
    assert passes.reads_first_token(model) is first is (model.config.model_type not in DECODERS)
    widths = []
    base = model.base_model
    seen: dict[str, torch.Tensor] = {}
    sites = find_sites(model, "heads")
    with passes.first_token_only(sites):
        handle = base.register_forward_hook(lambda module, arguments, output: seen.update(hidden=output[0]))
        narrow = model(**{name: value for name, value in tiny_batch().items() if name != "labels"}).logits
        handle.remove()
        widths.append(seen["hidden"].shape[1])
    plain = model(**{name: value for name, value in tiny_batch().items() if name != "labels"}).logits
    torch.testing.assert_close(narrow, plain, rtol=1e-12, atol=1e-12)
    assert widths == [1 if sites.layers and sites.family.after_attention else 12]


@pytest.mark.parametrize(("pooling", "first"), [("cls", True), ("mean", False)])
def test_what_modernbert_reads_is_in_its_configuration(pooling, first):
    assert passes.reads_first_token(tiny_model("modernbert", classifier_pooling=pooling)) is first


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_passes_keep_no_cache_of_keys_and_values(family, monkeypatch):
    model = tiny_model(family)
    assert model.config.use_cache
    monkeypatch.setattr(DynamicCache, "update", lambda *arguments, **options: pytest.fail("a cache is kept"))
    for score in ("gnorm", "entropy", "leave-one-out"):
        gg.score(model, SCORING, score=score)
    pruned(model, "all", stop="heads=1")
    assert model.config.use_cache


def test_a_classifier_of_its_own_kind_is_computed_whole():
    class Mean(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, features, **options):
            return self.inner.out_proj(features.mean(1))

    model = tiny_model("roberta", dtype=torch.float64)
    model.classifier = Mean(model.classifier)
    assert not passes.reads_first_token(model)
    plain = pruned(model, "none", dtype="float64")
    same(pruned(model, "all", dtype="float64"), plain, rtol=1e-9)


def test_an_exception_leaves_layers_and_what_was_kept_as_they_were():
    model = tiny_model("bert", dtype=torch.float64)
    sites = find_sites(model, "heads").use(Savings(kept_bytes=MEBIBYTE))
    batches = ready_batches([tiny_batch()])
    before = gradient_norms(sites, batches, LOGIT_NORM)

    def broken(model, batch):
        model(**batch.inputs)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        gradient_norms(sites, batches, Objective("broken", "", False, False, LOGITS, broken))
    assert all("forward" not in vars(layer.module) and not layer.module._forward_pre_hooks for layer in sites.layers)
    after = gradient_norms(sites, batches, LOGIT_NORM)
    assert all(np.array_equal(as_matrix(before[name]), as_matrix(after[name])) for name in before)


def test_gates_and_norms_share_one_kept_graph():
    sites = find_sites(tiny_model("electra", dtype=torch.float64), "heads").use(Savings(kept_bytes=MEBIBYTE))
    plain = find_sites(sites.model, "heads").use(Savings(kept_layers=False, first_token=False))
    (batch,) = ready_batches([tiny_batch()])
    with frozen(sites.model):
        gradient_norms(sites, ready_batches([tiny_batch()]), LOGIT_NORM)
        for _ in range(2):
            for ours, theirs in zip(
                gate_gradients(sites, batch, LOGIT_NORM), gate_gradients(plain, batch, LOGIT_NORM), strict=True
            ):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-15)


def test_unknown_savings_are_refused():
    with pytest.raises(gg.GnormError, match=r"Unknown saving 'gramm'. Use 'all', 'none', or a list of: kept-layers"):
        gg.prune(tiny_model("bert"), SCORING, eval_data=EVALUATION, savings="gramm")


def test_batches_have_the_fewest_padded_tokens():
    chance = np.random.default_rng(0)
    lengths = chance.integers(3, 90, 40).tolist()
    groups = bucketed(lengths, 256, start=8)
    assert sorted(row for group in groups for row in group) == list(range(40))
    cost = sum(8 + len(group) * max(lengths[row] for row in group) for group in groups)
    assert all(len(group) == 1 or len(group) * max(lengths[row] for row in group) <= 256 for group in groups)

    order = sorted(lengths, reverse=True)
    best = [0.0] + [float("inf")] * 40
    for end in range(1, 41):  # every division of the sorted rows, written out
        for begin in range(end):
            padded = (end - begin) * order[begin]
            if padded <= 256 or end - begin == 1:
                best[end] = min(best[end], best[begin] + 8 + padded)
    assert cost == best[40]
    assert bucketed([5, 900, 5], 256, start=0) == [[1], [0, 2]]


@SAME_ROWS
def test_trained_minilm_keeps_its_order_with_every_saving():
    folder = shared("models/minilm-tweets")
    with open(shared("data/tweets.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in list(file)[:24]]
    settings = {"stop": "heads=6", "samples": 12, "seed": 3}
    plain = gg.prune(str(folder), rows, eval_data=rows[12:], savings="none", **settings).steps
    same(gg.prune(str(folder), rows, eval_data=rows[12:], **settings).steps, plain)


@SAME_ROWS
def test_rows_of_the_same_data_are_found_to_coincide():
    rows = tiny_rows(20)
    model = tiny_model("bert")
    model.config.update(LABEL_NAMES)
    plain = gg.prune(
        model, rows, tokenizer=tiny_tokenizer(), eval_data=rows, samples=0, savings="none", stop="all"
    ).steps
    same(gg.prune(model, rows, tokenizer=tiny_tokenizer(), eval_data=rows, samples=0, stop="all").steps, plain)


def reads_all_tokens(model, batch):
    """Looks at every token of the last layer, not at the logits."""
    hidden = model(**batch.inputs, output_hidden_states=True).hidden_states[-1]
    return (hidden * batch.inputs["attention_mask"][..., None]).square().sum((1, 2)).sqrt()


def calls_twice(model, batch):
    """The difference that the second half of each row makes."""
    whole = model(**batch.inputs).logits
    half = {name: tensor[:, : tensor.shape[1] // 2 + 1] for name, tensor in batch.inputs.items()}
    return (whole - model(**half).logits).square().sum(-1)


@pytest.mark.parametrize("function", [reads_all_tokens, calls_twice])
@pytest.mark.parametrize("family", ["bert", "albert", "distilbert"])
def test_an_objective_that_reads_anything_else_gets_all_of_it(function, family):
    """Against a backward pass per unpadded row, with every saving on."""
    model = tiny_model(family, dtype=torch.float64)
    objective = Objective(function.__name__, "", False, False, ANYTHING, function)
    sites = find_sites(model, "heads").use(Savings(kept_bytes=MEBIBYTE))
    batches = [tiny_batch(seed=1)]
    for _ in range(2):
        norms = gradient_norms(sites, ready_batches(batches), objective)
    expected = {name: np.zeros(shape(sites)) for name in norms}
    padded = [{name: tensor[row : row + 1] for name, tensor in batches[0].items()} for row in range(5)]
    for row in padded if function is calls_twice else unpadded(batches[0]):
        (batch,) = ready_batches([row])
        model.zero_grad()
        function(model, batch).sum().backward()
        for site in sites:
            for name in norms:
                gradient = site.inputs[site.parts[name]].weight.grad.view(site.total, -1)
                expected[name][site.index] += gradient.norm(dim=1).numpy() / 5
    for name, value in expected.items():
        np.testing.assert_allclose(as_matrix(norms[name]), value, rtol=1e-9)


def test_an_objective_says_what_it_reads():
    assert {OBJECTIVES[name].reads for name in OBJECTIVES} == {LOGITS}
    with pytest.raises(ValueError, match="reads 'logits' or 'anything'"):
        objective("odd", about="", reads="attention")
