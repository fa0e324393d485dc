"""The greedy loop."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from greedy_gnorm.batches import Batches
from greedy_gnorm.errors import GnormError, NonFiniteScore
from greedy_gnorm.evaluate import evaluate
from greedy_gnorm.heads import Head, HeadScores, Step, removed_by
from greedy_gnorm.measure import parameter_count
from greedy_gnorm.objectives import Objective
from greedy_gnorm.rules import Rules
from greedy_gnorm.scores import Score
from greedy_gnorm.sites import Sites
from greedy_gnorm.strategies import Strategy
from greedy_gnorm.surgery import remove


@dataclass(frozen=True)
class Protection:
    """Heads that stay: those named, and enough at each site to leave it a minimum."""

    heads: frozenset[Head] = frozenset()
    least_per_site: int = 0

    def removable(self, candidates: Sequence[Head], left: Collection[Head]) -> Iterator[Head]:
        """Those of the candidates that may go, in their order, each counted as gone for the next."""
        remaining = Counter(head.site for head in left)
        for head in candidates:
            if head not in self.heads and remaining[head.site] > self.least_per_site:
                remaining[head.site] -= 1
                yield head


@dataclass
class Memory:
    """Results by the heads that are gone: several walks of one model over the same rows share what they share."""

    scores: dict[tuple[object, frozenset[Head]], HeadScores] = field(default_factory=dict)
    quality: dict[frozenset[Head], Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What a run works on and by: rows to score, rows to evaluate, the way heads are ranked, where it ends."""

    scoring: Batches
    evaluation: Batches
    strategy: Strategy
    score: Score
    objective: Objective
    rules: Rules
    protection: Protection
    bytes_per_parameter: int
    memory: Memory = field(default_factory=Memory)

    @property
    def way_of_scoring(self) -> tuple[object, ...]:
        """What two walks must have in common for one to use the other's scores."""
        return (self.score.key, self.objective.name, self.scoring.fingerprint, self.scoring.seed)


def prune_steps(sites: Sites, task: Task, history: Sequence[Step] = ()) -> Iterator[Step]:
    """Score, pick, remove, evaluate, until a rule says stop; goes on behind `history`, whose heads are gone already."""
    steps = list(history)
    if not steps:
        steps.append(_measured(sites, task, 0, (), None, {}))
        yield steps[-1]
    scores = steps[-1].scores.without(steps[-1].removed) if steps[-1].scores is not None else None
    while steps[-1].stop is None:
        number, seconds = steps[-1].step + 1, dict[str, float]()
        if scores is None or task.strategy.scores_at(number):
            with _timed(seconds, "score"):
                scores = _scored(sites, task)
        heads = pick(scores, sites, task, gone=len(removed_by(steps)))
        with _timed(seconds, "remove"):
            remove(sites, heads)
        step = _measured(sites, task, number, heads, scores, seconds)
        reason = task.rules.check([*steps, step])
        if reason is None and not any(task.protection.removable(sites.survivors(), sites.survivors())):
            reason = "no head is left to remove"
        steps.append(step if reason is None else replace(step, stop=reason))
        yield steps[-1]
        scores = scores.without(heads)


def pick(scores: HeadScores, sites: Sites, task: Task, gone: int) -> tuple[Head, ...]:
    """The next heads to go: the first in order that may, as many as the strategy takes and the rules allow."""
    order = scores.order(highest_first=task.strategy.highest_first)
    count = task.strategy.heads_per_step
    if task.rules.limit is not None:
        count = min(count, task.rules.limit - gone)
    heads = tuple(task.protection.removable(order, sites.survivors()))[:count]
    if not heads:
        raise GnormError("No head can be removed: all that are left are protected.")
    return heads


def _scored(sites: Sites, task: Task) -> HeadScores:
    key = (task.way_of_scoring, frozenset(sites.removed()))
    if key not in task.memory.scores:
        task.memory.scores[key] = task.score(sites, task.scoring, task.objective)
    return task.memory.scores[key]


def _measured(
    sites: Sites,
    task: Task,
    number: int,
    removed: tuple[Head, ...],
    scores: HeadScores | None,
    seconds: dict[str, float],
) -> Step:
    with _timed(seconds, "evaluate"):
        gone = frozenset(sites.removed())
        if gone not in task.memory.quality:
            task.memory.quality[gone] = evaluate(sites, task.evaluation)
        quality = task.memory.quality[gone]
    if not all(map(math.isfinite, quality.values())):
        raise NonFiniteScore(f"The quality at step {number} is not a number: {dict(quality)}. Are all weights finite?")
    parameters = parameter_count(sites.model)
    return Step(number, removed, scores, quality, parameters, parameters * task.bytes_per_parameter, seconds)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
