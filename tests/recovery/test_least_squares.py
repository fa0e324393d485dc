"""Fitting linear maps: against lstsq on stacked activations, independent of the path, in its known limits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import EVERY_FAMILY, FAMILY_CONFIGS, tiny_batch, tiny_model
from transformers.pytorch_utils import Conv1D
from twins import heads_of

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes import calibration as calibrations
from greedy_gnorm.passes import stack
from greedy_gnorm.passes.calibration import Calibration
from greedy_gnorm.passes.equations import NormalEquations
from greedy_gnorm.passes.stack import through_layers
from greedy_gnorm.recovery import least_squares
from greedy_gnorm.recovery.least_squares import RIDGE, SOLVERS, Recovery
from greedy_gnorm.settings import Savings
from greedy_gnorm.units import Unit

ROWS = [tiny_batch(rows=40, seed=seed) for seed in (1, 2)] + [tiny_batch(rows=9, seed=3, longest=7)]
GONE = [Unit(0, 1), Unit(1, 3), Unit(1, 7), Unit(1, 20)]


def recovery_for(model, name="least-squares", rows=ROWS):
    batches = ready_batches([{key: tensor for key, tensor in row.items() if key != "labels"} for row in rows])
    return Recovery(name, SOLVERS[name], Calibration(find_sites(copy.deepcopy(model)), batches))


def refitted(model, units, recovery):
    sites = find_sites(copy.deepcopy(model))
    for group in units:
        remove(sites, group)
        recovery(sites)
    return sites


def output_of(site):
    """The weight of an output map, inputs as rows, and its bias if it has one."""
    weight, bias = site.output.weight.detach(), site.output.bias
    return weight if isinstance(site.output, Conv1D) else weight.mT, None if bias is None else bias.detach()


def at_sum(site, record):
    """A hook that records the sum of the site's output and the residual."""
    if site.sum.returned:
        return site.sum.module.register_forward_hook(lambda module, given, result: record(result))
    return site.sum.module.register_forward_pre_hook(lambda module, given: record(given[0]))


def cut_for(model):
    """Heads and neurons of the first two sites, and a whole feed-forward above where there is one."""
    sites = find_sites(model)
    whole = [Unit(3, index) for index in range(sites[3].total)] if len(sites) > 3 else []
    return [*GONE, *whole]


def slow_refit(model, units, weights_of):
    """Each site in turn: the whole model runs, activations are stacked in float64, lstsq solves the ridge system.

    Where layers share their weights, the inputs and residuals are the unpruned model's.
    """
    original, sites = find_sites(copy.deepcopy(model)), find_sites(copy.deepcopy(model))
    remove(sites, units)
    lowest = min(unit.site for unit in units)
    for site in sites:
        cut = len(site.survivors) < site.total
        if not (site.index >= lowest if sites.layers else cut):
            continue
        if site.index > lowest and sites.layers and site.survivors:
            slow_inputs(sites, original, site, weights_of)
        inputs, residuals, targets, weights = [], [], [], []
        for number, row in enumerate(ROWS):
            given = {key: tensor for key, tensor in row.items() if key != "labels"}
            real = given["attention_mask"].bool()
            for these, found in ((sites[site.index], "pruned"), (original[site.index], "unpruned")):
                calls = {"x": [], "p": [], "z": []}
                hooks = [
                    these.output.register_forward_pre_hook(lambda m, a, c=calls: c["x"].append(a[0])),
                    these.output.register_forward_hook(lambda m, a, r, c=calls: c["p"].append(r)),
                    at_sum(these, calls["z"].append),
                ]
                with torch.no_grad():
                    (sites if found == "pruned" else original).model(**given)
                for hook in hooks:
                    hook.remove()
                if found == ("pruned" if sites.layers else "unpruned"):
                    inputs += [x[real] for x in calls["x"]]
                    residuals += [(z - p)[real] for z, p in zip(calls["z"], calls["p"], strict=True)]
                if found == "unpruned":
                    targets += [z[real] for z in calls["z"]]
            weights.append(weights_of(site, number))
        places = [original[site.index].survivors.index(unit) for unit in site.survivors]
        whole = original[site.index]
        by_unit = heads_of(whole, torch.arange(len(whole.survivors) * whole.output_size))
        channels = sorted(int(channel) for place in places for channel in by_unit[place])
        x, y, w = torch.cat(inputs), torch.cat(targets) - torch.cat(residuals), torch.cat(weights)
        x = x if sites.layers else x[:, channels]
        means = (w @ x) / w.sum(), (w @ y) / w.sum()
        if site.output.bias is None:  # nothing can be added: the map goes through zero
            means = torch.zeros_like(means[0]), torch.zeros_like(means[1])
        root = w.sqrt()[:, None]
        a, b = (x - means[0]) * root, (y - means[1]) * root
        start = output_of(original[site.index])[0][channels]
        if len(channels):
            ridge = float(RIDGE * a.square().sum(0).mean()) ** 0.5
            stacked = torch.cat([a, ridge * torch.eye(len(channels), dtype=a.dtype)])
            fitted = torch.linalg.lstsq(stacked, torch.cat([b, ridge * start])).solution
        else:
            fitted = torch.zeros(0, b.shape[1], dtype=b.dtype)
        with torch.no_grad():
            site.output.weight.copy_(fitted if isinstance(site.output, Conv1D) else fitted.mT)
            if site.output.bias is not None:
                site.output.bias.copy_(means[1] - means[0] @ fitted)
    return sites


