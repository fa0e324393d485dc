"""The steps of a run that a user may prefer: free of loss, at some losses, the knee, and the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from greedy_gnorm.errors import GnormError
from greedy_gnorm.pruning.curves import knee_of
from greedy_gnorm.pruning.rules import last_while, last_within, parse_drop, within_drop
from greedy_gnorm.tasks.intervals import Interval, change_interval
from greedy_gnorm.tasks.task import measure_of
from greedy_gnorm.units import Measure, Step, removed_by, unpack_rows

FREE = "free"
LOSSES = {FREE: 0.0, "-0.5 points": 0.005, "-1 point": 0.01, "-2 points": 0.02, "-5 points": 0.05}
RELATIVE_LOSSES = {FREE: 0.0, "0.5 % worse": 0.005, "1 % worse": 0.01, "2 % worse": 0.02, "5 % worse": 0.05}
"""The losses that choices are named after, of measures with a largest value and of those without."""
KNEE, FASTEST, AND = "knee", "fastest", ", "
NOT_MEASURABLE = 0.005
"""A loss of at most this is free if its paired interval reaches zero."""


@dataclass(frozen=True)
class Choice:
    """A step by name: the units that it has removed, its quality with a 95 % interval, its size and speed.

    Speeds are relative to the unpruned model: promised by the multiplications or times by width, and measured.
    """

    name: str
    step: int
    quality: float
    parameters: int
    bytes: int
    multiplications: int | None = None
    promised: float | None = None
    measured: float | None = None
    milliseconds: float | None = None
    removed: int | None = None
    interval: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return {**asdict(self), "interval": None if self.interval is None else list(self.interval)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Choice:
        """Read what `to_json` wrote; entries of a later version are left out."""
        known = {name: content[name] for name in cls.__dataclass_fields__ if name in content}
        interval = known.get("interval")
        return cls(**{**known, "interval": None if interval is None else (interval[0], interval[1])})


def choose(steps: Sequence[Step], measure: Measure, rows: int, *, fastest: bool) -> list[Choice]:
    """The smallest step within each loss, the knee, or instead of it the last step if `fastest`.

    Quality was measured on so many `rows`. A step that several names share has all of them.
    """
    losses = losses_of(measure)
    named = {name: _last_within(steps, name, measure, rows) for name in losses}
    named |= {FASTEST: len(steps) - 1} if fastest else {KNEE: knee_of(steps, measure)}
    names: dict[int, list[str]] = {}
    for name, place in named.items():
        if place and not (name in losses and place in names):  # the unpruned model is no choice
            names.setdefault(place, []).append(name)
    return [_choice(steps, place, AND.join(each), measure) for place, each in names.items()]


def losses_of(measure: Measure) -> dict[str, float]:
    """The losses that choices are named after, by name."""
    return RELATIVE_LOSSES if measure.is_relative else LOSSES


def _choice(steps: Sequence[Step], place: int, name: str, measure: Measure) -> Choice:
    step, first, promised = steps[place], steps[0].cost, None
    if first.milliseconds and step.cost.milliseconds:
        promised = first.milliseconds / step.cost.milliseconds
    elif first.multiplications and step.cost.multiplications:
        promised = first.multiplications / step.cost.multiplications
    gone = len(removed_by(steps[: place + 1]))
    size = step.parameters, step.bytes, step.cost.multiplications
    return Choice(name, place, measure.of(step), *size, promised=promised, removed=gone, interval=step.interval)


def _last_within(steps: Sequence[Step], name: str, measure: Measure, rows: int) -> int:
    """The last step within the loss of this name; a loss that is not measurable is as good as none."""
    if name != FREE:
        return last_within(steps, losses_of(measure)[name], measure)

    def holds(place: int) -> bool:
        if within_drop(steps[place], steps, 0.0, measure):
            return True
        change = change_of(steps, place, rows)
        return change is not None and change[1] >= 0 and within_drop(steps[place], steps, NOT_MEASURABLE, measure)

    return last_while(steps, holds)


def change_of(steps: Sequence[Step], place: int, rows: int) -> Interval | None:
    """The paired 95 % interval of a step's change from the unpruned model, where it is known which rows were right."""
    before, after = steps[0].right, steps[place].right
    if before is None or after is None:
        return None
    return change_interval(unpack_rows(before, rows), unpack_rows(after, rows))


def find_step(steps: Sequence[Step], wanted: Any, measure: Measure, rows: int, *, fastest: bool) -> int:
    """The number of a step: itself, or the one that `drop=0.01`, `free`, `knee` or `fastest` names."""
    if isinstance(wanted, int):
        if not 0 <= wanted < len(steps):
            raise GnormError(f"There is no step {wanted}: the run has steps 0 to {len(steps) - 1}.")
        return wanted
    if wanted == FREE:
        return _last_within(steps, FREE, measure, rows)
    if isinstance(wanted, str) and wanted.startswith("drop="):
        return last_within(steps, parse_drop(wanted.removeprefix("drop="), measure), measure)
    last = FASTEST if fastest else KNEE
    if wanted == last:
        return len(steps) - 1 if fastest else knee_of(steps, measure)
    raise GnormError(f"Can't find the step {wanted!r}: give its number, 'drop=0.01', 'free' or '{last}'.")


def step_named(header: Mapping[str, Any], steps: Sequence[Step], wanted: int | str) -> int:
    """The number of a step of a recorded run, given by it or as "drop=0.01", "free", "knee" or "fastest"."""
    rows = header["data"]["evaluation"]["rows"]
    return find_step(steps, wanted, measure_of(header), rows, fastest=header.get("command") == "compress")
