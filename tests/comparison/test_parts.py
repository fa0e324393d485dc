"""Which process makes which walk of a comparison."""

from __future__ import annotations

import pytest

import greedy_gnorm as gg
from greedy_gnorm.comparison.parts import Part, assign, forwards, parts_for
from greedy_gnorm.pruning.methods import methods_named
from greedy_gnorm.settings import Settings

SIZES = {"heads": 144, "scoring_rows": 500, "evaluation_rows": 1000}


def cost(method, **settings):
    return forwards(Part(method, 0), Settings(stop=("all",), **settings), **SIZES)


def test_the_cost_of_a_walk_counts_its_scorings_and_evaluations():
    evaluations = 145 * 1000
    assert cost("random") == cost("magnitude") == evaluations
    assert cost("ae") == cost("gnorm-static") == evaluations + 3 * 500
    assert cost("greedy-gnorm") == evaluations + 144 * 3 * 500
    assert cost("greedy-gnorm", recompute=12) == evaluations + 12 * 3 * 500
    assert cost("greedy-gnorm", heads_per_step=12) == 13 * 1000 + 12 * 3 * 500
    assert cost("leave-one-out-greedy") > cost("leave-one-out") > cost("fisher") > cost("random")


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("methods", ["paper", "greedy-gnorm", "leave-one-out-greedy,random", "all"])
def test_walks_are_balanced_by_their_cost(methods, processes):
    """The busiest process has no more than its fair share and one walk, whichever that is."""
    parts = parts_for(methods_named(methods), runs=3, trajectories=25)
    costs = {part: forwards(part, Settings(stop=("all",)), **SIZES) for part in parts}
    shares = assign(costs, processes)
    assert sorted(map(str, (part for share in shares for part in share))) == sorted(map(str, parts))
    loads = [sum(costs[part] for part in share) for share in shares]
    assert max(loads) <= 1.05 * (sum(loads) / processes + max(costs.values()))
    assert shares == assign(costs, processes)


def test_walks_of_one_run_stay_together_where_that_is_balanced():
    parts = parts_for(["ae", "inverse-ae"], runs=2, trajectories=1)
    shares = assign(dict.fromkeys(parts, 1), 2)
    assert [{part.run for part in share} for share in shares] == [{0}, {1}]


def test_an_expensive_walk_does_not_keep_the_cheap_ones_of_its_run():
    costs = {Part("greedy-gnorm", 0): 10, Part("random", 0): 5, Part("random", 1): 5}
    assert assign(costs, 2) == [[Part("greedy-gnorm", 0)], [Part("random", 0), Part("random", 1)]]


def test_more_processes_than_walks():
    assert assign({Part("ae", 0): 5}, 3) == [[Part("ae", 0)], [], []]


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_a_comparison_needs_a_run(numbers):
    with pytest.raises(gg.GnormError, match="at least 1 run"):
        parts_for(["ae"], *numbers)