def slow_inputs(sites, original, site, weights_of):
    """The input maps of a site read lstsq's estimate of what they receive in the unpruned model."""
    whole, states, weights = original[site.index], {"pruned": [], "unpruned": []}, []
    others = {*site.positions.shared, *(each.path for each in site.positions.own)}
    paths = [path for path in site.inputs if path not in others]
    for number, row in enumerate(ROWS):
        given = {key: tensor for key, tensor in row.items() if key != "labels"}
        for model, these, found in ((sites.model, site, "pruned"), (original.model, whole, "unpruned")):
            calls = []
            hook = these.inputs[paths[0]].register_forward_pre_hook(lambda m, a, c=calls: c.append(a[0]))
            with torch.no_grad():
                model(**given)
            hook.remove()
            states[found].append(calls[0][given["attention_mask"].bool()])
        weights.append(weights_of(site, number))
    h, h0, w = torch.cat(states["pruned"]), torch.cat(states["unpruned"]), torch.cat(weights)
    for path in paths:
        own = site.inputs[path]
        means = (w @ h) / w.sum(), (w @ h0) / w.sum()
        if own.bias is None:
            means = torch.zeros_like(means[0]), torch.zeros_like(means[1])
        a, b = ((each - mean) * w.sqrt()[:, None] for each, mean in zip((h, h0), means, strict=True))
        ridge = float(RIDGE * a.square().sum(0).mean()) ** 0.5
        same = ridge * torch.eye(h.shape[1], dtype=h.dtype)
        estimate = torch.linalg.lstsq(torch.cat([a, same]), torch.cat([b, same])).solution
        with torch.no_grad():
            old = own.weight if isinstance(own, Conv1D) else own.weight.mT  # as cut: no run has fitted it before
            if own.bias is not None:
                own.bias += (means[1] - means[0] @ estimate) @ old
            new = estimate @ old
            own.weight.copy_(new if isinstance(own, Conv1D) else new.mT)


@EVERY_FAMILY
def test_fitted_maps_equal_lstsq_on_stacked_activations(family):
    fitted_maps_equal_lstsq(tiny_model(family, dtype=torch.float64))


def test_what_a_model_does_between_layers_is_done():
    """DeBERTa-v2 has a convolution after the first layer in its large versions."""
    fitted_maps_equal_lstsq(tiny_model("deberta-v2", dtype=torch.float64, conv_kernel_size=3))


