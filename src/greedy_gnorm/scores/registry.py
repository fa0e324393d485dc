"""What a score is, and the registry of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from greedy_gnorm.batches import Batches
from greedy_gnorm.heads import HeadScores
from greedy_gnorm.objectives import Objective
from greedy_gnorm.registry import Registry
from greedy_gnorm.sites import Sites

ScoreFunction = Callable[[Sites, Batches, Objective], HeadScores]


@dataclass(frozen=True)
class Score:
    """A named function (sites, batches, objective) -> HeadScores, higher for heads that matter more."""

    name: str
    paper: str
    cost: str
    uses_objective: bool
    function: ScoreFunction

    def __call__(self, sites: Sites, batches: Batches, objective: Objective) -> HeadScores:
        return self.function(sites, batches, objective)


SCORES: Registry[Score] = Registry("score")


def score(name: str, *, paper: str, cost: str, uses_objective: bool) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register a function as a score; `cost` is in passes over the scoring rows."""

    def register(function: ScoreFunction) -> ScoreFunction:
        SCORES.add(name, Score(name, paper, cost, uses_objective, function))
        return function

    return register
