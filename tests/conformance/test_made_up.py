"""What must hold for any family and any task, shown on ones that differ from all real ones in every way."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from made_up import (
    GROUPS,
    HEADS,
    KEY,
    LAYERS,
    PER_GROUP,
    SIZE,
    VALUE,
    made_up_batch,
    made_up_model,
    registered,
)
from transformers.pytorch_utils import Conv1D

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.gates import gates
from greedy_gnorm.model.modeling_pruned import interleaved, shrink, unit_channels
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import fill_empty_sites, remove
from greedy_gnorm.passes.evaluation import evaluate
from greedy_gnorm.passes.gradients import gate_gradients, gradient_norms
from greedy_gnorm.passes.processes import gather_rows
from greedy_gnorm.pruning.curves import knee_of
from greedy_gnorm.pruning.rules import last_within
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.settings import MEBIBYTE, Savings
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.units import Unit, removed_by, unit_name

SCORING, EVALUATION = [made_up_batch(seed=1), made_up_batch(rows=3, seed=2, longest=6)], [made_up_batch(seed=7)]
CUTS = {
    "some of both": [Unit(0, 1), Unit(0, 3), Unit(1, 0), Unit(3, 5), Unit(4, 2)],
    "a whole site": [Unit(2, unit) for unit in range(GROUPS)] + [Unit(3, 4)],
    "a whole layer": [Unit(0, unit) for unit in range(GROUPS)] + [Unit(1, unit) for unit in range(HEADS)],
    "everything": [Unit(site, unit) for site in range(2 * LAYERS) for unit in range(HEADS if site % 2 else GROUPS)],
}


@pytest.fixture(autouse=True)
def made_up():
    with registered():
        yield


def logits(model):
    inputs = {name: tensor for name, tensor in made_up_batch(seed=5).items() if name != "labels"}
    with torch.no_grad():
        return model(**inputs).logits


def test_sites_come_in_the_order_they_run():
    sites = find_sites(made_up_model(), "heads")
    assert [(site.layer, site.total, site.number) for site in sites] == [
        (place // 2, HEADS if place % 2 else GROUPS, place) for place in range(2 * LAYERS)
    ]
    assert [len(layer.sites) for layer in sites.layers] == [2] * LAYERS
    assert unit_name(sites.infos, Unit(2, 3)) == "L1a·H3"
    assert unit_name(sites.infos, Unit(3, 5)) == "L1b·H5"


@pytest.mark.parametrize("cut", CUTS)
def test_removed_equals_gated_equals_built_anew(cut):
    model = made_up_model()
    sites, whole = find_sites(model, "heads"), logits(model)
    closed = {
        site.index: torch.tensor([float(Unit(site.index, unit) not in CUTS[cut]) for unit in range(site.total)])
        for site in sites
    }
    with gates(sites, closed):
        gated = logits(model)
    assert (gated - whole).abs().max() > 1e-3
    before = sum(parameter.numel() for parameter in model.parameters())
    saved = sum(sites[unit.site].unit_cost().parameters for unit in CUTS[cut])
    remove(sites, CUTS[cut])
    torch.testing.assert_close(logits(model), gated)
    assert sum(parameter.numel() for parameter in model.parameters()) == before - saved
    again = made_up_model(seed=3)
    shrink(again, model.config)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(again), gated)
    assert find_sites(model, "heads").removed() == sorted(CUTS[cut])
    filled = copy.deepcopy(model)
    fill_empty_sites(filled)
    torch.testing.assert_close(logits(filled), gated)
    assert all(min(layer.first.groups, layer.second.num_heads) > 0 for layer in filled.layers)


def blocks(layer, site):
    """The weight gradients of the units that are left, from the plain module, unit by unit: (q, k, v) each."""
    if site % 2 == 0:
        parts = (layer.first.q, PER_GROUP * KEY), (layer.first.k, KEY), (layer.first.v, VALUE)
        for unit in range(layer.first.groups):
            yield [linear.weight.grad[unit * size : (unit + 1) * size] for linear, size in parts]
    elif layer.second.num_heads:
        gradient = layer.second.qkv.weight.grad.view(-1, layer.second.num_heads, 3, SIZE)
        for unit in range(layer.second.num_heads):
            yield [gradient[:, unit, part] for part in range(3)]


def slow_norms(model):
    """A backward pass per unpadded row: the mean norm of every unit's query, key and value gradients."""
    sites = find_sites(model, "heads")
    totals = [np.zeros((3, len(site.survivors))) for site in sites]
    count = 0
    for batch in SCORING:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            length = int(mask.sum())
            model.zero_grad()
            outputs = model(input_ids=ids[None, :length], attention_mask=mask[None, :length]).logits
            outputs[:, :2].norm().backward()
            count += 1
            for site, total in zip(sites, totals, strict=True):
                for place, parts in enumerate(blocks(model.layers[site.layer], site.index)):
                    total[:, place] += [float(part.norm()) for part in parts]
    model.zero_grad()
    return [total / count for total in totals]