def fitted_maps_equal_lstsq(model):
    recovery, units = recovery_for(model), cut_for(model)
    fast = refitted(model, [units], recovery)
    slow = slow_refit(model, units, lambda site, number: recovery.calibration.target(site, number).weights)
    changed = False
    for ours, theirs in zip(fast, slow, strict=True):
        for one, other in zip(output_of(ours), output_of(theirs), strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
        for path, linear in ours.inputs.items():
            for name, parameter in linear.named_parameters():
                other = theirs.inputs[path].get_parameter(name)
                torch.testing.assert_close(parameter, other, rtol=1e-8, atol=1e-8)
        original, _ = output_of(find_sites(model)[ours.index])
        changed |= not torch.equal(output_of(ours)[0], original[: len(ours.survivors) * ours.output_size])
    assert changed


@EVERY_FAMILY
def test_parts_of_a_layer_that_are_not_run_again_change_no_weight(family):
    model, fitted = tiny_model(family), []
    for savings in ("all", "none"):
        sites = find_sites(copy.deepcopy(model)).use(Savings.named(savings))
        remove(sites, cut_for(model))
        recovery_for(model)(sites)
        fitted.append(sites.model.state_dict())
    for name, tensor in fitted[0].items():
        assert torch.equal(tensor, fitted[1][name]), name


@EVERY_FAMILY
def test_arguments_of_layers_that_do_not_fit_into_memory_are_computed_again(family, monkeypatch):
    model = tiny_model(family)
    kept = refitted(model, [cut_for(model)], recovery_for(model))
    monkeypatch.setattr(stack, "KEPT", 0)
    again = refitted(model, [cut_for(model)], recovery_for(model))
    assert all(torch.equal(a, b) for a, b in zip(kept.model.parameters(), again.model.parameters(), strict=True))


def test_the_model_around_its_layers_runs_once_for_each_batch(monkeypatch):
    model, calls = tiny_model("bert"), {}
    for budget in (stack.KEPT, 0):
        monkeypatch.setattr(stack, "KEPT", budget)
        sites = find_sites(copy.deepcopy(model))
        remove(sites, GONE)
        seen = calls[budget] = []
        sites.model.bert.embeddings.register_forward_hook(lambda *given, seen=seen: seen.append(1))
        recovery_for(model)(sites)
    first_inputs, arguments, classifier = 1, 1, 1
    assert len(calls[max(calls)]) == len(ROWS) * (first_inputs + arguments + classifier)
    assert len(calls[0]) > len(calls[max(calls)])


def test_every_family_says_what_its_attention_returns():
    for family in FAMILY_CONFIGS:
        calibration = recovery_for(tiny_model(family)).calibration
        below = {site.index for layer in calibration.original.layers for site in layer.sites[:-1]}
        assert set(calibration.module_returns) == below, family


def test_a_part_of_a_layer_that_was_fitted_is_not_run_again():
    model, calls = tiny_model("bert"), {}
    for savings in ("all", "none"):
        sites = find_sites(copy.deepcopy(model)).use(Savings.named(savings))
        remove(sites, cut_for(model))
        seen = calls[savings] = []
        query = next(iter(sites[0].inputs.values()))
        query.register_forward_hook(lambda module, given, result, seen=seen: seen.append(float(result.abs().max())))
        recovery_for(model)(sites)
    assert sum(value > 0 for value in calls["all"]) < sum(value > 0 for value in calls["none"])


@pytest.mark.parametrize("name", SOLVERS)
def test_two_orders_of_removal_give_one_model(family, name):
    model = tiny_model(family)
    recovery, units = recovery_for(model, name), cut_for(model)
    if name == "mean" and not all(site.output.bias is not None for site in find_sites(model)):
        pytest.skip("refused: see test_means.py")
    at_once = refitted(model, [units], recovery)
    in_turn = refitted(model, [[unit] for unit in reversed(units[:4])] + ([units[4:]] if units[4:] else []), recovery)
    for one, other in zip(at_once.model.parameters(), in_turn.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_stored_activations_can_be_computed_again():
    model = tiny_model("bert")
    recovery = recovery_for(model)
    first = refitted(model, [GONE], recovery)
    recovery.calibration.clear()
    second = refitted(model, [GONE], recovery)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_batches_of_other_sizes_give_the_same_weights():
    model = tiny_model("bert", dtype=torch.float64)
    one = refitted(model, [GONE], recovery_for(model))
    halves = [
        {key: tensor[part] for key, tensor in row.items()} for row in ROWS for part in (slice(0, 5), slice(5, None))
    ]
    rows = [
        {
            key: tensor[:, : int(row["attention_mask"].sum(1).max())] if tensor.ndim > 1 else tensor
            for key, tensor in row.items()
        }
        for row in halves
    ]
    other = refitted(model, [GONE], recovery_for(model, rows=rows))
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_an_unpruned_model_stays_as_it_is():
    model = tiny_model("bert")
    sites = refitted(model, [[]], recovery_for(model))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), sites.model.parameters(), strict=True))


