"""Budgets: how small a model should become, and which units to remove in each round to get there."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.sites import Site, Sites
from greedy_gnorm.model.sizes import MEGABYTE
from greedy_gnorm.pruning.costs import Costs
from greedy_gnorm.settings import Settings
from greedy_gnorm.units import FFN, UNIT_WORDS, Cost, Scores, Unit

FLOOR = 0.1
"""The share of multiplications where a compression without a target ends at the latest."""


@dataclass(frozen=True)
class Target:
    """The largest value that one part of the cost may have."""

    text: str
    part: str  # a field of Cost
    limit: float


@dataclass(frozen=True)
class Budget:
    """Targets that must all be reached, and how far towards them each round goes.

    `schedule` holds the progress after each round, from 0 to 1: after a round with progress p, the cost is at most
    start * (limit / start) ** p. Feed-forwards keep a multiple of `multiple_of` neurons, by default one that machines
    like where there are many; with `uniform` all sites of a kind keep the same number of units.
    """

    targets: tuple[Target, ...]
    start: Cost
    schedule: tuple[float, ...]
    multiple_of: int | None = None
    uniform: bool = False

    @property
    def leading(self) -> str:
        """The part of the cost that units are weighed by: that of the first target."""
        return self.targets[0].part

    def limits(self, number: int) -> dict[str, float]:
        """The largest cost after a round (the first is 1), by part."""
        progress = self.schedule[min(number, len(self.schedule)) - 1]
        limits: dict[str, float] = {}
        for target in self.targets:
            start = part_of(self.start, target.part)
            limit = start * (target.limit / start) ** progress
            limits[target.part] = min(limit, limits.get(target.part, math.inf))
        return limits

    def reached(self, cost: Cost) -> bool:
        """Whether all targets are reached."""
        return all(part_of(cost, target.part) <= target.limit * (1 + 1e-9) for target in self.targets)


def part_of(cost: Cost, part: str) -> float:
    """A part of a cost that must be known."""
    value = getattr(cost, part)
    assert value is not None, f"{part} is not known"
    return float(value)


def parse_budget(given: Settings, costs: Costs, sites: Sites, removable: Collection[Unit]) -> Budget:
    """The targets among the settings, checked against what is possible."""
    start, least = costs.of(sites), costs.without(sites, removable)
    targets = tuple(_targets(given, start))
    for target in targets:
        now, possible = part_of(start, target.part), part_of(least, target.part)
        if target.limit < possible:
            raise GnormError(
                f"{target.text} can't be reached: without any of the units that may be removed, "
                f"{_in_words(target.part, possible, now)} remain."
            )
        if target.limit >= now:
            raise GnormError(f"{target.text}: the model already has only {_in_words(target.part, now, now)}.")
    if not targets:
        floor = max(FLOOR * part_of(start, "multiplications"), part_of(least, "multiplications"))
        targets = (Target("the smallest model", "multiplications", floor),)
    return Budget(targets, start, even_schedule(given.rounds), given.multiple_of, given.uniform)


def even_schedule(rounds: int) -> tuple[float, ...]:
    """Every round removes the same share of the cost that is left."""
    return tuple(number / rounds for number in range(1, rounds + 1))


def schedule_through(shares: Sequence[float], rounds: int) -> tuple[float, ...]:
    """A schedule that ends rounds at these shares of the cost, the last of which is the target."""
    marks = [math.log(share) / math.log(shares[-1]) for share in shares]
    apart = 0.5 / rounds
    even = [each for each in even_schedule(rounds) if all(abs(each - mark) > apart for mark in marks)]
    return tuple(sorted([*even, *marks]))


COMPARED = (0.75, 0.6, 0.5, 0.4, 0.33, 0.25)
"""The shares of the multiplications at which methods are compared."""


def comparison_budget(start: Cost, rounds: int) -> Budget:
    """The budget of a walk that passes through the shares that are compared, and ends at the last one."""
    limit = COMPARED[-1] * part_of(start, "multiplications")
    target = Target(f"{COMPARED[-1]:.0%} of the multiplications", "multiplications", limit)
    return Budget((target,), start, schedule_through(COMPARED, rounds), multiple_of=1)


def _targets(given: Settings, start: Cost) -> Iterator[Target]:
    if given.macs is not None:
        yield Target(f"--macs {given.macs:g}", "multiplications", given.macs * part_of(start, "multiplications"))
    if given.speedup is not None:
        yield Target(f"--speedup {given.speedup:g}", "milliseconds", part_of(start, "milliseconds") / given.speedup)
    if given.latency is not None:
        yield Target(f"--latency {given.latency}", "milliseconds", milliseconds(given.latency))
    if given.params is not None:
        value = _share_or_count(given.params)
        limit = value * start.parameters if value < 1 else value
        yield Target(f"--params {given.params}", "parameters", limit)
    if given.size is not None:
        yield Target(f"--size {given.size}", "bytes", _bytes(given.size))


def check_targets(given: Settings) -> None:
    """Refuse targets that can't be read, before anything is loaded."""
    for text, read in ((given.latency, milliseconds), (given.params, _share_or_count), (given.size, _bytes)):
        if text is not None:
            read(text)


