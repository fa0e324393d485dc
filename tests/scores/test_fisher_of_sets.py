"""Joint Fisher scores against brute force: the information of every set that a step could lead to."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import EVERY_FAMILY, tiny_model
from scores.test_outputs import BATCHES, check, model_in
from twins import slow_effects

import greedy_gnorm as gg
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.scores.joint import joint_scores
from greedy_gnorm.units import ATTENTION


def information(effects, units):
    """The joint Fisher information of a set of units."""
    return float((effects[:, sorted(units)].sum(1) ** 2).mean())


def by_brute_force(effects):
    """Each time the unit whose set has the least information; scores never fall."""
    gone, scores, highest = set(), np.zeros(effects.shape[1]), -np.inf
    while len(gone) < len(scores):
        before = information(effects, gone)
        left = [unit for unit in range(len(scores)) if unit not in gone]
        added, unit = min((information(effects, {*gone, unit}) - before, unit) for unit in left)
        highest = scores[unit] = max(highest, added)
        gone.add(unit)
    return scores


@EVERY_FAMILY
@pytest.mark.parametrize("state", ["whole", "cut"])
def test_scores_are_those_of_brute_force(family, state):
    model = model_in(family, state)
    sites, effects = find_sites(model), slow_effects(model, BATCHES)
    heads = [site.index for site in sites if site.kind == ATTENTION]
    together = by_brute_force(np.concatenate([effects[index] for index in heads], axis=1))
    ends = np.cumsum([effects[index].shape[1] for index in heads])[:-1]
    of_heads = dict(zip(heads, np.split(together, ends), strict=True))
    expected = [of_heads[site.index] if site.index in heads else by_brute_force(effects[site.index]) for site in sites]
    scores = gg.score(model, BATCHES, score="fisher-joint", units="both")
    check(model, scores, expected)
    for site, alone in zip(sites, scores.parts["alone"], strict=True):
        wanted = [information(effects[site.index], [unit]) for unit in range(len(site.survivors))]
        np.testing.assert_allclose(alone[site.survivors], wanted, rtol=1e-9)


def test_of_two_units_with_the_same_effect_the_second_counts_three_times():
    chance = np.random.default_rng(0)
    effect = chance.normal(size=50)
    effects = np.stack([effect, effect, *(20 * chance.normal(size=(3, 50)))], axis=1)
    scores = joint_scores(effects)
    square = (effect**2).mean()
    np.testing.assert_allclose(scores[:2], [square, 3 * square])


def test_the_first_of_all_is_the_one_with_the_lowest_fisher_score():
    model = tiny_model("bert")
    joint = gg.score(model, BATCHES, score="fisher-joint")
    alone = gg.score(model, BATCHES, score="fisher")
    assert joint.order()[0] == alone.order()[0]
    assert joint.order() != alone.order()
    assert len(set(joint.values.flatten())) == joint.values.size, "no ties, so that the order is kept"


def test_effects_without_end_are_refused():
    model = tiny_model("bert")
    model.classifier.weight.data[0, 0] = np.inf
    with pytest.raises(gg.NonFiniteScore, match="NaN or infinite on scoring rows"):
        gg.score(model, BATCHES, score="fisher-joint")