def test_the_unpruned_model_is_left_alone():
    model = tiny_model("bert")
    shared = gg.find_sites(model)
    before = [parameter.clone() for parameter in model.parameters()]
    recovery = Recovery(
        "least-squares", SOLVERS["least-squares"], Calibration(shared, recovery_for(model).calibration.batches)
    )
    refitted(model, [GONE], recovery)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_fitting_brings_the_outputs_closer(family):
    model = tiny_model(family)
    units = [Unit(1, index) for index in range(12)]
    batch = {key: tensor for key, tensor in tiny_batch(rows=30, seed=9).items() if key != "labels"}

    def distance(sites):
        with torch.no_grad():
            return float((sites.model(**batch).logits - model(**batch).logits).square().mean())

    plain = find_sites(copy.deepcopy(model))
    remove(plain, units)
    assert distance(refitted(model, [units], recovery_for(model))) < distance(plain)


def test_the_limit_of_the_optimal_brain_surgeon(monkeypatch):
    """Inputs of the unpruned model, no ridge: the error is that of the Schur complement of the removed channels."""
    monkeypatch.setattr(least_squares, "RIDGE", 1e-12)
    monkeypatch.setattr(calibrations, "BY_GRADIENT", 0.0)
    model = tiny_model("bert", dtype=torch.float64)
    gone = [2, 5, 6, 11]
    recovery = recovery_for(model)
    sites = refitted(model, [[Unit(1, index) for index in gone]], recovery)
    original = recovery.calibration.original[1]
    x, y = [], []
    with torch.no_grad():
        for visit in through_layers(find_sites(copy.deepcopy(model)), recovery.calibration):
            found = [(sample.inputs, target.sums - sample.residuals) for sample, target in visit.samples()]
            if visit.site.index == 1:
                x, y = (torch.cat(part) for part in zip(*found, strict=True))
    x, y = x - x.mean(0), y - y.mean(0)
    gram = x.mT @ x
    kept = [index for index in range(24) if index not in gone]
    schur = gram[gone][:, gone] - gram[gone][:, kept] @ torch.linalg.solve(gram[kept][:, kept], gram[kept][:, gone])
    lost = output_of(original)[0][gone]
    expected = float((lost.mT @ schur @ lost).diagonal().sum())
    error = float((y - x[:, kept] @ output_of(sites[1])[0]).square().sum())
    assert error == pytest.approx(expected, rel=1e-6)
    single = torch.linalg.inv(gram)[2, 2]  # for one unit: |w|^2 / P_hh
    one = refitted(model, [[Unit(1, 2)]], recovery_for(model))
    others = [index for index in range(24) if index != 2]
    alone = float((y - x[:, others] @ output_of(one[1])[0]).square().sum())
    assert alone == pytest.approx(float(output_of(original)[0][2].square().sum() / single), rel=1e-6)


