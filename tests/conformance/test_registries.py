"""Every registry is walked: a new row is tested without writing a test."""

from __future__ import annotations

import inspect

import pytest
from conftest import FAMILY_CONFIGS, IMAGE_CONFIGS, model_type, tiny_batch, tiny_model

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.families import FAMILIES
from greedy_gnorm.model.modeling_pruned import LAYOUTS, RECORDS
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.pruning.methods import METHODS
from greedy_gnorm.pruning.rules import RULES
from greedy_gnorm.scores import SCORES
from greedy_gnorm.tasks.objectives import ANYTHING, LOGITS, OBJECTIVES, with_reference
from greedy_gnorm.units import UNIT_WORDS


def test_every_family_has_a_tiny_model():
    """The tests of surgery, gradients and scores take a model of each of them."""
    assert {model_type(name) for name in (*FAMILY_CONFIGS, *IMAGE_CONFIGS)} == set(FAMILIES)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family_is_data(family):
    row = FAMILIES[family]
    for site in row.sites:
        assert site.kind in UNIT_WORDS
        assert site.kind in RECORDS
        parts = [part for each in site.inputs for part in each.parts]
        assert len(set(parts)) == len(parts)
        assert {each.layout for each in (*site.inputs, site.output)} <= set(LAYOUTS)
        layout = site.layout(tiny_model(family).config)
        assert {*parts, *site.output.parts} <= set(layout["sizes"])
        assert set(site.follow.values()) <= {"units", *layout["sizes"]}


@pytest.mark.parametrize("family", [*FAMILY_CONFIGS, *IMAGE_CONFIGS])
def test_what_a_unit_costs_is_what_its_removal_saves(family):
    model = tiny_model(family)
    for site in find_sites(model, "heads"):
        before = sum(parameter.numel() for parameter in model.parameters())
        gg.remove_heads(model, {site.index: [1]})
        assert before - sum(parameter.numel() for parameter in model.parameters()) == site.unit_cost().parameters


@pytest.mark.parametrize("name", list(SCORES))
def test_a_score_says_what_it_is(name):
    score = SCORES[name]
    assert score.about
    assert score.cost
    assert score.paper
    assert score.objective is None or score.objective in OBJECTIVES
    assert all(value is not None for value in score.defaults().values()), "an option is read as the type of its default"
    assert inspect.getdoc(score.function)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_an_objective_gives_a_number_a_row(name):
    model = tiny_model("bert")
    (batch,) = with_reference(model, ready_batches([tiny_batch()]))
    assert OBJECTIVES[name](model, batch).shape == (5,)
    assert OBJECTIVES[name].reads in (LOGITS, ANYTHING)
    assert OBJECTIVES[name].about


def test_a_method_is_a_row_with_a_known_score():
    assert {METHODS[name].score for name in METHODS} == set(SCORES)
    assert all(RULES[name].form.partition("=")[0] == name and RULES[name].about for name in RULES)
