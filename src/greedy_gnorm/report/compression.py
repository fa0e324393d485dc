"""What the records of compressions say: the units left in each layer, the cost left, the choices, the final test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from greedy_gnorm.pruning.choices import Choice
from greedy_gnorm.pruning.curves import Points, Walk
from greedy_gnorm.pruning.run import sites_of, units_of
from greedy_gnorm.units import ATTENTION, UNIT_WORDS, Matrix, Measure, Scores, SiteInfo, Step, Unit, layer_names

COMPRESS = "compress"
MULTIPLICATIONS, PARAMETERS = "multiplications", "parameters"


def is_compression(header: Mapping[str, Any]) -> bool:
    """Whether a run works towards a budget, on neurons too or on heads alone."""
    return header.get("command") == COMPRESS or units_of(header) != "heads"


@dataclass(frozen=True)
class Kept:
    """The units of one kind: how many each layer had at the start, and how many it has left after each step."""

    word: str
    layers: list[str]
    totals: list[int]
    left: list[list[int]]  # (steps, layers)

    @property
    def words(self) -> str:
        """`heads` or `neurons`."""
        return f"{self.word}s"

    @property
    def total(self) -> int:
        """The number at the start."""
        return sum(self.totals)

    def gone(self, step: int) -> int:
        """How many were removed up to a step."""
        return self.total - sum(self.left[step])

    def removed_in(self, step: int) -> int:
        """How many a step removed."""
        return self.gone(step) - (self.gone(step - 1) if step else 0)


def kept_units(header: Mapping[str, Any], steps: Sequence[Step]) -> list[Kept]:
    """The units that are left, by kind: heads first."""
    sites, before = sites_of(header), Counter(Unit(*unit).site for unit in header["model"]["removed"])
    now = [site.units - before[index] for index, site in enumerate(sites)]
    counts = []
    for step in steps:
        gone = Counter(unit.site for unit in step.removed)
        now = [count - gone[index] for index, count in enumerate(now)]
        counts.append(now)
    found = []
    for kind, word in UNIT_WORDS.items():
        own = [index for index, site in enumerate(sites) if site.kind == kind]
        totals = [sites[index].units - before[index] for index in own]
        left = [[count[index] for index in own] for count in counts]
        if own:
            found.append(Kept(word, layer_names([sites[index] for index in own]), totals, left))
    return found


def counted(kinds: Sequence[Kept], step: int) -> str:
    """`4 heads, 210 neurons`: what a step removed."""
    numbers = [(kept.removed_in(step), kept) for kept in kinds]
    return ", ".join(f"{number:,} {kept.words if number != 1 else kept.word}" for number, kept in numbers if number)


def head_places(sites: Sequence[SiteInfo]) -> list[int]:
    """The places of those sites that have heads."""
    return [place for place, site in enumerate(sites) if site.kind == ATTENTION]


def scores_of_heads(scores: Scores, sites: Sequence[SiteInfo]) -> Scores:
    """The scores without those of neurons."""
    own = head_places(sites)
    logs = None if scores.logs is None else [scores.logs[place] for place in own]
    return Scores([scores.vectors[place] for place in own], logs)


def cost_part(walks: Iterable[Sequence[Step]]) -> str:
    """What these runs are shown against: multiplications, or parameters where a record has no multiplications."""
    return MULTIPLICATIONS if all(walk[0].cost.multiplications for walk in walks) else PARAMETERS


def percent_left(steps: Sequence[Step], part: str) -> list[float]:
    """How much of a part of the cost is left after each step, in per cent."""
    values = [getattr(step.cost, part) or 0 for step in steps]
    return [100 * value / values[0] for value in values]


def work_curve(steps: Sequence[Step], measure: Measure, part: str = MULTIPLICATIONS) -> list[tuple[float, float]]:
    """(per cent of the cost left, quality) after each step."""
    return [(left, measure.of(step)) for left, step in zip(percent_left(steps, part), steps, strict=True)]


def aligned(curves: Sequence[Points]) -> tuple[list[float], Matrix]:
    """The costs of the first curve, and the quality of all curves there, (curves, costs); costs go down.

    Rounds end at nearly the same cost, but not at exactly the same.
    """
    across = [left for left, _ in curves[0]]
    values = []
    for points in curves:
        lefts, qualities = zip(*reversed(points), strict=True)
        values.append(np.interp(across, lefts, qualities))
    return across, np.array(values)


def axis_title(part: str) -> str:
    """The title of an axis of percentages."""
    return f"{part.capitalize()} left (%)"


def at_half(steps: Walk) -> Step:
    """The first step with at most half of the cost, which a comparison is summed up by; else the last step."""
    left = percent_left(steps, cost_part([steps]))
    return next((step for step, share in zip(steps, left, strict=True) if share <= 50 * (1 + 1e-6)), steps[-1])


def choices_of(header: Mapping[str, Any]) -> list[Choice]:
    """The choices of a finished run."""
    return [Choice.from_json(choice) for choice in header.get("result", {}).get("choices", [])]