@pytest.mark.parametrize("savings", [Savings(), Savings(kept_layers=False), Savings(gram=False, kept_bytes=MEBIBYTE)])
@pytest.mark.parametrize("cut", [None, "some of both", "a whole layer"])
def test_gradient_norms_are_exact(savings, cut):
    model = made_up_model()
    remove(find_sites(model, "heads"), CUTS[cut] if cut else [])
    sites = find_sites(model, "heads").use(savings)
    for _ in range(2):  # computed, then kept
        norms = gradient_norms(sites, ready_batches(SCORING), OBJECTIVES["logit-norm"])
    for site, slow in zip(sites, slow_norms(model), strict=True):
        for name, expected in zip(("q", "k", "v"), slow, strict=True):
            np.testing.assert_allclose(norms[name][site.index][site.survivors], expected, rtol=1e-9)


def test_gate_gradients_are_exact():
    model = made_up_model()
    remove(find_sites(model, "heads"), CUTS["some of both"])
    sites = find_sites(model, "heads")
    (batch,) = ready_batches([made_up_batch(seed=1)])
    found = gate_gradients(sites, batch, OBJECTIVES["loss"])
    for place in range(len(sites)):
        for unit in range(len(sites[place].survivors)):
            sides = []
            for sign in (1, -1):
                gate = torch.ones(len(sites[place].survivors), dtype=torch.float64)
                gate[unit] += sign * 1e-6
                with torch.no_grad(), gates(sites, {place: gate}):
                    sides.append(OBJECTIVES["loss"](model, batch))
            torch.testing.assert_close(found[place][:, unit], (sides[0] - sides[1]) / 2e-6, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("method", ["greedy-gnorm", "michel-greedy", "fisher", "magnitude", "leave-one-out", "random"])
def test_every_kind_of_method_walks_to_the_end(method):
    run = gg.prune(made_up_model(), SCORING, eval_data=EVALUATION, method=method, stop="all")
    assert sorted(removed_by(run.steps)) == sorted(CUTS["everything"])
    assert [len(vector) for vector in run.steps[1].scores.vectors] == [GROUPS, HEADS] * LAYERS
    assert run.steps[0].quality["perplexity"] > 1


def test_leave_one_out_counts_a_rising_perplexity_as_a_loss():
    model = made_up_model()
    scores = gg.score(model, SCORING, score="leave-one-out")
    batches = ready_batches(SCORING)
    whole = evaluate(find_sites(model, "heads"), batches)["perplexity"]
    pruned = copy.deepcopy(model)
    remove(find_sites(pruned, "heads"), [Unit(1, 4)])
    lost = evaluate(find_sites(pruned, "heads"), batches)["perplexity"] - whole
    assert scores.vectors[1][4] == pytest.approx(lost)
    assert abs(lost) > 1e-6


def test_a_run_with_its_folder_rules_and_page(tmp_path):
    model = made_up_model()
    options = {"eval_data": EVALUATION, "latency": False}
    whole = gg.prune(model, SCORING, stop="all", out=tmp_path / "whole", **options)
    perplexities = [step.quality["perplexity"] for step in whole.steps]
    assert whole.solution.step == knee_of(whole.steps, whole.measure)
    allowed = (max(perplexities) - perplexities[0]) / 2
    assert allowed > 0
    first = next(place for place, value in enumerate(perplexities) if value > perplexities[0] + allowed)
    run = gg.prune(model, SCORING, stop=f"drop={allowed}", out=tmp_path / "drop", **options)
    assert len(run.steps) - 1 >= first
    assert run.solution.step == last_within(whole.steps, allowed, whole.measure)
    assert "perplexity rose by more than" in run.reason or len(run.steps) == len(whole.steps)
    journal = Journal.read(tmp_path / "whole")
    assert journal.header["higher_is_better"] is False
    lines = [json.loads(line) for line in (tmp_path / "whole" / "journal.jsonl").read_text().splitlines()]
    assert [len(row) for row in lines[1]["scores"]] == [GROUPS, HEADS] * LAYERS
    page = (tmp_path / "whole" / "report.html").read_text()
    assert '"L1b·H5"' in page or '"L1b\\u00b7H5"' in page
    assert torch.equal(logits(whole.at(3)), logits(cut_to(model, whole.steps[:4])))


def cut_to(model, steps):
    pruned = copy.deepcopy(model)
    remove(find_sites(pruned, "heads"), removed_by(steps))
    return pruned


def test_resumed_it_ends_the_same(tmp_path):
    class Stop(Exception):
        pass

    def stop(step, gone, limit):
        if step.step == 4:
            raise Stop

    options = {"eval_data": EVALUATION, "latency": False, "stop": "heads=9"}
    whole = gg.prune(made_up_model(), SCORING, out=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        gg.prune(made_up_model(), SCORING, out=tmp_path / "parts", on_step=stop, **options)
    resumed = gg.prune(made_up_model(), SCORING, out=tmp_path / "parts", resume=True, **options)
    assert [step.removed for step in resumed.steps] == [step.removed for step in whole.steps]
    journals = [Journal.read(tmp_path / name) for name in ("whole", "parts")]
    assert journals[0].seal == journals[1].seal


def test_protection_counts_every_site_by_itself():
    run = gg.prune(made_up_model(), SCORING, eval_data=EVALUATION, stop="all", min_heads=2)
    counts = [len(site.survivors) for site in find_sites(run.at(len(run.steps) - 1), "heads")]
    assert counts == [2] * (2 * LAYERS)


def test_statistics_of_rows_are_put_together_in_the_order_of_the_data():
    tables = [torch.tensor([[2.0, 20.0], [0.0, 0.0]]), torch.tensor([[1.0, 10.0]])]
    assert gather_rows(tables, [(2, 0), (1,)]).tolist() == [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]]


def test_a_conv1d_is_cut_along_its_own_dimensions():
    model = made_up_model()
    second = model.layers[0].second
    weight, bias, out = second.qkv.weight.clone(), second.qkv.bias.clone(), second.out.weight.clone()
    remove(find_sites(model, "heads"), [Unit(1, 0), Unit(1, 1), Unit(1, 2), Unit(1, 4)])
    kept = [*range(18, 24), *range(30, 36)]  # heads 3 and 5: six channels each
    assert isinstance(second.qkv, Conv1D)
    assert torch.equal(second.qkv.weight, weight[:, kept])
    assert torch.equal(second.qkv.bias, bias[kept])
    assert torch.equal(second.out.weight, out[[6, 7, 10, 11]])
    assert (second.qkv.nf, second.out.nx, second.num_heads) == (12, 4, 2)


def test_the_layouts():
    sizes = {"q": 2, "k": 1, "v": 1}
    fused = {"parts": ["q", "k", "v"], "layout": "fused"}
    assert unit_channels(fused, 3, sizes) == {
        "q": [[0, 1], [2, 3], [4, 5]],
        "k": [[6], [7], [8]],
        "v": [[9], [10], [11]],
    }
    # Three units with a query head in each of two groups
    in_groups = {"parts": ["q", "q"], "layout": "fused"}
    assert unit_channels(in_groups, 3, sizes) == {"q": [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]}
    assert interleaved(2, [2, 1, 1]) == [
        [range(2), range(4, 6)],
        [range(2, 3), range(6, 7)],
        [range(3, 4), range(7, 8)],
    ]
    assert unit_channels({"parts": ["q"], "layout": "plain"}, 2, {"q": 3}) == {"q": [[0, 1, 2], [3, 4, 5]]}
