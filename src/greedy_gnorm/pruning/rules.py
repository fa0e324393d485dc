"""Stopping rules: when a run ends, and which of its steps is the solution."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from greedy_gnorm.errors import GnormError
from greedy_gnorm.pruning.curves import knee_of
from greedy_gnorm.registry import Registry
from greedy_gnorm.settings import parse_number
from greedy_gnorm.units import Cost, Measure, Step, removed_by

History = Sequence[Step]


@dataclass(frozen=True)
class Situation:
    """What is known before a run: units, removable units, the cost now and the least possible, the measure."""

    units: int
    removable: int
    cost: Cost
    least: Cost
    measure: Measure


def last(history: History) -> int:
    """The last step."""
    return len(history) - 1


@dataclass(frozen=True)
class Rule:
    """`check` returns the reason to stop, or None; `choose` the last step that this rule allows as the solution.

    `limit` is the largest number of heads to remove; with `at_knee` the solution is the knee of the curve. `why` says
    what distinguishes the step that it chooses.
    """

    text: str
    check: Callable[[History], str | None]
    choose: Callable[[History], int] = last
    limit: int | None = None
    at_knee: bool = False
    why: str = "the last one"


@dataclass(frozen=True)
class RuleKind:
    """A kind of rule: how it is written, what it means, and a function from the text after `=` to a Rule."""

    form: str
    about: str
    build: Callable[[str, Situation], Rule]


RULES: Registry[RuleKind] = Registry("stopping rule")


def rule(form: str, about: str) -> Callable[[Callable[[str, Situation], Rule]], Callable[[str, Situation], Rule]]:
    """Register a function that builds rules, under the name at the start of its form."""

    def register(build: Callable[[str, Situation], Rule]) -> Callable[[str, Situation], Rule]:
        RULES.add(form.partition("=")[0], RuleKind(form, about, build))
        return build

    return register


@dataclass(frozen=True)
class Rules:
    """Several rules; the first that fires stops the run."""

    rules: tuple[Rule, ...]
    measure: Measure

    @property
    def limit(self) -> int | None:
        """The number of heads after which some rule is certain to stop the run."""
        return min((rule.limit for rule in self.rules if rule.limit is not None), default=None)

    def check(self, history: History) -> str | None:
        """The reason of the first rule that fires, or None."""
        return next((reason for rule in self.rules if (reason := rule.check(history))), None)

    def solution(self, history: History) -> int:
        """The chosen step: the earliest one that a rule chooses, or the knee of the curve up to it."""
        end = min(rule.choose(history) for rule in self.rules)
        return knee_of(history[: end + 1], self.measure) if any(rule.at_knee for rule in self.rules) else end

    def why(self, history: History) -> str:
        """What distinguishes the chosen step."""
        end = min(rule.choose(history) for rule in self.rules)
        decisive = next(rule for rule in self.rules if rule.choose(history) == end)
        if any(rule.at_knee for rule in self.rules):
            return "the knee of the curve" + ("" if end == last(history) else f" up to step {end}, {decisive.why}")
        return decisive.why


def parse_rules(texts: Sequence[str], situation: Situation) -> Rules:
    """Parse rules; several in one text are separated by commas."""
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not parts:
        raise GnormError(f"Give a stopping rule: {forms()}.")
    return Rules(tuple(_parse(part, situation) for part in parts), situation.measure)


def check_rules(texts: Sequence[str]) -> None:
    """Refuse rules that no model could follow, before anything is loaded."""
    many = 10**15
    parse_rules(texts, Situation(many, many, Cost(many, many, many), Cost(0, 0, 0), Measure("quality")))


def _parse(text: str, situation: Situation) -> Rule:
    name, sign, argument = text.partition("=")
    kind = RULES[name]
    if bool(sign) != ("=" in kind.form):
        raise GnormError(f"Write the stopping rule {text!r} as {kind.form!r}.")
    return kind.build(argument, situation)


def forms() -> str:
    """All forms of rules, for messages and help."""
    return ", ".join(RULES[name].form for name in RULES)


@rule("heads=N", "when N heads have been removed")
def heads(argument: str, situation: Situation) -> Rule:
    count = int(argument) if argument.isdecimal() and len(argument) < 10 else 0
    if count < 1:
        raise GnormError(f"heads={argument}: N must be a whole number of heads, such as heads=5.")
    if count > situation.removable:
        raise GnormError(f"heads={argument}: N must be from 1 to {situation.removable}, the heads that can be removed.")
    return _count_rule(f"heads={count}", count)


@rule("fraction=F", "when this fraction of all heads has been removed")
def fraction(argument: str, situation: Situation) -> Rule:
    share = _number(argument)
    if share is None or not 0 < share <= 1:
        raise GnormError(f"fraction={argument}: F must be above 0 and at most 1, such as fraction=0.5.")
    count = max(1, math.ceil(share * situation.units - 1e-9))
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
    if target >= situation.cost.parameters:
        raise GnormError(f"params={argument}: the model has only {situation.cost.parameters:,} parameters.")
    if target < situation.least.parameters:
        raise GnormError(
            f"params={argument} can't be reached by removing heads: without any head, "
            f"{situation.least.parameters:,} parameters remain."
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


@rule("macs=F", "when at most this share of the multiplications is left")
def macs(argument: str, situation: Situation) -> Rule:
    share, cost = _number(argument), situation.cost.multiplications
    if share is None or not 0 < share < 1:
        raise GnormError(f"macs={argument}: F must be between 0 and 1, such as macs=0.8.")
    return _work_rule(f"macs={argument}", share, cost, situation)


@rule("speedup=X", "when the multiplications promise a model X times as fast")
def speedup(argument: str, situation: Situation) -> Rule:
    times, cost = _number(argument), situation.cost.multiplications
    if times is None or not 1 < times < math.inf:
        raise GnormError(f"speedup={argument}: X must be above 1, such as speedup=1.3.")
    return _work_rule(f"speedup={argument}", 1 / times, cost, situation)


def _work_rule(text: str, share: float, start: int | None, situation: Situation) -> Rule:
    assert start is not None
    assert situation.least.multiplications is not None
    least = situation.least.multiplications / start
    if share < least:
        raise GnormError(
            f"{text} can't be reached by removing heads: without any head, {least:.1%} of the multiplications remain "
            f"({1 / least:.2f} times as fast). `gnorm compress` removes feed-forward neurons too."
        )

    def check(history: History) -> str | None:
        left = history[-1].cost.multiplications
        assert left is not None
        return f"{text}: {left / start:.1%} of the multiplications left" if left <= share * start else None

    return Rule(text, check)


def within_drop(step: Step, history: History, allowed: float, measure: Measure) -> bool:
    """Whether the quality after a step is at most so much below that of the unpruned model."""
    return measure.drop(measure.of(history[0]), measure.of(step)) <= allowed + 1e-12


PATIENCE = 3
"""The steps in a row that must be below a limit before it counts as passed: one dip does not end a run."""
EXPLORED = 0.05
"""A run looks at models that lose so much, even if less is allowed, to offer them as choices."""


def last_within(history: History, allowed: float, measure: Measure) -> int:
    """The last step that loses at most so much, before more is lost in PATIENCE steps in a row."""
    return last_while(history, lambda place: within_drop(history[place], history, allowed, measure))


def last_while(history: History, holds: Callable[[int], bool]) -> int:
    """The last step for which something holds, before it does not in PATIENCE steps in a row."""
    found, below = 0, 0
    for place in range(len(history)):
        if holds(place):
            found, below = place, 0
        elif (below := below + 1) == PATIENCE:
            break
    return found


def _drop_rule(text: str, allowed: float, measure: Measure) -> Rule:
    """Goes on until clearly more is lost than allowed; the solution is the last step within what is allowed."""
    limit = max(allowed, EXPLORED)

    def check(history: History) -> str | None:
        recent = history[-PATIENCE:]
        if len(history) <= PATIENCE or any(within_drop(step, history, limit, measure) for step in recent):
            return None
        verb = "fell" if measure.higher_is_better else "rose"
        return f"{text}: {measure.name} {verb} by more than {measure.amount(limit)} in {PATIENCE} steps in a row"

    why = f"the last one within {measure.amount(allowed)} of the unpruned {measure.name.replace('_', ' ')}"
    return Rule(text, check, lambda history: last_within(history, allowed, measure), why=why)


def compression_rules(
    reached: Callable[[Step], bool], max_drop: float | None, target: str, measure: Measure, word: str = "reached"
) -> Rules:
    """The end of a compression: its targets, or the quality that may be lost; the solution is the smallest allowed.

    `word` says what a target then is: reached, or predicted.
    """

    def target_reached(history: History) -> str | None:
        return f"{target} is {word}" if reached(history[-1]) else None

    rules = [Rule(target, target_reached)]
    if max_drop is not None:
        rules.append(_drop_rule(f"max_drop={max_drop:g}", max_drop, measure))
    return Rules(tuple(rules), measure)


@rule(
    "drop=D",
    "after quality falls by more than D (0.01: one point of accuracy, 1 % of perplexity); the solution loses at most D",
)
def drop(argument: str, situation: Situation) -> Rule:
    return _drop_rule(f"drop={argument}", parse_drop(argument, situation.measure), situation.measure)


def parse_drop(argument: str, measure: Measure) -> float:
    """The loss that is allowed."""
    allowed, end = _number(argument), math.inf if measure.largest is None else measure.largest
    if allowed is None or not 0 <= allowed < end:
        below = "" if end == math.inf else f" and below {end:g}"
        raise GnormError(f"drop={argument}: D must be at least 0{below}; drop=0.01 or drop=1% allows a loss of 0.01.")
    return allowed


def _never(history: History) -> str | None:
    return None


@rule("knee", "never; the solution is the knee of the whole curve")
def knee(argument: str, situation: Situation) -> Rule:
    return Rule("knee", _never, at_knee=True)


@rule("all", "never; every head is removed, and the solution is the knee of the curve")
def all_heads(argument: str, situation: Situation) -> Rule:
    return Rule("all", _never, at_knee=True)


def _number(text: str) -> float | None:
    try:
        return parse_number(text)
    except ValueError:
        return None
