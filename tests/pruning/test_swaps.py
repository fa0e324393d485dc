"""Exchanges of units: each lowers the estimate, none that would is left, and the cost stays the same."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from conftest import tiny_batch, tiny_model

import greedy_gnorm as gg
from greedy_gnorm.pruning.swaps import local_search
from greedy_gnorm.units import Unit, removed_by

DATA, EVALUATION = [tiny_batch(rows=24, seed=1)], [tiny_batch(rows=30, seed=2)]
GROUPS = [slice(0, 4), slice(4, 9), slice(9, 20)]


def estimate(table, removed):
    return float(np.square(table[:, removed].sum(1)).mean())


def table_of(seed):
    return np.random.default_rng(seed).normal(size=(15, 20)) * np.random.default_rng(seed + 1).uniform(0.1, 3, 20)


def start_of(seed):
    chance = np.random.default_rng(seed + 2)
    return chance.random(20) < 0.5, chance.random(20) < 0.8


def brute_force(table, removed, allowed):
    """Groups take turns; every exchange of a group is tried on the whole estimate."""
    removed, helped = removed.copy(), True
    while helped:
        helped = False
        for group in GROUPS:
            places = range(group.start, group.stop)
            best, found = estimate(table, removed) * (1 - 1e-9), None
            for stays, goes in product(places, places):
                if removed[stays] and not removed[goes] and allowed[goes]:
                    trial = removed.copy()
                    trial[stays], trial[goes] = False, True
                    if estimate(table, trial) < best:
                        best, found = estimate(table, trial), trial
            if found is not None:
                removed, helped = found, True
    return removed


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_search_by_brute_force(seed):
    table, (removed, allowed) = table_of(seed), start_of(seed)
    found = local_search(table, removed, allowed, GROUPS)
    assert np.array_equal(found, brute_force(table, removed, allowed))
    assert estimate(table, found) <= estimate(table, removed)
    assert [found[group].sum() for group in GROUPS] == [removed[group].sum() for group in GROUPS]
    assert not (found & ~removed & ~allowed).any()


def test_some_searches_find_exchanges():
    results = [local_search(table_of(seed), *start_of(seed), GROUPS) for seed in range(12)]
    assert any(not np.array_equal(found, start_of(seed)[0]) for seed, found in enumerate(results))


def test_effects_that_cancel_are_removed_together():
    table = np.array([[1.0, 2.0, -1.0], [1.0, 2.0, -1.0]])
    found = local_search(table, np.array([True, True, False]), np.ones(3, dtype=bool), [slice(0, 3)])
    assert found.tolist() == [True, False, True]


def compressed(model, **options):
    options = {"eval_data": EVALUATION, "macs": 0.5, "rounds": 2, "recover": "none", **options}
    return gg.compress(model, DATA, **options)


def test_a_round_costs_the_same_with_other_units(family):
    model = tiny_model(family)
    plain, swapped = (compressed(model, method="joint-rounds", rounds=1, swap=swap) for swap in (False, True))
    one, other = (Counter(unit.site for unit in removed_by(run.steps)) for run in (plain, swapped))
    assert one == other
    assert plain.steps[-1].cost == swapped.steps[-1].cost


def test_swapping_changes_what_is_removed_and_spares_protected_heads():
    model = tiny_model("bert")
    plain, swapped = (
        removed_by(compressed(model, method="joint-rounds", swap=swap, protect=[(0, 1)]).steps)
        for swap in (False, True)
    )
    assert set(plain) != set(swapped)
    assert Unit(0, 1) not in swapped


@pytest.mark.parametrize("method", ["joint-magnitude", "joint-gnorm"])
def test_methods_that_do_not_use_the_loss_are_refused(method):
    with pytest.raises(gg.GnormError, match="swap compares derivatives of the loss"):
        compressed(tiny_model("bert"), method=method, swap=True)


def test_a_method_that_swaps_can_do_without():
    model = tiny_model("bert")
    orders = [
        removed_by(compressed(model, method=method, swap=swap, recover="none").steps)
        for method, swap in (("joint-swap", None), ("joint-swap", False), ("joint-fisher", None))
    ]
    assert orders[0] != orders[1] == orders[2]


def test_a_run_that_was_cut_short_ends_alike(tmp_path):
    model, options = tiny_model("bert"), {"method": "joint-swap", "rounds": 3}
    whole = compressed(model, out=tmp_path / "whole", **options)

    def stop(step, *_):
        if step.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compressed(model, out=tmp_path / "cut", on_step=stop, **options)
    resumed = compressed(model, out=tmp_path / "cut", resume=True, **options)
    assert [step.removed for step in resumed.steps] == [step.removed for step in whole.steps]
