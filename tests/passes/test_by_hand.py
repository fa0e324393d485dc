"""A two-layer model small enough to solve by hand: entropy, gate derivatives and Gnorm from written-out formulas.

Two tokens, two channels, a head per channel, no normalisation, no feed-forward. A head's query is a constant b (its
weight is 0, its bias b), so its attention on token j is a_j = softmax_j(b k x_j), the same for every query; with
b k (x_1 - x_2) = log 3 it is (3/4, 1/4). A layer adds o v m to every token, m = sum_j a_j x_j, so the difference of the
tokens, and with it the attention, is the same in both layers. The logits are the first token's two channels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import greedy_gnorm as gg

TOKENS = np.array([[1.5, -0.4], [0.5, 0.8]])  # (token, channel)
A = np.array([0.75, 0.25])
K = np.array([0.7, 1.1])
B = np.log(3) / (K * (TOKENS[0] - TOKENS[1]))  # a query bias per head
V = np.array([[0.6, -0.9], [0.5, 0.8]])  # (layer, channel)
O = np.array([[0.7, 0.3], [-0.4, 1.2]])  # noqa: E741


class Through(nn.Module):
    """Passes its first argument on."""

    def forward(self, states, *others):
        return states


@pytest.fixture
def model():
    config = BertConfig(
        vocab_size=2, hidden_size=2, num_hidden_layers=2, num_attention_heads=2, intermediate_size=1,
        max_position_embeddings=4, num_labels=2, pad_token_id=None,
    )  # fmt: skip
    model = BertForSequenceClassification(config).double().eval()
    for parameter in model.parameters():
        parameter.data.zero_()
    model.bert.embeddings.word_embeddings.weight.data = torch.tensor(TOKENS)
    model.bert.embeddings.LayerNorm = Through()
    for number, layer in enumerate(model.bert.encoder.layer):
        attention = layer.attention.self
        attention.query.bias.data = torch.tensor(B)
        attention.key.weight.data = torch.diag(torch.tensor(K))
        attention.value.weight.data = torch.diag(torch.tensor(V[number]))
        layer.attention.output.dense.weight.data = torch.diag(torch.tensor(O[number]))
        layer.attention.output.LayerNorm = Through()
        layer.output.LayerNorm = Through()
    model.bert.pooler.dense.weight.data = torch.eye(2, dtype=torch.float64)
    model.bert.pooler.activation = Through()
    model.classifier.weight.data = torch.eye(2, dtype=torch.float64)
    return model


BATCH = [{"input_ids": torch.tensor([[0, 1]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}]

FIRST = TOKENS  # tokens before layer 1
M1 = A @ FIRST
SECOND = FIRST + O[0] * V[0] * M1  # tokens before layer 2
M2 = A @ SECOND
Y = SECOND[0] + O[1] * V[1] * M2  # the logits
SLOPE = Y / np.linalg.norm(Y)  # d|logits| / d logits
SPREAD = np.array([A @ ((FIRST[:, h] - M1[h]) * FIRST[:, h]) for h in range(2)])  # variance of a channel under a
COVARIANCE = np.stack([A @ ((FIRST[:, h] - M1[h])[:, None] * FIRST) for h in range(2)])  # with the whole token


def test_the_logits(model):
    np.testing.assert_allclose(model(**BATCH[0]).logits[0].detach().numpy(), Y, rtol=1e-12)


def test_entropy_by_hand(model):
    expected = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    values = gg.score(model, BATCH, score="entropy", score_options={"variant": "A"}).values
    np.testing.assert_allclose(values, np.full((2, 2), expected), rtol=1e-6)


def test_gate_derivatives_by_hand(model):
    second = SLOPE * O[1] * V[1] * M2
    first = SLOPE * O[0] * V[0] * M1 * (1 + O[1] * V[1])  # its own token, and through layer 2's mean
    values = gg.score(model, BATCH, score="michel-raw", objective="logit-norm").values
    np.testing.assert_allclose(values, np.abs([first, second]), rtol=1e-9)


def test_gnorm_by_hand(model):
    through = 1 + O[1] * V[1]
    second = {
        # a query weight moves the first token's attention along that token
        "q": SLOPE * O[1] * V[1] * K * SPREAD * np.linalg.norm(SECOND[0]),
        "k": SLOPE * O[1] * V[1] * B * np.linalg.norm(COVARIANCE, axis=1),
        "v": SLOPE * O[1] * np.linalg.norm(M2),
    }
    first = {
        "k": SLOPE * O[0] * V[0] * B * through * np.linalg.norm(COVARIANCE, axis=1),
        "v": SLOPE * O[0] * through * np.linalg.norm(M1),
    }
    # In layer 1 it moves each token along itself: the first, the mean under a, and layer 2's attention
    moved = [FIRST[0] + O[1, h] * V[1, h] * (M1 + B[h] * K[h] * COVARIANCE[h]) for h in range(2)]
    first["q"] = SLOPE * O[0] * V[0] * K * SPREAD * np.linalg.norm(moved, axis=1)
    scores = gg.score(model, BATCH)
    for name in ("q", "k", "v"):
        np.testing.assert_allclose(scores.parts[name], np.abs([first[name], second[name]]), rtol=1e-9, err_msg=name)
    product = np.abs([first["q"] * first["k"] * first["v"], second["q"] * second["k"] * second["v"]])
    np.testing.assert_allclose(scores.values, product, rtol=1e-9)
