"""Comparisons that measure quality at some points of the curve only."""

from __future__ import annotations

import numpy as np
import pytest
from comparison.test_compare import compare, essence

import greedy_gnorm as gg
from greedy_gnorm.comparison.analysis import SHARES, points_for, read_comparison
from greedy_gnorm.pruning import loop
from greedy_gnorm.pruning.curves import at_share, curve
from greedy_gnorm.units import removed_by


def removed(walk):
    return [len(removed_by(walk[: place + 1])) for place in range(len(walk))]


def test_the_points_are_even_and_around_the_shares_of_the_table():
    assert points_for(72, 6) == [12, 18, 24, 36, 48, 54, 58, 59, 60, 72]
    assert points_for(72, 72) == list(range(1, 73))
    assert points_for(8, 1) == [2, 4, 6, 7, 8]
    assert points_for(1, 3) == [1]


def test_walks_are_measured_there_with_the_same_results(tmp_path):
    methods = "paper,fisher-greedy,gnorm-look-ahead"
    every, some = (compare(tmp_path / str(points), points=points, methods=methods) for points in (None, 2))
    shown = [0, *points_for(8, 2)]
    for method in every.curves:
        for whole, part in zip(every.curves[method], some.curves[method], strict=True):
            assert removed_by(part) == removed_by(whole)
            for share in SHARES:
                assert at_share(curve(part, some.measure), share) == at_share(curve(whole, every.measure), share)
            assert removed(part) == shown
            assert [step.quality for step in part] == [whole[place].quality for place in shown]
    assert essence(read_comparison(tmp_path / "2")) == essence(some)
    again = compare(tmp_path / "2", points=2, methods=methods, resume=True)
    assert essence(again) == essence(some)


def test_the_scores_of_a_step_are_those_that_it_begins_with(tmp_path):
    every, some = (compare(tmp_path / str(points), methods="greedy-gnorm", points=points) for points in (None, 2))
    whole, part = every.curves["greedy-gnorm"][0], some.curves["greedy-gnorm"][0]
    for step, gone in zip(part[1:], removed(part), strict=False):
        for ours, theirs in zip(step.scores.vectors, whole[gone + 1].scores.vectors, strict=True):
            assert np.array_equal(ours, theirs, equal_nan=True)


def test_a_comparison_that_was_cut_short_goes_on_from_a_point(tmp_path):
    whole = compare(tmp_path / "whole", methods="greedy-gnorm", runs=1, points=2)

    def stop(part, step, *_):
        if step.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "cut", methods="greedy-gnorm", runs=1, points=2, on_step=stop)
    resumed = compare(tmp_path / "cut", methods="greedy-gnorm", runs=1, points=2, resume=True)
    assert essence(resumed) == essence(whole)


def test_a_score_that_is_computed_once_stays_while_heads_are_tried(tmp_path, monkeypatch):
    scored, own = [], loop._scored
    monkeypatch.setattr(loop, "_scored", lambda sites, plan: scored.append(len(sites.removed())) or own(sites, plan))
    methods = {"methods": "gnorm-look-ahead", "runs": 1, "recompute": 0}
    every, some = (compare(tmp_path / str(points), points=points, **methods) for points in (None, 2))
    assert scored == [0, 0]
    assert removed_by(some.curves["gnorm-look-ahead"][0]) == removed_by(every.curves["gnorm-look-ahead"][0])


def test_protected_heads_leave_fewer_points(tmp_path):
    found = compare(tmp_path / "c", methods="random", protect=[(0, 1)], points=3)
    assert all(removed(walk)[-1] == 7 for walk in found.curves["random"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "joint-random"}, "--points is for methods of heads"),
        ({"heads_per_step": 2}, "give one of them"),
        ({"recompute": 3}, "leave out --recompute, or give 0 or 1"),
        ({"points": 0}, "points must be a whole number, 1 or more"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message, tmp_path):
    with pytest.raises(gg.GnormError, match=message):
        compare(tmp_path / "c", **{"points": 3, **options})
