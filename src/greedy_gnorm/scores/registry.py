"""The Score class, and the registry of scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from greedy_gnorm.errors import GnormError, NonFiniteScore
from greedy_gnorm.registry import Registry
from greedy_gnorm.tasks.objectives import OBJECTIVES, Objective
from greedy_gnorm.units import ATTENTION, UNIT_WORDS, Scores, unit_name

if TYPE_CHECKING:
    from greedy_gnorm.data.batches import Batches
    from greedy_gnorm.model.sites import Sites

ScoreFunction = Callable[..., Scores]
"""f(sites, batches, objective, *, options with defaults) -> Scores."""


@dataclass(frozen=True)
class Score:
    """A named function; `objective` is its default objective, None if it does not use one.

    `kinds` are the kinds of sites that it can score. If it is `comparable`, a score means the same for all of them and
    in every layer, so that heads and neurons can be ranked together; otherwise units are ranked within a kind. One
    that `draws_labels` is given rows with labels drawn from the unpruned model in place of the data's.
    """

    name: str
    about: str
    paper: str
    cost: str
    objective: str | None
    needs_labels: bool
    many_passes: bool
    function: ScoreFunction
    kinds: tuple[str, ...] = (ATTENTION,)
    comparable: bool = False
    draws_labels: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, sites: Sites, batches: Batches, objective: Objective) -> Scores:
        for site in sites:
            if site.kind not in self.kinds:
                able = ", ".join(name for name in SCORES if site.kind in SCORES[name].kinds)
                raise GnormError(
                    f"The score {self.name} is not defined for {UNIT_WORDS[site.kind]}s; these are: {able}."
                )
        scores = replace(self.function(sites, batches, objective, **self.options), sites=sites.infos)
        for unit in sites.survivors():
            if np.isnan(scores.key(unit)):
                raise NonFiniteScore(
                    f"The score {self.name} of {unit_name(sites.infos, unit)} is NaN. Are all weights finite?"
                )
        return scores

    @property
    def key(self) -> tuple[object, ...]:
        """The name and the options, which identify a score."""
        return (self.name, *sorted(self.defaults().items()))

    def asks_for_labels(self, objective: Objective) -> bool:
        """Whether the data must give labels for the scoring rows."""
        if self.draws_labels:
            return False
        return self.needs_labels or (self.objective is not None and objective.needs_labels)

    def defaults(self) -> dict[str, Any]:
        """The names of the options and their values."""
        parameters = inspect.signature(self.function).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        return {**own, **self.options}


SCORES: Registry[Score] = Registry("score")
KIND_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def score(
    name: str,
    *,
    about: str,
    paper: str,
    cost: str,
    objective: str | None = None,
    needs_labels: bool = False,
    many_passes: bool = False,
    kinds: tuple[str, ...] = (ATTENTION,),
    comparable: bool = False,
    draws_labels: bool = False,
) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register a function as a score; `cost` says how many passes it takes, `many_passes` whether more than two."""

    def register(function: ScoreFunction) -> ScoreFunction:
        if objective is not None:
            OBJECTIVES[objective]
        own = (about, paper, cost, objective, needs_labels, many_passes, function, kinds, comparable, draws_labels)
        SCORES.add(name, Score(name, *own))
        return function

    return register


def score_with(name: str, options: Mapping[str, Any] | None) -> Score:
    """A score with options such as {"variant": "A", "eps": 1e-5}, each of the type of its default."""
    chosen = SCORES[name]
    defaults, given = chosen.defaults(), {}
    for key, value in (options or {}).items():
        if key not in defaults:
            known = ", ".join(f"{option}={default}" for option, default in defaults.items()) or "none"
            raise GnormError(f"The score {name!r} has no option {key!r}. Options and defaults: {known}.")
        kind = type(defaults[key])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise GnormError(f"The option {key} of {name!r} must be {KIND_WORDS[kind]}, not {value!r}.")
        given[key] = kind(value)
    return replace(chosen, options=given)