def test_gates_are_one_factor_for_each_unit():
    model = tiny_model("bert", dtype=torch.float64)
    sites = refitted(model, [GONE], recovery_for(model, "gates"))
    for site, original in zip(sites, find_sites(model), strict=True):
        places = [original.survivors.index(unit) for unit in site.survivors]
        size = site.output_size
        channels = [place * size + channel for place in places for channel in range(size)]
        ratio = site.output.weight / original.output.weight[:, channels]
        by_unit = ratio.view(len(ratio), len(places), size)
        torch.testing.assert_close(by_unit, by_unit[:1, :, :1].expand_as(by_unit), rtol=1e-9, atol=1e-9)
        assert torch.equal(site.output.bias, original.output.bias)
    assert not torch.allclose(ratio, torch.ones_like(ratio))


def test_a_singular_system_gets_a_larger_ridge(caplog):
    site = find_sites(tiny_model("bert"))[1]
    equations = NormalEquations(24, 16)
    equations.squares.fill_(1.0)
    equations.squares[0, 0] = -5.0  # not a Gram matrix: no small ridge makes it positive definite
    start = torch.ones(24, 16, dtype=torch.float64)
    weight, _ = least_squares.fit_weights(equations, start, torch.zeros(16, dtype=torch.float64), site)
    assert torch.isfinite(weight).all()
    assert "larger ridge" in caplog.text


def test_inputs_that_are_not_numbers_are_refused():
    model = tiny_model("bert")
    recovery = recovery_for(model)
    sites = find_sites(copy.deepcopy(model))
    remove(sites, GONE)
    with torch.no_grad():
        sites[0].sum.module.weight[0] = float("nan")  # the norm before the feed-forward
    with pytest.raises(gg.NonFiniteScore, match=r"layer 0 .* NaN or infinite on calibration rows"):
        recovery(sites)


def test_normal_equations_of_parts_are_those_of_the_whole():
    chance = np.random.default_rng(0)
    x, y, w = (torch.tensor(chance.normal(5, 2, shape)) for shape in ((50, 600), (50, 3), (50,)))
    w = w.abs()
    whole = NormalEquations(600, 3)
    whole.add(x, y, w)
    parts = NormalEquations(600, 3)
    for start, end in ((0, 10), (10, 11), (11, 50)):
        part = NormalEquations(600, 3)
        part.add(x[start:end], y[start:end], w[start:end])
        parts.merge(part)
    means = (w @ x) / w.sum(), (w @ y) / w.sum()
    expected = ((x - means[0]) * w[:, None]).mT @ (x - means[0])
    for equations in (whole, parts):
        assert equations.count == pytest.approx(float(w.sum()))
        torch.testing.assert_close(equations.squares, expected, rtol=1e-10, atol=1e-9)
        torch.testing.assert_close(
            equations.products, ((x - means[0]) * w[:, None]).mT @ (y - means[1]), rtol=1e-10, atol=1e-9
        )
        torch.testing.assert_close(equations.mean_input, means[0])


def test_what_a_norm_makes_of_a_stored_sum_is_not_stored():
    """In post-norm models only the first site reads something else, the embeddings; in GPT-2, each attention does."""
    stored = {}
    for family in ("bert", "deberta-v2", "gpt2"):
        model = tiny_model(family)
        recovery = recovery_for(model)
        refitted(model, [GONE], recovery)
        kinds = recovery.calibration._spill._kinds
        stored[family] = len({name for name in kinds if name.startswith("stream-")}) // len(ROWS)
    assert stored == {"bert": 1, "deberta-v2": 1, "gpt2": len(find_sites(tiny_model("gpt2"), "heads"))}


def test_stored_activations_are_written_over():
    spill = calibrations.Spill()
    for rows in (5, 2, 0, 7):
        tensor = torch.randn(rows, 3, dtype=torch.float64 if rows == 2 else torch.float32)
        spill["hidden"] = tensor
        assert torch.equal(spill["hidden"], tensor)


def test_a_full_disk_is_told(monkeypatch):
    model = tiny_model("bert")
    recovery = recovery_for(model)

    def full(path, mode):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibrations.Path, "open", full)
    with pytest.raises(gg.GnormError, match="Set TMPDIR to a folder on a disk with more room"):
        refitted(model, [GONE], recovery)
