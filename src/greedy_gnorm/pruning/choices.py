"""The steps of a run that a user may prefer: free of loss, at some losses, and the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from greedy_gnorm.pruning.rules import within_drop
from greedy_gnorm.units import Measure, Step

LOSSES = {"free": 0.0, "-0.5 points": 0.005, "-1 point": 0.01, "-2 points": 0.02}
"""The losses that choices are named after."""
FASTEST = "fastest"


@dataclass(frozen=True)
class Choice:
    """A step by name, its quality and cost, and its speed relative to the unpruned model: promised and measured."""

    name: str
    step: int
    quality: float
    parameters: int
    bytes: int
    multiplications: int | None = None
    promised: float | None = None
    measured: float | None = None
    milliseconds: float | None = None
    interval: Sequence[float] | None = None  # of the quality, 95 %

    def to_json(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Choice:
        """Read what `to_json` wrote; entries of a later version are left out."""
        return cls(**{name: content[name] for name in cls.__dataclass_fields__ if name in content})


def choose(steps: Sequence[Step], measure: Measure) -> list[Choice]:
    """The smallest step within each loss, and the last step; a step that several names share has the first of them."""
    named = {
        name: max(place for place, step in enumerate(steps) if within_drop(step, steps, loss, measure))
        for name, loss in LOSSES.items()
    }
    named[FASTEST] = len(steps) - 1
    first = steps[0].cost
    found: dict[int, Choice] = {}
    for name, place in named.items():
        step, promised = steps[place], None
        if first.milliseconds and step.cost.milliseconds:
            promised = first.milliseconds / step.cost.milliseconds
        elif first.multiplications and step.cost.multiplications:
            promised = first.multiplications / step.cost.multiplications
        choice = Choice(name, place, measure.of(step), step.parameters, step.bytes, step.cost.multiplications, promised)
        if place:  # the unpruned model is no choice
            found.setdefault(place, choice)
    return list(found.values())
