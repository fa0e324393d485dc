"""The greedy loop."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.errors import DataError, GnormError, NonFiniteScore
from greedy_gnorm.model.sites import Sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.evaluation import Evaluation, judge
from greedy_gnorm.passes.trials import trial_removals
from greedy_gnorm.pruning.budget import Budget, bundles, by_rank, pick_round
from greedy_gnorm.pruning.costs import Costs
from greedy_gnorm.pruning.methods import Method
from greedy_gnorm.pruning.rules import Rules
from greedy_gnorm.pruning.swaps import exchange
from greedy_gnorm.recovery.least_squares import Recovery
from greedy_gnorm.scores import Score
from greedy_gnorm.tasks.objectives import Objective
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import Measure, Scores, Step, Unit, removed_by


@dataclass(frozen=True)
class Protection:
    """Units that must stay: those listed, and a minimum number in each site."""

    units: frozenset[Unit] = frozenset()
    least_per_site: int = 0

    def removable(self, candidates: Sequence[Unit], left: Collection[Unit]) -> Iterator[Unit]:
        """The candidates that may be removed, in order; each one counts as removed for the next."""
        remaining = Counter(unit.site for unit in left)
        for unit in candidates:
            if unit not in self.units and remaining[unit.site] > self.least_per_site:
                remaining[unit.site] -= 1
                yield unit


@dataclass
class Memory:
    """Results by the set of removed units, shared by walks of the same model over the same rows."""

    scores: dict[tuple[object, frozenset[Unit]], Scores] = field(default_factory=dict)
    quality: dict[tuple[object, frozenset[Unit]], Evaluation] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The inputs of a run: rows to score on, rows to evaluate on, how units are ranked, when to stop."""

    scoring: Batches
    evaluation: Batches
    method: Method
    score: Score
    objective: Objective
    rules: Rules
    protection: Protection
    costs: Costs
    budget: Budget | None = None
    recovery: Recovery | None = None
    memory: Memory = field(default_factory=Memory)
    points: Sequence[int] = ()  # numbers of removed heads, ascending: only there is quality measured

    @property
    def scoring_key(self) -> tuple[object, ...]:
        """What must be equal for one walk to use another's scores."""
        return (self.score.key, self.objective.name, self.scoring.fingerprint, self.scoring.seed, *self.recovery_key)

    @property
    def recovery_key(self) -> tuple[object, ...]:
        """What the weights depend on besides the units that are removed."""
        return () if self.recovery is None else self.recovery.key


def prune_steps(sites: Sites, plan: Plan, history: Sequence[Step] = ()) -> Iterator[Step]:
    """Score, pick, remove, refit and evaluate until a rule stops the run; continues after the steps in `history`."""
    steps = list(history)
    if not steps:
        steps.append(_measure_step(sites, plan, 0, (), None, {}))
        _check_reference(sites, plan.rules.measure, steps[0])
        yield steps[-1]
    scores = steps[-1].scores.without(steps[-1].removed) if steps[-1].scores is not None else None
    while steps[-1].stop is None:
        number, seconds = steps[-1].step + 1, dict[str, float]()
        units, first = tuple[Unit, ...](), None
        while True:
            with _timed(seconds, "score"):
                if scores is None or plan.method.scores_at(number + len(units)):
                    scores = _scored(sites, plan)
                picked = pick(scores, sites, plan, steps, len(units))
            first = first or scores
            with _timed(seconds, "remove"):
                remove(sites, picked)
            if plan.recovery is not None:
                with _timed(seconds, "recover"):
                    plan.recovery(sites)
            units, scores = (*units, *picked), scores.without(picked)
            if not plan.points or len(removed_by(steps)) + len(units) in plan.points:
                break
        step = _as_recorded(_measure_step(sites, plan, number, units, first, seconds), steps[0])
        reason = plan.rules.check([*steps, step])
        if reason is None and not _more_to_remove(sites, plan, scores):
            reason = f"no {'head' if plan.budget is None else 'unit'} is left to remove"
        steps.append(step if reason is None else replace(step, stop=reason))
        yield steps[-1]


