"""A model spread over devices and the disk by accelerate is scored and pruned as one on a single device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import LABEL_NAMES, tiny_model, tiny_rows, tiny_tokenizer

import greedy_gnorm as gg

pytest.importorskip("accelerate", reason="device_map needs accelerate")

SPLIT = {"bert.embeddings": "cpu", "bert.encoder.layer.0": "cpu", "bert.encoder.layer.1": "disk", "bert.pooler": "cpu",
         "classifier": "cpu"}  # fmt: skip


DECODER_SPLIT = {
    f"transformer.{part}": "disk" if part == "h.1" else "cpu" for part in ("wte", "wpe", "drop", "h.0", "h.1", "ln_f")
}
DECODER_SPLIT |= {"score": "cpu"}


@pytest.fixture
def folder(tmp_path):
    return saved("bert", tmp_path)


def saved(family, folder):
    tiny_model(family, num_hidden_layers=2, **LABEL_NAMES).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.mark.parametrize("places", ["auto", SPLIT])
@pytest.mark.parametrize("method", ["greedy-gnorm", "fisher-greedy"])
def test_a_spread_model_is_pruned_as_a_whole_one(places, method, folder):
    pruned_alike(folder, places, method)


def test_a_spread_decoder_is_pruned_as_a_whole_one(tmp_path):
    """Down to layers without heads, whose classes change."""
    pruned_alike(saved("gpt2", tmp_path), DECODER_SPLIT, "greedy-gnorm")


def pruned_alike(folder, places, method):
    settings = {"stop": "all", "samples": 20, "method": method}
    whole = gg.prune(folder, tiny_rows(40), **settings)
    spread = gg.prune(folder, tiny_rows(40), device_map=places, **settings)
    assert [step.removed for step in spread.steps] == [step.removed for step in whole.steps]
    for ours, theirs in zip(spread.steps, whole.steps, strict=True):
        assert ours.quality == pytest.approx(dict(theirs.quality), rel=1e-6)
        if ours.scores is not None:
            np.testing.assert_allclose(ours.scores.values, theirs.scores.values, rtol=1e-5)
    inputs = {"input_ids": torch.tensor([[2, 5, 7, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    assert torch.equal(spread.model(**inputs).logits, whole.model(**inputs).logits)


def test_a_spread_model_is_scored(folder):
    whole, spread = (gg.score(folder, tiny_rows(30), samples=20, device_map=places) for places in (None, SPLIT))
    np.testing.assert_allclose(spread.values, whole.values, rtol=1e-5)


def test_what_device_map_can_not_do(folder):
    with pytest.raises(gg.GnormError, match="device_map requires the model's folder or name"):
        gg.prune(
            tiny_model("bert"),
            tiny_rows(30),
            tokenizer=tiny_tokenizer(),
            device_map="auto",
            label_map={"neg": 0, "neutral": 1, "pos": 2},
        )
    with pytest.raises(gg.GnormError, match="device_map must be 'auto', 'balanced', or a dict"):
        gg.prune(folder, tiny_rows(30), device_map="{cpu")
    with pytest.raises(TypeError, match="unexpected keyword argument 'device_map'"):
        gg.compare(folder, tiny_rows(30), out=folder + "-out", device_map="auto")
