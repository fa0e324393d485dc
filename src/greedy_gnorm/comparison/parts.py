"""The walks of a comparison, what each of them costs, and which process makes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greedy_gnorm.errors import GnormError
from greedy_gnorm.pruning.methods import DISTILL, EVERY_STEP, METHODS, NEVER, RANDOMS, resolve_method
from greedy_gnorm.scores import SCORES
from greedy_gnorm.settings import Settings

FORWARDS_PER_SCORING = 3
"""A backward pass takes about two forward passes."""

SLACK = 1.05
"""How much longer the busiest process may take for walks of one run to stay together."""


@dataclass(frozen=True)
class Part:
    """One walk of the comparison: a method, and the number of its run, which sets the scoring sample and the seed."""

    method: str
    run: int

    def __str__(self) -> str:
        return f"{self.method}-{self.run}"


def parts_for(methods: Sequence[str], runs: int, trajectories: int) -> list[Part]:
    """The walks of every method, run by run; random removal has a number of runs of its own."""
    if runs < 1 or trajectories < 1:
        raise GnormError("A comparison needs at least 1 run and 1 random trajectory.")
    counts = {name: trajectories if name in RANDOMS else runs for name in methods}
    return [Part(name, run) for run in range(max(counts.values())) for name in methods if run < counts[name]]


def settings_for(part: Part, given: Settings) -> Settings:
    """The settings of one walk: its method, its seed, and those of the score options that its score has."""
    known = SCORES[METHODS[part.method].score].defaults()
    options = {name: value for name, value in (given.score_options or {}).items() if name in known}
    return given.model_copy(update={"method": part.method, "seed": given.seed + part.run, "score_options": options})


def check_settings(methods: Sequence[str], given: Settings) -> None:
    """Refuse what no method can use, before anything is loaded."""
    known = {option for name in methods for option in SCORES[METHODS[name].score].defaults()}
    for option in given.score_options or {}:
        if option not in known:
            raise GnormError(f"No score of {', '.join(methods)} has the option {option!r}.")
    for name in methods:
        resolve_method(settings_for(Part(name, 0), given))
    if given.recover == DISTILL:
        raise GnormError(
            "Distillation trains one model at the end, but a comparison measures every step: give --recover "
            "least-squares, gates, mean or none."
        )
    if given.points is not None:
        if any(METHODS[name].in_rounds for name in methods):
            raise GnormError("--points is for methods of heads: those of heads and neurons are measured each round.")
        if given.heads_per_step is not None:
            raise GnormError("--points and --heads-per-step both say where walks are measured: give one of them.")
        if given.recompute not in (None, NEVER, EVERY_STEP):  # a step is continued from the scores that it begins with
            raise GnormError(
                "--points needs scores that are computed once or after each head: leave out --recompute, or give 0 "
                "or 1."
            )


def forwards(
    part: Part, given: Settings, *, heads: int, scoring_rows: int, evaluation_rows: int, points: Sequence[int] = ()
) -> int:
    """About how many rows a walk that removes so many heads, measured at these points, runs through the model."""
    method, score, _ = resolve_method(settings_for(part, given))
    turns = math.ceil(heads / method.heads_per_step)
    left = [heads - method.heads_per_step * (turn - 1) for turn in range(1, turns + 1) if method.scores_at(turn)]
    passes = 0 if score.cost == "none" else FORWARDS_PER_SCORING * len(left)
    if score.many_passes:  # one for each head that is left, at least
        passes = sum(left)
    passes += method.look_ahead * turns
    return ((len(points) or turns) + 1) * evaluation_rows + passes * scoring_rows


def assign(costs: Mapping[Part, int], processes: int) -> list[list[Part]]:
    """The walks of each process, balanced by cost.

    Walks of one run share their scoring sample and some scores, so they stay together unless that makes the busiest
    process slower. The costs alone decide: a comparison that is resumed gives every walk to the same process.
    """
    runs: dict[int, list[Part]] = {}
    for part in costs:
        runs.setdefault(part.run, []).append(part)
    together = _balance(list(runs.values()), costs, processes)
    apart = _balance([[part] for part in costs], costs, processes)
    slowest = [max(_load(share, costs) for share in shares) for shares in (together, apart)]
    return together if slowest[0] <= SLACK * slowest[1] else apart


def _balance(groups: Sequence[Sequence[Part]], costs: Mapping[Part, int], processes: int) -> list[list[Part]]:
    """The most expensive group first, each to the process that has the least to do."""
    shares: list[list[Part]] = [[] for _ in range(processes)]
    for group in sorted(groups, key=lambda group: -_load(group, costs)):
        min(shares, key=lambda share: _load(share, costs)).extend(group)
    return shares


def _load(parts: Sequence[Part], costs: Mapping[Part, int]) -> int:
    return sum(costs[part] for part in parts)
