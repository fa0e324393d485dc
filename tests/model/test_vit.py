"""A classifier of images: the same sites, cuts, norms and maps, without tokens or padding."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.gates import gates
from greedy_gnorm.model.modeling_pruned import pruned_class
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import as_plain, dense, remove
from greedy_gnorm.passes import gradients
from greedy_gnorm.passes.gradients import NORMS, gate_gradients, gradient_norms
from greedy_gnorm.passes.maps import attention_maps
from greedy_gnorm.settings import MEBIBYTE, Savings
from greedy_gnorm.tasks.objectives import LOGITS, Objective
from greedy_gnorm.units import Unit

TOKENS = 5  # four patches, and one that the classifier reads
CUTS = {
    "some": [Unit(0, 1), Unit(0, 2), Unit(1, 3), Unit(1, 17), Unit(5, 0)],
    "an emptied layer": [*(Unit(2, head) for head in range(4)), *(Unit(3, neuron) for neuron in range(24))],
    "everything": [Unit(site, unit) for site in range(6) for unit in range(24 if site % 2 else 4)],
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def images(rows=4, seed=0, dtype=torch.float32):
    chance = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=chance).to(dtype)}


def logits(model):
    with torch.no_grad():
        return model(**images()).logits.float()


def norm_of_logits(model, batch):
    return model(**batch.inputs).logits.norm(dim=-1)


OBJECTIVE = Objective("norm", "", False, False, LOGITS, norm_of_logits)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_removed_equals_gated_equals_reloaded(cut, attention, dtype, tmp_path):
    model = tiny_model("vit", dtype=dtype)
    model.set_attn_implementation(attention)
    sites, whole = find_sites(model), logits(model)
    closed = {
        site.index: torch.tensor([float(Unit(site.index, unit) not in CUTS[cut]) for unit in range(site.total)])
        for site in sites
    }
    with gates(sites, closed):
        gated = logits(model)
    remove(sites, CUTS[cut])
    removed = logits(model)
    assert (gated - whole).abs().max() > 1e-3
    torch.testing.assert_close(removed, gated, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    model.save_pretrained(tmp_path)
    loaded = pruned_class(type(tiny_model("vit"))).from_pretrained(tmp_path, dtype=dtype).eval()
    loaded.set_attn_implementation(attention)
    assert torch.equal(logits(loaded), removed)
    assert find_sites(loaded).removed() == sites.removed()
    torch.testing.assert_close(logits(dense(model)), removed, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def slow_norms(model, batches):
    """By site, (norms, survivors): the mean over images of the norms of weight gradients, a backward pass for each."""
    sites = find_sites(model)
    sums = [torch.zeros(len(NORMS[site.kind]), len(site.survivors), dtype=torch.float64) for site in sites]
    rows = [row for batch in batches for row in batch["pixel_values"].split(1)]
    for row in rows:
        model.zero_grad()
        model(pixel_values=row).logits.norm().backward()
        for site, total in zip(sites, sums, strict=True):
            if site.kind == "attention":
                found = [linear.weight.grad.unflatten(0, (-1, 4)).flatten(1) for linear in site.inputs.values()]
            else:
                found = [*(linear.weight.grad for linear in site.inputs.values()), site.output.weight.grad.mT]
            total += torch.stack([block.norm(dim=1) for block in found]) / len(rows)
    return sums


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("cache", [0, MEBIBYTE])
def test_norms_match_a_backward_pass_per_image(gram, cache, monkeypatch):
    monkeypatch.setattr(gradients, "gram_is_cheaper", lambda *sizes: gram)
    model = tiny_model("vit", dtype=torch.float64)
    batches = [images(4, 1, torch.float64), images(1, 2, torch.float64)]
    for cut in ([], CUTS["some"], [Unit(3, neuron) for neuron in range(24)]):
        sites = find_sites(model).use(Savings(kept_bytes=cache))
        remove(sites, cut)
        for _ in range(2):
            norms = gradient_norms(sites, ready_batches(batches), OBJECTIVE)
        for site, expected in zip(sites, slow_norms(model, batches), strict=True):
            ours = torch.tensor([norms[name][site.index][site.survivors] for name in NORMS[site.kind]])
            torch.testing.assert_close(ours.view_as(expected), expected, rtol=1e-9, atol=0)


def test_gate_gradients_are_those_of_gates():
    model = tiny_model("vit", dtype=torch.float64)
    sites = find_sites(model)
    (batch,) = ready_batches([images(3, 1, torch.float64)])
    ours = gate_gradients(sites, batch, OBJECTIVE)
    values = {site.index: torch.ones(3, site.total, dtype=torch.float64, requires_grad=True) for site in sites}
    with gates(sites, values):
        expected = torch.autograd.grad(norm_of_logits(model, batch).sum(), list(values.values()))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_maps_are_read_without_changing_the_outputs():
    model, seen = tiny_model("vit"), []
    expected = logits(model)
    with attention_maps(find_sites(model), lambda site, weights: seen.append(weights) or weights):
        torch.testing.assert_close(logits(model), expected)
    assert [tuple(weights.shape) for weights in seen] == [(4, 4, TOKENS, TOKENS)] * 3


def test_equal_widths_make_an_ordinary_model(tmp_path):
    model = tiny_model("vit")
    remove(find_sites(model), [Unit(site, site) for site in (1, 3, 5)])
    as_plain(model).save_pretrained(tmp_path)
    loaded = type(tiny_model("vit")).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))


def test_a_batch_of_images_has_as_many_tokens_as_the_model_makes():
    (batch,) = ready_batches([images()])
    assert len(batch) == 4
    assert torch.equal(batch.real_tokens(TOKENS), torch.ones(4, TOKENS))
    with pytest.raises(gg.DataError, match="not known how many tokens"):
        batch.real_tokens()
    for wrong in ({"pixel_values": torch.zeros(3, 8, 8)}, {"input_ids": torch.zeros(3)}, {"labels": torch.zeros(3)}):
        with pytest.raises(gg.DataError, match="Batch 0 must have"):
            ready_batches([wrong])