def _share_or_count(text: str) -> float:
    """A share of the parameters if it is below 1, else a number of them."""
    value = amount(text, {"": 1, "%": 0.01, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9})
    if value is None:
        raise GnormError(f"params {text!r}: write a share of the parameters, such as 0.6, or a number, such as 80M.")
    if value == 1:
        raise GnormError(f"params {text!r}: a share must be below 1.")
    return value


def milliseconds(text: str) -> float:
    """`10ms`, `0.5s`, or a number of milliseconds."""
    value = amount(text, {"": 1, "ms": 1, "s": 1000})
    if value is None:
        raise GnormError(f"latency {text!r}: write a time, such as 10ms.")
    return value


def _bytes(text: str) -> float:
    sizes = {"": 1, "kb": 2**10, "mb": MEGABYTE, "gb": 2**30, "k": 2**10, "m": MEGABYTE, "g": 2**30}
    value = amount(text, sizes)
    if value is None:
        raise GnormError(f"size {text!r}: write a size, such as 30MB.")
    return value


def amount(text: str, units: Mapping[str, float]) -> float | None:
    """A positive number with a unit, or None if the text is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*|%)", text.strip().lower())
    if not match or match.group(2) not in units or float(match.group(1)) <= 0:
        return None
    return float(match.group(1)) * units[match.group(2)]


def _in_words(part: str, value: float, whole: float) -> str:
    if part == "multiplications":
        return f"{value / whole:.1%} of the multiplications"
    if part == "milliseconds":
        return f"{value:.2f} ms (1/{whole / value:.2f} of the time)"
    return f"{value / MEGABYTE:.2f} MB" if part == "bytes" else f"{value:,.0f} parameters"


def by_rank(scores: Scores, order: Sequence[Unit], sites: Sites, budget: Budget, costs: Costs) -> Scores:
    """Scores that rank units within a kind only, on a scale by which every kind loses the same share of its cost.

    `order` are the units that can be removed, in ascending order of their scores.
    """
    vectors = [np.full(site.total, np.nan) for site in sites]
    for kind in {site.kind for site in sites}:
        units = [unit for unit in order if sites[unit.site].kind == kind]
        for place, unit in enumerate(units):
            weight = part_of(costs.unit(sites[unit.site]), budget.leading)
            vectors[unit.site][unit.index] = weight * (place + 1) / len(units)
    return Scores(vectors)


class Bundle(NamedTuple):
    """Units that are removed together, and the sum of their scores."""

    units: tuple[Unit, ...]
    score: float


def pick_round(
    scores: Scores, sites: Sites, removable: Sequence[Unit], budget: Budget, costs: Costs, number: int
) -> tuple[Unit, ...]:
    """The units to remove in a round: of all ways to come within its limits, the one with the lowest sum of scores.

    In each kind the units with the lowest score per cost go first, and every division between the kinds is tried.
    `removable` are the candidates in ascending order of their scores. A round whose limits are met already is skipped.
    """
    weights = {site.index: part_of(costs.unit(site), budget.leading) for site in sites}
    ordered = sorted(
        bundles(scores, sites, removable, budget),
        key=lambda bundle: bundle.score / sum(weights[unit.site] for unit in bundle.units),
    )
    queues = [
        _Queue([bundle for bundle in ordered if sites[bundle.units[0].site].kind == kind], sites) for kind in UNIT_WORDS
    ]
    for later in range(number, max(number, len(budget.schedule)) + 1):
        if units := _within(budget.limits(later), queues, sites, costs):
            return units
    return ()


class _Queue:
    """Bundles of one kind in the order of removal, with running sums of their scores and of the units of each site."""

    def __init__(self, bundles: Sequence[Bundle], sites: Sites) -> None:
        self.bundles = bundles
        self.scores = np.cumsum([0.0, *(bundle.score for bundle in bundles)])
        counts = np.zeros((len(bundles) + 1, len(sites)), dtype=int)
        for place, bundle in enumerate(bundles, start=1):
            for unit in bundle.units:
                counts[place, unit.site] += 1
        self.counts = counts.cumsum(0)

    def __len__(self) -> int:
        return len(self.bundles)


def _within(limits: Mapping[str, float], queues: Sequence[_Queue], sites: Sites, costs: Costs) -> tuple[Unit, ...]:
    """The units of the best division that brings the cost within the limits, or all units if none does."""
    first, second = queues
    start = np.array([len(site.survivors) for site in sites])

    def fits(some: int, others: int) -> bool:
        left = start - first.counts[some] - second.counts[others]
        cost = costs.at(dict(enumerate(left.tolist())))
        return all(part_of(cost, part) <= limit * (1 + 1e-9) for part, limit in limits.items())

    best, division = math.inf, (len(first), len(second))
    for some in range(len(first) + 1):
        if fits(some, len(second)):
            others = bisect_left(range(len(second) + 1), True, key=lambda count: fits(some, count))
            total = first.scores[some] + second.scores[others]
            if total < best:
                best, division = total, (some, others)
    taken = [*first.bundles[: division[0]], *second.bundles[: division[1]]]
    return tuple(sorted(unit for bundle in taken for unit in bundle.units))


def bundles(scores: Scores, sites: Sites, removable: Sequence[Unit], budget: Budget) -> Iterator[Bundle]:
    """What can be removed together: single units, whole multiples of neurons, or the same number in every site.

    In each site the units with the lowest scores come first.
    """
    by_site: dict[int, list[Unit]] = {site.index: [] for site in sites}
    for unit in removable:
        by_site[unit.site].append(unit)
    chunks = {site.index: _chunks(by_site[site.index], len(site.survivors), _multiple(site, budget)) for site in sites}
    groups = [[site.index] for site in sites]
    if budget.uniform:
        groups = [[site.index for site in sites if site.kind == kind] for kind in UNIT_WORDS]
    for group in groups:
        for together in zip(*(chunks[index] for index in group), strict=False):
            units = tuple(unit for chunk in together for unit in chunk)
            yield Bundle(units, float(sum(scores.vectors[unit.site][unit.index] for unit in units)))


WIDE, PREFERRED = 512, 16
"""A feed-forward of so many neurons or more keeps a multiple of the second number: matrix products are faster then."""


def _multiple(site: Site, budget: Budget) -> int:
    if site.kind != FFN:
        return 1
    return budget.multiple_of or (PREFERRED if site.total >= WIDE else 1)


def _chunks(units: Sequence[Unit], left: int, multiple: int) -> list[Sequence[Unit]]:
    """Groups of `multiple` units, after a first one that leaves a multiple; an incomplete last group is omitted."""
    first = left % multiple
    starts = [0, *range(first, len(units), multiple)] if first else list(range(0, len(units), multiple))
    groups = [
        units[start:end]
        for start, end in zip(starts, [*starts[1:], starts[-1] + multiple] if starts else [], strict=True)
    ]
    sizes = [first] * bool(first) + [multiple] * len(groups)
    return [group for group, size in zip(groups, sizes, strict=False) if len(group) == size]