def pick(scores: Scores, sites: Sites, plan: Plan, steps: Sequence[Step], begun: int = 0) -> tuple[Unit, ...]:
    """The next units to remove: the first removable ones, as many as the method takes, or as the round asks for.

    `begun` is how many units the present step has removed already, on the way to its point.
    """
    order = scores.order(highest_first=plan.method.highest_first)
    removable = tuple(plan.protection.removable(order, sites.survivors()))
    if not removable:
        raise GnormError("No head can be removed: all remaining heads are protected.")
    if plan.budget is not None:
        weighed = scores if plan.score.comparable else by_rank(scores, removable, sites, plan.budget, plan.costs)
        units = pick_round(weighed, sites, removable, plan.budget, plan.costs, len(steps))
        if not plan.method.swap:
            return units
        free = [unit for unit in sites.survivors() if unit not in plan.protection.units]
        return exchange(units, free, sites, plan.scoring, plan.objective)
    count, gone = plan.method.heads_per_step, len(removed_by(steps)) + begun
    if plan.method.look_ahead > 1:
        removable = _closest_first(removable, sites, plan)
    if plan.points and not plan.method.recompute and plan.method.look_ahead <= 1:
        count = next(point for point in plan.points if point > gone) - gone
    if plan.rules.limit is not None:
        count = min(count, plan.rules.limit - gone)
    return removable[:count]


def _closest_first(order: Sequence[Unit], sites: Sites, plan: Plan) -> tuple[Unit, ...]:
    """The next units by what their removal on trial does to the outputs, followed by all others."""
    tried = order[: plan.method.look_ahead]
    distances = trial_removals(sites, plan.scoring, tried)
    return (*sorted(tried, key=lambda unit: distances[unit]), *order[len(tried) :])


def _more_to_remove(sites: Sites, plan: Plan, scores: Scores) -> bool:
    removable = tuple(plan.protection.removable(sites.survivors(), sites.survivors()))
    return any(removable if plan.budget is None else bundles(scores, sites, removable, plan.budget))


def _scored(sites: Sites, plan: Plan) -> Scores:
    key = (plan.scoring_key, frozenset(sites.removed()))
    if key not in plan.memory.scores:
        if sites.kept is not None:
            sites.kept.begin({"removed": [list(unit) for unit in sites.removed()]})
        plan.memory.scores[key] = plan.score(sites, plan.scoring, plan.objective)
    return plan.memory.scores[key]


def _check_reference(sites: Sites, measure: Measure, first: Step) -> None:
    """Refuse rows on which the unpruned model does not even agree with itself: quality could not fall there."""
    value = measure.of(first)
    if task_of(sites.model).is_agreement(measure.name) and value < 1 - 1e-6:
        raise DataError(
            f"The unpruned model's {measure.name} with itself is {value:.4f} on these rows: there is nothing in them "
            f"that it tells apart or finds. Give other rows, or labels."
        )


def _measure_step(
    sites: Sites,
    plan: Plan,
    number: int,
    removed: tuple[Unit, ...],
    scores: Scores | None,
    seconds: dict[str, float],
) -> Step:
    with _timed(seconds, "evaluate"):
        key = plan.recovery_key if removed else (), frozenset(sites.removed())
        if key not in plan.memory.quality:
            plan.memory.quality[key] = judge(sites, plan.evaluation, plan.rules.measure.name)
        found = plan.memory.quality[key]
    if not all(map(math.isfinite, found.quality.values())):
        raise NonFiniteScore(
            f"The quality at step {number} is NaN or infinite: {dict(found.quality)}. Check the weights for NaN."
        )
    cost = plan.costs.of(sites)
    return Step(number, removed, scores, found.quality, cost, seconds, None, found.interval, found.right)


def _as_recorded(step: Step, first: Step) -> Step:
    """A step with what the first one of its run has: an older version that began the run recorded less."""
    work = None if first.cost.multiplications is None else step.cost.multiplications
    return replace(
        step,
        quality={name: step.quality[name] for name in first.quality},
        cost=replace(step.cost, multiplications=work),
        interval=None if first.interval is None else step.interval,
        right=None if first.right is None else step.right,
    )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
