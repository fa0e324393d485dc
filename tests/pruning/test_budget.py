"""Costs of models and units, targets, and which units a round removes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import tiny_batch, tiny_model

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.deployment.speed import torch_latencies
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.sizes import parameter_count
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.speed import multiplications
from greedy_gnorm.pruning.budget import (
    COMPARED,
    Budget,
    Target,
    by_rank,
    comparison_budget,
    even_schedule,
    parse_budget,
    part_of,
    pick_round,
)
from greedy_gnorm.pruning.costs import Costs, Shape, Times, measured_times, shape_for
from greedy_gnorm.settings import Settings
from greedy_gnorm.units import Scores, Unit

SHAPE = Shape(8, 10, 100)


def random_scores(sites, seed=0):
    draws = np.random.default_rng(seed)
    return Scores([draws.random(site.total) for site in sites]).without(sites.removed())


def budget_of(costs, sites, share=0.5, rounds=1, **options):
    start = costs.of(sites)
    target = Target("half", "multiplications", share * part_of(start, "multiplications"))
    return Budget((target,), start, even_schedule(rounds), **options)


def removable(scores):
    return tuple(scores.order())


def test_costs_are_those_of_the_cut_model(family):
    model = tiny_model(family)
    sites = find_sites(model)
    costs = Costs(sites, 4, SHAPE)
    assert costs.of(sites).multiplications == multiplications(model, 10)
    units = [Unit(0, 1), Unit(1, 2), Unit(1, 23), Unit(len(sites) - 1, 7)]
    expected = costs.without(sites, units)
    remove(sites, units)
    assert costs.of(sites) == expected
    assert expected.parameters == parameter_count(model)
    assert expected.bytes == 4 * parameter_count(model)
    assert expected.multiplications == multiplications(model, 10)


@pytest.mark.parametrize("units", ["both", "heads", "ffn"])
def test_multiplications_of_rows_of_unequal_length_are_their_mean(family, units):
    model = tiny_model(family)
    batches = ready_batches([tiny_batch(rows=6), tiny_batch(rows=2, longest=5)])
    lengths = batches.lengths()
    mean = np.mean([multiplications(model, length) for length in lengths])
    sites = find_sites(model, units)
    found = Costs(sites, 4, shape_for(None, batches)).of(sites).multiplications
    assert found == pytest.approx(mean, abs=2)
    assert Costs(sites, 4, Shape(1, 40, 1600)).of(sites).multiplications == multiplications(model, 40)
    assert shape_for("8x128", batches) == Shape(8, 128, 128 * 128)


def test_times_are_interpolated_by_width():
    sites = find_sites(tiny_model("bert"))
    times = Times(10.0, {"attention": [(0.0, 7.0), (0.5, 9.0), (1.0, 10.0)], "ffn": [(0.0, 4.0), (1.0, 10.0)]})
    costs = Costs(sites, 4, SHAPE, times)
    assert costs.of(sites).milliseconds == 10.0
    counts = {site.index: 2 if site.kind == "attention" else 12 for site in sites}
    assert costs.at(counts).milliseconds == pytest.approx(10 - 1 - 3)
    assert costs.at({**{site.index: site.total for site in sites}, 1: 0}).milliseconds == pytest.approx(10 - 2)
    assert costs.unit(sites[1]).milliseconds == pytest.approx(6 / 3 / 24)
    assert Times.from_json(times.to_json()).to_json() == times.to_json()


def test_measured_times_fall_with_the_width():
    model = tiny_model("bert", hidden_size=64, intermediate_size=2048, num_attention_heads=4)
    times = measured_times(find_sites(model), Shape(8, 32, 1024), seconds=1.0)
    for kind in ("attention", "ffn"):
        shares, line = zip(*times.by_kind[kind], strict=True)
        assert shares == (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
        assert list(line) == sorted(line)
        assert line[-1] == times.whole
    assert times.saved("ffn", 0.0) > times.whole / 4
    half = find_sites(copy.deepcopy(model), "ffn")
    remove(half, [Unit(site.index, index) for site in half for index in range(1024)])
    (measured,) = torch_latencies(model, half.model, [(8, 32)], seconds=1.0)
    costs = Costs(find_sites(model), 4, Shape(8, 32, 1024), times)
    promised = times.whole / part_of(costs.of(find_sites(half.model)), "milliseconds")
    assert 0.5 < measured.speed_up / promised < 2


def test_a_round_loses_the_least_score(family):
    sites = find_sites(tiny_model(family))
    costs, scores = Costs(sites, 4, SHAPE), random_scores(sites)
    budget = budget_of(costs, sites)
    units = pick_round(scores, sites, removable(scores), budget, costs, 1)
    limit = budget.limits(1)["multiplications"]
    left = part_of(costs.without(sites, units), "multiplications")
    assert left <= limit
    assert left > limit - max(part_of(costs.unit(site), "multiplications") for site in sites)

    def lost(removed):
        return sum(scores.key(unit) for unit in removed)

    kinds = [[u for u in scores.order() if sites[u.site].kind == kind] for kind in ("attention", "ffn")]
    for heads in range(len(kinds[0]) + 1):  # every other division between heads and neurons loses as much or more
        for neurons in range(len(kinds[1]) + 1):
            others = [*kinds[0][:heads], *kinds[1][:neurons]]
            if part_of(costs.without(sites, others), "multiplications") <= limit:
                assert lost(units) <= lost(others) + 1e-12
                break


def test_rounds_go_down_by_equal_shares():
    sites = find_sites(tiny_model("bert"))
    costs = Costs(sites, 4, SHAPE)
    budget = budget_of(costs, sites, 0.25, 4)
    start = part_of(costs.of(sites), "multiplications")
    assert [budget.limits(number)["multiplications"] / start for number in range(1, 5)] == pytest.approx(
        [0.25**0.25, 0.5, 0.25**0.75, 0.25]
    )
    through = comparison_budget(costs.of(sites), 6)
    shares = [through.limits(number)["multiplications"] / start for number in range(1, len(through.schedule) + 1)]
    assert shares == sorted(shares, reverse=True)
    for mark in COMPARED:
        assert any(share == pytest.approx(mark) for share in shares)


def test_widths_are_multiples():
    sites = find_sites(tiny_model("bert"))
    remove(sites, [Unit(1, 0), Unit(1, 1), Unit(1, 5)])  # 21 neurons are left there
    costs, scores = Costs(sites, 4, SHAPE), random_scores(sites)
    units = pick_round(scores, sites, removable(scores), budget_of(costs, sites, 0.2, multiple_of=4), costs, 1)
    remove(sites, units)
    widths = [len(site.survivors) for site in sites if site.kind == "ffn"]
    assert any(width < 20 for width in widths)
    assert [width % 4 for width in widths if width not in (21, 24)] == [0] * sum(w not in (21, 24) for w in widths)


def test_wide_layers_keep_multiples_of_sixteen_by_default():
    for neurons, multiple in ((512, 16), (500, 1)):
        sites = find_sites(tiny_model("bert", intermediate_size=neurons))
        costs, scores = Costs(sites, 4, SHAPE), random_scores(sites)
        remove(sites, pick_round(scores, sites, removable(scores), budget_of(costs, sites, 0.4), costs, 1))
        widths = [len(site.survivors) for site in sites if site.kind == "ffn"]
        assert any(width < neurons for width in widths)
        assert all(width % 16 == 0 for width in widths) == (multiple == 16)


def test_uniform_layers_keep_the_same_number():
    sites = find_sites(tiny_model("bert"))
    costs, scores = Costs(sites, 4, SHAPE), random_scores(sites)
    units = pick_round(scores, sites, removable(scores), budget_of(costs, sites, 0.5, uniform=True), costs, 1)
    remove(sites, units)
    for kind in ("attention", "ffn"):
        assert len({len(site.survivors) for site in sites if site.kind == kind}) == 1
    assert (
        costs.of(sites).multiplications <= 0.5 * budget_of(costs, find_sites(tiny_model("bert"))).start.multiplications
    )


def test_scores_that_rank_within_a_kind_take_the_same_share_of_each():
    sites = find_sites(tiny_model("bert"))
    costs = Costs(sites, 4, SHAPE)
    scores = Scores(
        [
            vector * (1e6 if site.kind == "ffn" else 1)
            for site, vector in zip(sites, random_scores(sites).vectors, strict=True)
        ]
    )
    budget = budget_of(costs, sites)
    order = removable(scores)
    units = pick_round(by_rank(scores, order, sites, budget, costs), sites, order, budget, costs, 1)
    gone = {kind: [unit for unit in units if sites[unit.site].kind == kind] for kind in ("attention", "ffn")}
    total = {kind: sum(site.total for site in sites if site.kind == kind) for kind in gone}
    shares = [len(gone[kind]) / total[kind] for kind in gone]
    assert shares[0] == pytest.approx(shares[1], abs=0.1)
    for kind, removed in gone.items():
        lowest = [unit for unit in order if sites[unit.site].kind == kind][: len(removed)]
        assert set(removed) == set(lowest)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"macs": 0.001}, r"--macs 0.001 can't be reached: .* \d+\.\d% of the multiplications remain"),
        ({"params": "10"}, r"--params 10 can't be reached: .* [\d,]+ parameters remain"),
        ({"params": "900M"}, "the model already has only [0-9,]+ parameters"),
        ({"size": "5kb"}, r"--size 5kb can't be reached: .* MB remain"),
        ({"size": "10 apples"}, "size '10 apples': write a size, such as 30MB"),
        ({"params": "-3"}, "params '-3': write a share"),
        ({"params": "1.0"}, "params '1.0': a share must be below 1"),
        ({"latency": "fast"}, "latency 'fast': write a time, such as 10ms"),
    ],
)
def test_targets_that_can_not_be_reached_say_what_can(targets, message):
    sites = find_sites(tiny_model("bert"))
    costs = Costs(
        sites, 4, SHAPE, Times(10.0, {"attention": [(0.0, 7.0), (1.0, 10.0)], "ffn": [(0.0, 4.0), (1.0, 10.0)]})
    )
    with pytest.raises(gg.GnormError, match=message):
        parse_budget(Settings.of(targets), costs, sites, sites.survivors())


@pytest.mark.parametrize("target", [{"latency": "fast"}, {"size": "30XB"}, {"params": "few"}])
def test_targets_that_can_not_be_read_are_refused_before_anything_is_loaded(target):
    with pytest.raises(gg.GnormError, match=f"{next(iter(target))} .*: write a"):
        gg.compress("no model is here", "nor are rows", **target)


def test_several_targets_are_all_reached():
    sites = find_sites(tiny_model("bert"))
    costs, scores = Costs(sites, 4, SHAPE), random_scores(sites)
    given = Settings.of({"macs": 0.6, "params": 0.7, "rounds": 1})
    budget = parse_budget(given, costs, sites, sites.survivors())
    start = costs.of(sites)
    remove(sites, pick_round(scores, sites, removable(scores), budget, costs, 1))
    assert budget.reached(costs.of(sites))
    assert costs.of(sites).parameters <= 0.7 * start.parameters
    assert costs.of(sites).multiplications <= 0.6 * start.multiplications


def test_the_targets_are_read_as_they_are_written():
    sites = find_sites(tiny_model("bert"))
    times = Times(10.0, {"attention": [(0.0, 7.0), (1.0, 10.0)], "ffn": [(0.0, 4.0), (1.0, 10.0)]})
    costs = Costs(sites, 4, SHAPE, times)
    parameters = costs.of(sites).parameters
    for targets, part, limit in (
        ({"speedup": 2}, "milliseconds", 5.0),
        ({"latency": "8ms"}, "milliseconds", 8.0),
        ({"latency": "0.0085s"}, "milliseconds", 8.5),
        ({"params": 0.75}, "parameters", 0.75 * parameters),
        ({"params": str(parameters - 5)}, "parameters", parameters - 5),
        ({"size": f"{4 * parameters - 20}"}, "bytes", 4 * parameters - 20),
    ):
        (target,) = parse_budget(Settings.of(targets), costs, sites, sites.survivors()).targets
        assert (target.part, target.limit) == (part, pytest.approx(limit))
    assert torch.get_num_threads() == 1
