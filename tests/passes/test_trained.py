"""Trained heads in other classes: the same weights must get the same scores."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from conftest import shared
from offline import reexpressed
from scipy.stats import kendalltau
from twins import slow_gradient_norms

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.tasks.objectives import OBJECTIVES


@pytest.mark.parametrize(
    "family", ["roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("xlm-roberta", "camembert"))]
)
def test_the_same_trained_weights_score_the_same(family, minilm):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    rows = [json.loads(line) for line in shared("data/tweets.jsonl").open(encoding="utf-8")][:40]
    bert = gg.load(minilm, dtype=torch.float32)
    roberta = reexpressed(bert, family)
    expected = gg.score(bert, rows, tokenizer=tokenizer)
    ours = gg.score(roberta, rows, tokenizer=tokenizer)
    np.testing.assert_allclose(ours.values, expected.values, rtol=1e-3)
    assert ours.order()[:10] == expected.order()[:10]


def test_trained_albert_matches_its_twin():
    folder = shared("models/albert-reactions")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in shared("data/reactions.jsonl").open(encoding="utf-8")][:6]
    batch = dict(tokenizer(texts, padding=True, truncation=True, max_length=80, return_tensors="pt"))
    batch["labels"] = torch.zeros(6, dtype=torch.long)
    torch.manual_seed(0)  # its classifier is new
    exact = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, num_labels=10)
    model = transformers.AutoModelForSequenceClassification.from_config(exact.config).float()
    model.load_state_dict(exact.state_dict())
    for one in (exact, model):
        gg.remove_heads(one, {0: [2, 5]})
    norms = gradient_norms(find_sites(model, "heads"), ready_batches([batch]), OBJECTIVES["logit-norm"])
    expected = slow_gradient_norms(exact, [batch])
    for place, name in enumerate(("q", "k", "v")):
        np.testing.assert_allclose(norms[name], expected[place], rtol=1e-4)


def test_trained_llama_matches_its_twin():
    """Four key/value heads with two query heads each, in float32 against a backward pass per sentence in float64."""
    folder = shared("models/llama-stories")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Once upon a time, there was a big red ball.", "Tom and Mia went to the park. They saw a dog.", "The end."]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=0)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.zeros(3, dtype=torch.long)}
    torch.manual_seed(0)  # its classifier is new
    auto, options = transformers.AutoModelForSequenceClassification, {"pad_token_id": 0, "num_labels": 4}
    exact = auto.from_pretrained(folder, dtype=torch.float64, **options)
    model = auto.from_config(exact.config).float()
    model.load_state_dict(exact.state_dict())
    for one in (exact, model):
        gg.remove_heads(one, {0: [2], 3: [0, 1, 2, 3]})
    norms = gradient_norms(find_sites(model, "heads"), ready_batches([batch]), OBJECTIVES["logit-norm"])
    expected = slow_gradient_norms(exact, [batch])
    for place, name in enumerate(("q", "k", "v")):
        np.testing.assert_allclose(norms[name], expected[place], rtol=1e-4)


def test_rectified_entropy_keeps_the_order_of_trained_heads_for_small_eps_only(minilm):
    """The paper's appendix: variant C keeps A's order for small eps; from some eps on it no longer does."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    rows = [json.loads(line) for line in shared("data/tweets.jsonl").open(encoding="utf-8")][:24]
    model = gg.load(minilm, dtype=torch.float32)

    def entropy(options):
        return gg.score(model, rows, tokenizer=tokenizer, score="entropy", score_options=options).values.ravel()

    plain = entropy({"variant": "A"})
    rectified = {eps: entropy({"variant": "C", "eps": eps}) for eps in (1e-9, 1e-7, 1e-5, 1e-3, 1e-1)}
    taus = {eps: kendalltau(plain, values).statistic for eps, values in rectified.items()}
    print("Kendall's tau of variant C with variant A by eps:", {eps: round(tau, 4) for eps, tau in taus.items()})
    assert taus[1e-9] == pytest.approx(1)
    assert taus[1e-7] > 0.999, "the authors' eps"
    assert taus[1e-1] < 0.99, "a large eps changes the order"
    assert sorted(taus.values(), reverse=True) == list(taus.values())
