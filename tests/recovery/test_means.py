"""Means in place of removed units: against means of stacked activations, where they are exact, and where refused."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from conftest import EVERY_FAMILY, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from recovery.test_least_squares import GONE, ROWS, cut_for, output_of, recovery_for, refitted
from twins import heads_of, slow_contexts, unpadded

import greedy_gnorm as gg
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes import calibration as calibrations
from greedy_gnorm.units import Unit

BIASED = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "albert-groups", "distilbert", "gpt2",
          "deberta-v2", "mpnet")  # fmt: skip


def slow_biases(model, units):
    """The bias of every output map with the mean output of its removed units, each added on its own."""
    sites, rows = find_sites(model), [row for batch in ROWS for row in unpadded(batch)]
    seen = [slow_contexts(model, row) for row in rows]
    biases = []
    for site in sites:
        weight, bias = output_of(site)
        inputs = torch.cat([call for calls in seen for call in calls[site.index]])
        channels = heads_of(site, torch.arange(len(weight)))
        for unit in units:
            if unit.site == site.index:
                own = channels[unit.index]
                bias = bias + (inputs[:, own] @ weight[own]).mean(0)
        biases.append(bias)
    return biases


@pytest.mark.parametrize("family", BIASED)
def test_biases_have_the_mean_outputs_of_removed_units(family, monkeypatch):
    monkeypatch.setattr(calibrations, "BY_GRADIENT", 0.0)  # all tokens alike
    model = tiny_model(family, dtype=torch.float64)
    units = cut_for(model)
    fitted, cut = refitted(model, [units], recovery_for(model, "mean")), find_sites(copy.deepcopy(model))
    remove(cut, units)
    for ours, plain, bias in zip(fitted, cut, slow_biases(model, units), strict=True):
        torch.testing.assert_close(output_of(ours)[1], bias, rtol=1e-9, atol=1e-11)
        assert torch.equal(output_of(ours)[0], output_of(plain)[0]), "weights stay"
    biases = {id(site.output.bias) for site in fitted}
    for one, other in zip(fitted.model.parameters(), cut.model.parameters(), strict=True):
        assert id(one) in biases or torch.equal(one, other)


def test_tokens_count_as_in_least_squares():
    """Half of a token's weight follows how much the outputs depend on it."""
    model = tiny_model("bert", dtype=torch.float64)
    recovery = recovery_for(model, "mean")
    inputs, weights = [], []
    for number, (sample, target) in enumerate(recovery.calibration.original_samples(1)):
        assert number < len(ROWS)
        inputs.append(sample.inputs.detach())
        weights.append(target.weights)
    x, w = torch.cat(inputs), torch.cat(weights)
    assert w.std() > 0.1
    torch.testing.assert_close(recovery.calibration.input_means[1], w @ x / w.sum(), rtol=1e-9, atol=1e-12)


def test_a_unit_that_always_returns_the_same_can_be_removed_without_a_change():
    model = tiny_model("bert", dtype=torch.float64)
    neuron = model.bert.encoder.layer[1].intermediate.dense
    with torch.no_grad():
        neuron.weight[5] = 0
        neuron.bias[5] = 1.5
    batch = {key: tensor for key, tensor in tiny_batch(rows=7, seed=9).items() if key != "labels"}
    logits = {}
    for name in ("mean", "gates"):
        with torch.no_grad():
            logits[name] = refitted(model, [[Unit(3, 5)]], recovery_for(model, name)).model(**batch).logits
    with torch.no_grad():
        torch.testing.assert_close(logits["mean"], model(**batch).logits, rtol=1e-9, atol=1e-9)
        assert (logits["gates"] - logits["mean"]).abs().max() > 1e-3


@EVERY_FAMILY
def test_output_projections_without_a_bias_are_refused(family):
    model = tiny_model(family)
    options = {"eval_data": [tiny_batch(seed=2)], "recover": "mean", "stop": "heads=1"}
    if family in BIASED or family == "modernbert":  # whose heads have one and whose neurons have none
        gg.prune(model, [tiny_batch()], **options)
    else:
        with pytest.raises(gg.UnsupportedModel, match=r"has no bias .* recover by least-squares or gates"):
            gg.prune(model, [tiny_batch()], **options)
    if family not in BIASED:
        with pytest.raises(gg.UnsupportedModel, match="has no bias"):
            refitted(model, [GONE], recovery_for(model, "mean"))


@pytest.mark.filterwarnings("ignore:Only|There are only")
def test_a_resumed_run_and_a_step_taken_out_give_the_same_model(model_folder, write_rows, tmp_path):
    data = write_rows(tiny_rows(90))
    options = {"method": "joint-mean", "macs": 0.5, "rounds": 3, "max_drop": 1.0, "measure_speed": False, "seed": 1}
    whole = gg.compress(model_folder, data, out=tmp_path / "whole", **options)
    gg.compress(model_folder, data, out=tmp_path / "part", **options)
    journal = tmp_path / "part" / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))
    header = json.loads((tmp_path / "part" / "run.json").read_text())
    del header["result"]
    (tmp_path / "part" / "run.json").write_text(json.dumps(header))
    resumed = gg.compress(model_folder, data, out=tmp_path / "part", resume=True, **options)
    assert [step.removed for step in whole.steps] == [step.removed for step in resumed.steps]
    last = len(whole.steps) - 1
    gg.take_step(tmp_path / "whole", last, out=tmp_path / "taken")
    models = [whole.at(last), resumed.at(last), gg.load(tmp_path / "taken" / "model")]
    batch = tiny_tokenizer()(["good film", "the plot was dull"], return_tensors="pt", padding=True)
    with torch.no_grad():
        first, *others = (model(**batch).logits.numpy() for model in models)
    for other in others:
        np.testing.assert_array_equal(first, other)
    plain = copy.deepcopy(gg.load(model_folder))
    remove(find_sites(plain), [unit for step in whole.steps for unit in step.removed])
    with torch.no_grad():
        assert np.abs(plain(**batch).logits.numpy() - first).max() > 1e-4, "the means make no difference"
