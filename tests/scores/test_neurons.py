"""Scores of feed-forward neurons, each against a slow, obvious version."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import EVERY_FAMILY, tiny_batch, tiny_model
from twins import columns_of, rows_of, unpadded

import greedy_gnorm as gg
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.scores import SCORES
from greedy_gnorm.units import FFN, Unit

BATCHES = [tiny_batch(seed=1), tiny_batch(rows=3, seed=2, longest=7)]
COMPARABLE = ["michel-raw", "fisher", "kl-fisher", "fisher-joint", "reconstruction-loss"]


@pytest.fixture(params=["whole", "cut"])
def model(family, request):
    """A model in float64, whole or without some heads, some neurons and one feed-forward."""
    model = tiny_model(family, dtype=torch.float64)
    if request.param == "cut":
        sites = find_sites(model)
        last = sites[-1]
        remove(sites, [Unit(0, 1), *(Unit(1, index) for index in range(0, 24, 3))])
        if len(sites) > 2:
            remove(sites, [Unit(last.index, index) for index in range(last.total)])
    return model


def slow_neurons(model):
    """For each sentence and site, the weight gradients of the two maps and of a gate, by a backward pass of its own."""
    sites = find_sites(model, "ffn")
    for batch in BATCHES:
        for row in unpadded(batch):
            labels = row.pop("labels")
            seen = {site.index: [] for site in sites}
            handles = [
                site.output.register_forward_pre_hook(
                    lambda module, given, calls=seen[site.index]: calls.append(given[0].requires_grad_())
                )
                for site in sites
                if site.survivors
            ]
            model.zero_grad()
            logits = model(**row).logits
            for handle in handles:
                handle.remove()
            yield sites, logits, labels, seen


def norms_of(model):
    """The mean norms of each neuron's row and column, by site."""
    totals, count = None, 0
    for sites, logits, _, _ in slow_neurons(model):
        logits.square().sum().sqrt().backward()
        found = []
        for site in sites:
            both = [], []
            if site.survivors:
                parts = (rows_of(site, part, gradient=True) for part in site.parts)
                both = zip(*parts, strict=True), columns_of(site, gradient=True)
            rows, columns = ([float(torch.cat([*each]).norm()) for each in part] for part in both)
            found.append(np.stack([rows, columns]))
        totals = found if totals is None else [a + b for a, b in zip(totals, found, strict=True)]
        count += 1
    model.zero_grad()
    return [total / count for total in totals]


def gate_effects(model, size):
    """The mean over sentences of a function of each gate's derivative, by site."""
    totals, count = None, 0
    for sites, logits, labels, seen in slow_neurons(model):
        loss = torch.nn.functional.cross_entropy(logits, labels)
        found = []
        for site in sites:
            outputs = seen[site.index]
            gradients = torch.autograd.grad(loss, outputs, retain_graph=True) if outputs else ()
            effect = sum((a.detach() * g).sum((0, 1)) for a, g in zip(outputs, gradients, strict=True))
            found.append(size(effect.numpy()) if outputs else np.zeros(0))
        totals = found if totals is None else [a + b for a, b in zip(totals, found, strict=True)]
        count += 1
    return [total / count for total in totals]


def check(model, scores, expected):
    sites = find_sites(model, "ffn")
    for site, vector, wanted in zip(sites, scores.vectors, expected, strict=True):
        np.testing.assert_allclose(vector[site.survivors], wanted, rtol=1e-9)
        assert np.isnan(np.delete(vector, site.survivors)).all()


@EVERY_FAMILY
def test_gnorm_of_a_neuron_is_the_product_of_its_row_and_column(model):
    norms = norms_of(model)
    scores = gg.score(model, BATCHES, score="gnorm", units="ffn")
    check(model, scores, [both.prod(0) for both in norms])
    for place, name in enumerate(("row", "column")):
        for site, part, wanted in zip(find_sites(model, "ffn"), scores.parts[name], norms, strict=True):
            np.testing.assert_allclose(part[site.survivors], wanted[place], rtol=1e-9)
    direct = gg.score(model, BATCHES, score="gnorm", units="ffn", savings="none")
    for ours, theirs in zip(scores.vectors, direct.vectors, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def test_gate_scores_of_neurons(model):
    check(model, gg.score(model, BATCHES, score="fisher", units="ffn"), gate_effects(model, np.square))
    raw = gate_effects(model, np.abs)
    check(model, gg.score(model, BATCHES, score="michel-raw", units="ffn"), raw)
    normalised = [vector / np.sqrt((vector**2).sum()) if len(vector) else vector for vector in raw]
    check(model, gg.score(model, BATCHES, score="michel", units="ffn"), normalised)


def test_magnitude_and_random_of_neurons(model):
    expected = []
    for site in find_sites(model, "ffn"):
        columns = [each.T for each in columns_of(site)]
        blocks = zip(*(rows_of(site, part) for part in site.parts), columns, strict=True)
        expected.append([float(torch.cat(each).norm()) for each in blocks])
    check(model, gg.score(model, BATCHES, score="magnitude", units="ffn"), expected)
    draws = gg.score(model, BATCHES, score="random", units="both", seed=3)
    assert len({value for vector in draws.vectors for value in vector[~np.isnan(vector)]}) == len(draws.units())


@pytest.mark.parametrize("score", COMPARABLE)
def test_both_kinds_at_once_score_as_each_alone(model, score):
    both = gg.score(model, BATCHES, score=score, units="both")
    alone = {units: iter(gg.score(model, BATCHES, score=score, units=units).vectors) for units in ("heads", "ffn")}
    for site, vector in zip(find_sites(model), both.vectors, strict=True):
        np.testing.assert_allclose(vector, next(alone["ffn" if site.kind == FFN else "heads"]), rtol=1e-9)


def test_which_scores_mean_the_same_for_both_kinds():
    assert [name for name in SCORES if SCORES[name].comparable] == COMPARABLE
    able = [name for name in SCORES if FFN in SCORES[name].kinds]
    others = ["confidence", "entropy", "tis", "attribution", "leave-one-out", "shapley"]
    assert set(SCORES) - set(able) == set(others), "those of attention maps, and those that try each head"


def test_a_score_of_attention_refuses_neurons():
    with pytest.raises(gg.GnormError, match="entropy is not defined for neurons; these are: gnorm, gnorm-plus, michel"):
        gg.score(tiny_model("bert"), BATCHES, score="entropy", units="both")
