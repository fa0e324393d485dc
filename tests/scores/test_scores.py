"""Every score against a slow twin written from its formula."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import weakref

import numpy as np
import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_model
from twins import columns_of, heads_of, maps_of, rows_of, shape, slow_entropy, slow_gate_gradients, unpadded

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.modes import frozen
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import evaluate
from greedy_gnorm.passes.gradients import map_gradients
from greedy_gnorm.passes.maps import attention_maps
from greedy_gnorm.scores import SCORES
from greedy_gnorm.tasks.objectives import OBJECTIVES, with_reference
from greedy_gnorm.units import Unit

BATCHES = [tiny_batch(seed=1), tiny_batch(rows=3, seed=2, longest=7)]
STATES = ["whole", "pruned"]


def model_in(family, state):
    model = tiny_model(family, dtype=torch.float64)
    if state == "pruned":
        gg.remove_heads(model, {0: [1, 2]})
        if len(find_sites(model, "heads")) > 1:
            gg.remove_heads(model, {1: [0, 1, 2, 3]})
    return model


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("variant", ["A", "B", "C"])
def test_entropy(family, state, variant):
    model = model_in(family, state)
    own = model.config._attn_implementation
    ours = gg.score(model, BATCHES, score="entropy", score_options={"variant": variant, "eps": 1e-3})
    expected = slow_entropy(model, BATCHES, variant, 1e-3)
    np.testing.assert_allclose(ours.values, expected, rtol=1e-5)  # maps are taken in float32
    assert model.config._attn_implementation == own


def test_entropy_of_exact_zeros_is_zero_where_the_raw_formula_has_nan():
    model = tiny_model("bert")
    with torch.no_grad():  # a saturated softmax: all attention on one token
        for layer in model.bert.encoder.layer:
            layer.attention.self.query.weight *= 1e4
    (row, *_) = unpadded(tiny_batch())
    maps = torch.stack([weights for _, weights in maps_of(model, row)])
    assert (maps == 0).any()
    assert torch.isnan(-(maps * maps.log()).sum()), "the raw formula"
    for variant in ("A", "B", "C"):
        values = gg.score(model, [tiny_batch()], score="entropy", score_options={"variant": variant}).values
        assert np.isfinite(values).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_maps_are_taken_in_float32_whatever_the_models_type(dtype):
    model = tiny_model("bert", dtype=getattr(torch, dtype))
    (row, *_) = unpadded(tiny_batch())
    sites, seen = find_sites(model, "heads"), {}
    hooks = [
        linear.register_forward_hook(lambda module, inputs, output: seen.update({module: output}))
        for site in sites
        for linear in (site.inputs[site.parts["q"]], site.inputs[site.parts["k"]])
    ]
    with torch.no_grad(), attention_maps(sites, lambda site, weights: weights):
        logits = model(**row).logits
    for hook in hooks:
        hook.remove()
    entropies, confidences = np.zeros(shape(sites)), np.zeros(shape(sites))
    for site in sites:
        linears = [site.inputs[site.parts[part]] for part in ("q", "k")]
        query, key = (seen[linear].view(1, -1, 4, 4).transpose(1, 2) for linear in linears)
        weights = (query @ key.mT * 4**-0.5).double().softmax(-1)  # the logits are half precision, their softmax is not
        entropies[site.index] = -(weights * weights.log()).sum(-1).mean(-1)
        confidences[site.index] = weights.amax(-1).mean(-1)
    ours = gg.score(model, [row], score="entropy", score_options={"variant": "A"}, dtype=dtype)
    np.testing.assert_allclose(ours.values, entropies, rtol=1e-6)
    ours = gg.score(model, [row], score="confidence", dtype=dtype)
    np.testing.assert_allclose(ours.values, confidences, rtol=1e-6)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(logits, model(**row).logits, rtol=0, atol=2e-3)  # rounding may differ by a bit


def attention_modules():
    return [each for each in gc.get_objects() if type(each).__name__ == "BertSelfAttention"]


@pytest.mark.parametrize("score", ["entropy", "confidence", "tis"])
def test_looking_at_maps_keeps_no_model_alive(score):
    model = tiny_model("bert")
    alive = [weakref.ref(module) for module in model.modules()]
    before = attention_modules()  # the model's own, and those that other tests still hold
    gg.score(model, BATCHES, score=score)
    copies = [each for each in attention_modules() if not any(each is other for other in before)]
    assert not copies, "the scored copy is still there"
    del model, before
    gc.collect()
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("state", STATES)
def test_confidence(family, state):
    model = model_in(family, state)
    sites = find_sites(model, "heads")
    rows = [row for batch in BATCHES for row in unpadded(batch)]
    expected = np.full(shape(sites), np.nan)
    for head in sites.survivors():
        expected[head] = 0
    for row in rows:
        for site, weights in maps_of(model, row):
            largest = weights.amax(-1).mean(-1) / len(rows) / sites[site].applications
            survivors = sites[site].survivors
            for head, own in zip(survivors, heads_of(sites[site], largest), strict=True):
                expected[site, head] += float(own.mean())
    np.testing.assert_allclose(gg.score(model, BATCHES, score="confidence").values, expected, rtol=1e-5)


@pytest.mark.parametrize("state", STATES)
def test_gate_scores(family, state):
    model = model_in(family, state)
    derivatives = np.stack(slow_gate_gradients(model, BATCHES))
    raw = np.abs(derivatives).mean(0)
    np.testing.assert_allclose(gg.score(model, BATCHES, score="michel-raw").values, raw, rtol=1e-9)
    normalised = raw / np.sqrt(np.nansum(raw**2, axis=1, keepdims=True))
    np.testing.assert_allclose(gg.score(model, BATCHES, score="michel").values, normalised, rtol=1e-9)
    np.testing.assert_allclose(gg.score(model, BATCHES, score="fisher").values, (derivatives**2).mean(0), rtol=1e-9)


@pytest.mark.parametrize("state", STATES)
def test_tis_is_the_gate_derivative(family, state):
    """A head's output is linear in its map, so <A, dL/dA> is the derivative by a factor on A, which is the gate."""
    model = model_in(family, state)
    derivatives, own = np.stack(slow_gate_gradients(model, BATCHES)), model.config._attn_implementation
    ours = gg.score(model, BATCHES, score="tis")
    np.testing.assert_allclose(ours.values, np.abs(derivatives).mean(0), rtol=1e-9)
    assert model.config._attn_implementation == own


