"""Stopping rules: when a run ends, and which of its steps is the solution."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from greedy_gnorm.errors import GnormError
from greedy_gnorm.heads import Step, removed_by
from greedy_gnorm.registry import Registry

History = Sequence[Step]


@dataclass(frozen=True)
class Situation:
    """What a rule may know beforehand: heads, removable heads, parameters now and at the least, the measure."""

    heads: int
    removable: int
    parameters: int
    least_parameters: int
    quality: str


def last(history: History) -> int:
    """The step at the end."""
    return len(history) - 1


@dataclass(frozen=True)
class Rule:
    """`check` gives the reason to stop, or None; `choose` the solution among the steps if this rule stopped the run.

    `limit` is how many heads may go at most; `at_knee` asks for the knee of whatever was walked.
    """

    text: str
    check: Callable[[History], str | None]
    choose: Callable[[History], int] = last
    limit: int | None = None
    at_knee: bool = False


@dataclass(frozen=True)
class RuleKind:
    """A way to write a rule: its form, what it means, and how the text behind `=` becomes a Rule."""

    form: str
    about: str
    build: Callable[[str, Situation], Rule]


RULES: Registry[RuleKind] = Registry("stopping rule")


def rule(form: str, about: str) -> Callable[[Callable[[str, Situation], Rule]], Callable[[str, Situation], Rule]]:
    """Register a builder of rules under the name at the front of its form."""

    def register(build: Callable[[str, Situation], Rule]) -> Callable[[str, Situation], Rule]:
        RULES.add(form.partition("=")[0], RuleKind(form, about, build))
        return build

    return register


@dataclass(frozen=True)
class Rules:
    """Several rules: the first that fires stops."""

    rules: tuple[Rule, ...]

    @property
    def limit(self) -> int | None:
        """How many heads may go before some rule is sure to stop."""
        return min((rule.limit for rule in self.rules if rule.limit is not None), default=None)

    def check(self, history: History) -> str | None:
        """The reason of the first rule that fires."""
        return next((reason for rule in self.rules if (reason := rule.check(history))), None)

    def solution(self, history: History) -> int:
        """The chosen step: the earliest that a rule which fired points to, or the knee of the stretch up to there."""
        end = min((rule.choose(history) for rule in self.rules if rule.check(history)), default=last(history))
        return knee(curve(history[: end + 1])) if any(rule.at_knee for rule in self.rules) else end


def parse_rules(texts: Sequence[str], situation: Situation) -> Rules:
    """Rules from their written form; several in one text are divided by commas."""
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not parts:
        raise GnormError(f"Say when to stop: {forms()}.")
    return Rules(tuple(_parse(part, situation) for part in parts))


def check_names(texts: Sequence[str]) -> None:
    """Refuse rules of unknown name before anything is loaded."""
    for text in texts:
        for part in text.split(","):
            if part.strip():
                RULES[part.strip().partition("=")[0]]


def _parse(text: str, situation: Situation) -> Rule:
    name, sign, argument = text.partition("=")
    kind = RULES[name]
    if bool(sign) != ("=" in kind.form):
        raise GnormError(f"The stopping rule {text!r} is written {kind.form!r}.")
    return kind.build(argument, situation)


def forms() -> str:
    """The ways to write a rule, for messages and help."""
    return ", ".join(RULES[name].form for name in RULES)


@rule("heads=N", "when N heads are gone")
def heads(argument: str, situation: Situation) -> Rule:
    count = int(argument) if argument.isdecimal() and len(argument) < 10 else 0
    if not 1 <= count <= situation.removable:
        raise GnormError(f"heads={argument}: N must be from 1 to {situation.removable}, the heads that can be removed.")
    return _count_rule(f"heads={count}", count)


@rule("fraction=F", "when this fraction of all heads is gone")
def fraction(argument: str, situation: Situation) -> Rule:
    share = _number(argument)
    if share is None or not 0 < share <= 1:
        raise GnormError(f"fraction={argument}: F must be above 0 and at most 1, such as fraction=0.5.")
    count = max(1, math.ceil(share * situation.heads - 1e-9))
    if count > situation.removable:
        raise GnormError(f"fraction={argument} is {count} heads, but only {situation.removable} can be removed.")
    return _count_rule(f"fraction={argument}", count)


def _count_rule(text: str, count: int) -> Rule:
    def check(history: History) -> str | None:
        gone = len(removed_by(history))
        return f"{text}: {gone} heads removed" if gone >= count else None

    return Rule(text, check, limit=count)


@rule("params=P", "when at most P parameters are left (80M, 1.5G, 250000)")
def params(argument: str, situation: Situation) -> Rule:
    target = _parameter_count(argument)
    if target >= situation.parameters:
        raise GnormError(f"params={argument}: the model has {situation.parameters:,} parameters already.")
    if target < situation.least_parameters:
        raise GnormError(
            f"params={argument} can't be reached by removing heads: with all of them gone, "
            f"{situation.least_parameters:,} parameters remain."
        )

    def check(history: History) -> str | None:
        left = history[-1].parameters
        return f"params={argument}: {left:,} parameters left" if left <= target else None

    return Rule(f"params={argument}", check)


def _parameter_count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?)([kmgb]?)", text.strip().lower())
    if not match:
        raise GnormError(f"params={text}: write a number of parameters, such as 80M, 1.5G or 250000.")
    unit = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}[match.group(2)]
    return round(float(match.group(1)) * unit)


@rule("drop=D", "before quality falls more than D below the start (0.01 is one point)")
def drop(argument: str, situation: Situation) -> Rule:
    allowed = _number(argument)
    if allowed is None or not 0 <= allowed < 1:
        raise GnormError(f"drop={argument}: D must be at least 0 and below 1; drop=0.01 allows one point.")
    quality = situation.quality

    def fallen(history: History) -> int | None:
        floor = history[0].quality[quality] - allowed - 1e-12
        return next((place for place, step in enumerate(history) if not step.quality[quality] >= floor), None)

    def check(history: History) -> str | None:
        if (place := fallen(history)) is None:
            return None
        before, after = history[0].quality[quality], history[place].quality[quality]
        return f"drop={argument}: {quality} fell from {before:.4f} to {after:.4f}"

    def choose(history: History) -> int:
        place = fallen(history)
        return last(history) if place is None else place - 1

    return Rule(f"drop={argument}", check, choose)


def _never(history: History) -> str | None:
    return None


@rule("knee", "never; the solution is the knee of the whole curve")
def to_knee(argument: str, situation: Situation) -> Rule:
    return Rule("knee", _never, at_knee=True)


@rule("all", "never; every head goes, and the solution is the knee of the curve")
def everything(argument: str, situation: Situation) -> Rule:
    return Rule("all", _never, at_knee=True)


def curve(history: History) -> list[tuple[float, float]]:
    """Heads removed against quality (the measure named first)."""
    points, gone = [], 0
    for step in history:
        gone += len(step.removed)
        points.append((float(gone), next(iter(step.quality.values()))))
    return points


def knee(points: Sequence[tuple[float, float]]) -> int:
    """The place that lies farthest above the chord from the first point to the last; the first of several.

    Both ends lie on the chord, at height 0; heights that differ by no more than rounding does are the same.
    """
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
    heights = [0.0, *(y - (y0 + slope * (x - x0)) for x, y in points[1:-1]), 0.0]
    rounding = 1e-12 * max(abs(y) for _, y in points)
    return next(place for place, height in enumerate(heights) if height >= max(heights) - rounding)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