def with_map(model, batch, objective, site, application, new_map):
    """The objective's values with one map put in place of the model's own."""
    seen = [0] * len(find_sites(model, "heads"))

    def see(at, weights):
        seen[at.index] += 1
        return new_map if (at.index, seen[at.index] - 1) == (site, application) else weights

    with torch.no_grad(), attention_maps(find_sites(model, "heads"), see):
        return OBJECTIVES[objective](model, batch)


@pytest.mark.parametrize("family", ["bert", "albert", "deberta-v2", "mpnet"])
def test_map_gradients_by_finite_differences(family):
    model = tiny_model(family, dtype=torch.float64)
    (batch,) = ready_batches([tiny_batch(rows=1, longest=4)])
    site, application = (0, 2) if family == "albert" else (1, 0)
    with frozen(model):
        maps = map_gradients(
            find_sites(model, "heads"), batch, OBJECTIVES["gold-probability"], lambda at, number, weights: weights
        )
    weights, gradient = maps[site][application]
    for place in itertools.product([0], [2], range(4), range(4)):
        sides = []
        for sign in (1, -1):
            moved = weights.clone()
            moved[place] += sign * 1e-5
            sides.append(with_map(model, batch, "gold-probability", site, application, moved))
        assert float(gradient[place]) == pytest.approx(float((sides[0] - sides[1]).item() / 2e-5), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("family", ["bert", "albert", "llama"])
@pytest.mark.parametrize("steps", [1, 3])
def test_attribution(family, steps):
    model = tiny_model(family, dtype=torch.float64)
    sites = find_sites(model, "heads")
    expected = np.zeros(shape(sites))
    rows = [row for batch in BATCHES for row in unpadded(batch)]
    for row in rows:
        (batch,) = ready_batches([row])
        for site in sites:
            for application in range(site.applications):
                total = 0
                for step in range(1, steps + 1):

                    def change(at, number, weights, site=site, application=application, step=step):
                        return weights * step / steps if (at, number) == (site, application) else weights

                    with frozen(model):
                        maps = map_gradients(sites, batch, OBJECTIVES["gold-probability"], change)
                    total = total + maps[site.index][application][1][0] / steps
                whole = [weights for index, weights in maps_of(model, row) if index == site.index][application]
                largest = (whole * total).amax((1, 2)).view(site.total, -1).mean(1)
                expected[site.index] += largest.numpy() / len(rows)
    ours = gg.score(model, BATCHES, score="attribution", score_options={"steps": steps})
    np.testing.assert_allclose(ours.values, expected, rtol=1e-8)


def test_attribution_is_complete():
    """Summed over a layer's heads and entries, the attributions are what the layer's attention adds to the output."""
    model = tiny_model("bert", dtype=torch.float64)
    (batch,) = ready_batches([tiny_batch(rows=1, longest=5)])
    sites, total, steps = find_sites(model, "heads"), 0.0, 400
    for step in range(1, steps + 1):
        share = (step - 0.5) / steps  # the middle of each stretch

        def change(at, number, weights, share=share):
            return weights * share if at.index == 1 else weights

        with frozen(model):
            scaled, gradient = map_gradients(sites, batch, OBJECTIVES["gold-probability"], change)[1][0]
        total += float((scaled / share * gradient).sum()) / steps
    (row,) = unpadded(tiny_batch(rows=1, longest=5))
    nothing = torch.zeros_like(maps_of(model, row)[1][1])[None]
    whole = OBJECTIVES["gold-probability"](model, batch) - with_map(model, batch, "gold-probability", 1, 0, nothing)
    assert total == pytest.approx(float(whole.detach()), rel=1e-4)


@pytest.mark.parametrize("state", STATES)
def test_magnitude(family, state):
    model = model_in(family, state)
    values = gg.score(model, BATCHES, score="magnitude").values
    site = find_sites(model, "heads")[0]
    units = zip(*(rows_of(site, part) for part in site.parts), columns_of(site), strict=True)
    for head, blocks in zip(site.survivors, units, strict=True):
        assert values[0, head] == pytest.approx(float(torch.cat([block.flatten() for block in blocks]).norm()))


def quality_after(model, heads):
    model = copy.deepcopy(model)
    for head in heads:
        gg.remove_heads(model, {head.site: [head.index]})
    return evaluate(find_sites(model, "heads"), ready_batches(BATCHES))["accuracy"]


def test_leave_one_out(family):
    model = tiny_model(family, num_hidden_layers=2)
    values = gg.score(model, BATCHES, score="leave-one-out").values
    for head in find_sites(model, "heads").survivors():
        assert values[head] == pytest.approx(quality_after(model, []) - quality_after(model, [head]))


def test_shapley_converges_to_the_exact_values_within_its_interval():
    model = tiny_model("bert", num_hidden_layers=1)
    heads = [Unit(0, index) for index in range(4)]
    exact = np.zeros(4)
    orders = list(itertools.permutations(range(4)))
    for order in orders:
        for place, index in enumerate(order):
            gone = [heads[other] for other in order[:place]]
            exact[index] += (quality_after(model, gone) - quality_after(model, [*gone, heads[index]])) / len(orders)
    ours = gg.score(model, BATCHES, score="shapley", score_options={"permutations": 60, "tolerance": -1})
    assert ours.values.sum() == pytest.approx(quality_after(model, []) - quality_after(model, heads))
    assert np.abs(exact).max() > 0.02, "the heads make no difference: the test would prove nothing"
    assert (np.abs(ours.values[0] - exact) <= 2 * ours.parts["half_width"][0] + 1e-9).all()


def test_shapley_is_truncated():
    model = tiny_model("bert")
    ours = gg.score(model, BATCHES, score="shapley", score_options={"tolerance": 2})
    assert (ours.values == 0).all()
    with pytest.raises(gg.GnormError, match="at least 2 permutations"):
        gg.score(model, BATCHES, score="shapley", score_options={"permutations": 1})


def test_the_command_says_how_sure_shapley_values_are(tmp_path, model_folder, data_file, capsys):
    tiny_model("bert", seed=1, num_hidden_layers=2, **LABEL_NAMES).save_pretrained(model_folder)
    command = ["score", str(model_folder), "--data", str(data_file), "--samples", "12", "--out", str(tmp_path / "s")]
    assert main([*command, "--score", "shapley", "--score-options", "permutations=5,tolerance=-1"]) == 0
    widths = json.loads((tmp_path / "s" / "scores.json").read_text())["parts"]["half_width"]
    within = np.mean(widths)
    assert within > 1e-3, "no interval: the test would prove nothing"
    said = f"Scores to within ± {within:.4f} on average (95 %; permutations=5; tolerance=-1.0)"
    assert said in capsys.readouterr().out
    assert main([*command, "--score", "magnitude"]) == 0
    assert "within" not in capsys.readouterr().out


def test_objectives_by_formula():
    model = tiny_model("bert", dtype=torch.float64)
    (batch,) = ready_batches([tiny_batch()])
    with torch.no_grad():
        logits = model(**batch.inputs).logits
        probabilities = logits.softmax(-1)
        gold = batch.labels
        for row, label in enumerate(gold.tolist()):
            others = [float(value) for place, value in enumerate(logits[row]) if place != label]
            values = {name: float(OBJECTIVES[name](model, batch)[row]) for name in OBJECTIVES if name != "kl"}
            assert values["logit-norm"] == pytest.approx(float(logits[row].square().sum().sqrt()))
            assert values["loss"] == pytest.approx(-float(probabilities[row, label].log()))
            assert values["gold-probability"] == pytest.approx(float(probabilities[row, label]))
            assert values["margin"] == pytest.approx(float(logits[row, label]) - max(others))
        (referenced,) = with_reference(model, ready_batches([tiny_batch()]))
        assert OBJECTIVES["kl"](model, referenced).abs().max() < 1e-12
        gg.remove_heads(model, {0: [0, 1, 2]})
        now = model(**batch.inputs).logits.softmax(-1)
        expected = (probabilities * (probabilities / now).log()).sum(-1)
        torch.testing.assert_close(OBJECTIVES["kl"](model, referenced), expected)


def test_kl_prunes_without_labels():
    batch = tiny_batch()
    batch.pop("labels")
    run = gg.prune(tiny_model("bert"), [batch], eval_data=[tiny_batch(seed=3)], objective="kl", stop="heads=5")
    assert len(run.removed) == 5
    assert (run.steps[2].scores.values[~np.isnan(run.steps[2].scores.values)] > 0).all()


def test_objectives_that_do_not_fit_the_problem_are_refused_by_name():
    model = tiny_model("bert", num_labels=1)
    batch = {**tiny_batch(), "labels": torch.rand(5)}
    for name in ("gold-probability", "margin", "kl"):
        with pytest.raises(gg.UnsupportedModel, match="task is regression"):
            gg.prune(model, [batch], eval_data=[{**tiny_batch(seed=3), "labels": torch.rand(5)}], objective=name)


def test_kl_ranks_nothing_before_a_head_is_gone():
    with pytest.raises(gg.GnormError, match="it is zero"):
        gg.score(tiny_model("bert"), [tiny_batch()], objective="kl")
    with pytest.raises(gg.GnormError, match="use a greedy method instead of michel"):
        gg.prune(tiny_model("bert"), [tiny_batch()], eval_data=[tiny_batch()], method="michel", objective="kl")


def test_options_are_checked():
    for score, options, message in (
        ("entropy", {"variant": "D"}, "no variant 'D'"),
        ("entropy", {"epsilon": 1}, "no option 'epsilon'. Options and defaults: variant=C, eps=1e-07"),
        ("entropy", {"eps": "small"}, "must be a number, not 'small'"),
        ("attribution", {"steps": 0}, "at least 1 step"),
        ("gnorm", {"x": 1}, "Options and defaults: none"),
    ):
        with pytest.raises(gg.GnormError, match=message):
            gg.score(tiny_model("bert"), BATCHES, score=score, score_options=options)


@pytest.mark.parametrize("name", list(SCORES))
def test_every_score_leaves_the_model_as_it_was_and_marks_removed_heads(name, family):
    model = tiny_model(family).train()
    gg.remove_heads(model, {0: [1]})
    weights = {key: parameter.clone() for key, parameter in model.named_parameters()}
    state, own = torch.get_rng_state(), model.config._attn_implementation
    scores = gg.score(
        model, [tiny_batch()], score=name, **({"score_options": {"steps": 2}} if name == "attribution" else {})
    )
    assert np.isnan(scores.values[0, 1])
    assert np.isfinite(scores.values).sum() == np.prod(scores.values.shape) - 1
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == own
    assert all(
        module.training and not module._forward_hooks and not module._forward_pre_hooks for module in model.modules()
    )
    assert all(
        torch.equal(parameter, weights[key]) and parameter.requires_grad for key, parameter in model.named_parameters()
    )


def test_the_attention_setting_comes_back_after_an_exception():
    model = tiny_model("bert")

    def see(site, weights):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), attention_maps(find_sites(model, "heads"), see):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert model.config._attn_implementation == "sdpa"
