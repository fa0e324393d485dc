"""When a run stops and which step it chooses."""

from __future__ import annotations

import csv
import random
from dataclasses import replace

import numpy as np
import pytest
from conftest import shared

import greedy_gnorm as gg
from greedy_gnorm.pruning.choices import LOSSES, Choice, choose, find_step
from greedy_gnorm.pruning.curves import knee, knee_of
from greedy_gnorm.pruning.rules import RULES, Situation, compression_rules, parse_rules
from greedy_gnorm.units import Cost, Measure, Step, Unit, pack_rows

SITUATION = Situation(
    12, 12, Cost(1000, multiplications=1000), Cost(400, multiplications=400), Measure("accuracy", largest=1.0)
)


def walked(accuracies, per_step=1):
    """A history with these accuracies, 50 parameters a head."""
    steps = []
    for number, accuracy in enumerate(accuracies):
        removed = tuple(Unit(0, number * per_step + place) for place in range(per_step)) if number else ()
        parameters = 1000 - 50 * per_step * number
        cost = Cost(parameters, 4 * parameters, parameters)  # as many multiplications as parameters
        steps.append(Step(number, removed, None, {"accuracy": accuracy}, cost, {}))
    return steps


def stop(text, history, situation=SITUATION):
    """(number of the step at which it stops, number of the solution)."""
    rules = parse_rules([text], situation)
    for end in range(1, len(history) + 1):
        if rules.check(history[:end]):
            return end - 1, rules.solution(history[:end])
    return None, rules.solution(history)


FALLING = [0.9, 0.9, 0.91, 0.895, 0.86, 0.7, 0.3, 0.3]
"""One point lost after step 3, five points after step 4, which is certain after step 7."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("heads=3", (3, 3)),
        ("fraction=0.25", (3, 3)),
        ("fraction=0.3", (4, 4)),
        ("params=800", (4, 4)),
        ("params=0.82k", (4, 4)),
        ("drop=0.01", (7, 3)),
        ("drop=0", (7, 2)),
        ("drop=0.05", (7, 4)),
        ("drop=0.9", (None, 7)),
        ("knee", (None, 4)),
        ("all", (None, 4)),
        ("heads=5,drop=0.01", (5, 3)),
        ("drop=0.5,heads=2", (2, 2)),
        ("knee,heads=5", (5, 4)),
        ("heads=4,drop=0.01", (4, 3)),
        ("fraction=1e-12", (1, 1)),
    ],
)
def test_where_it_stops_and_what_it_chooses(text, expected):
    assert stop(text, walked(FALLING)) == expected


@pytest.mark.parametrize(
    ("text", "same"), [("drop=1%", "drop=0.01"), ("fraction=25%", "fraction=0.25"), ("macs=70%", "macs=0.7")]
)
def test_percentages(text, same):
    assert stop(text, walked(FALLING)) == stop(same, walked(FALLING))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("heads=3", "the last one"),
        ("drop=0.01", "the last one within 0.01 of the unpruned accuracy"),
        ("all,drop=0.3", "the knee of the curve up to step 5, the last one within 0.3 of the unpruned accuracy"),
        ("knee", "the knee of the curve"),
    ],
)
def test_what_distinguishes_the_chosen_step(text, why):
    assert parse_rules([text], SITUATION).why(walked(FALLING)) == why


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads=0", "a whole number of heads"),
        ("heads=13", "from 1 to 12"),
        ("heads=x", "a whole number of heads"),
        ("heads", "as 'heads=N'"),
        ("fraction=2", "at most 1"),
        ("fraction=0", "above 0"),
        ("fraction=nan", "above 0"),
        ("drop=1", "below 1"),
        ("drop=-0.1", "at least 0"),
        ("drop=%", "at least 0"),
        ("fraction=120%", "at most 1"),
        ("params=100", "400 parameters remain"),
        ("params=2000", "only 1,000 parameters"),
        ("params=many", "such as 80M"),
        ("params=_", "such as 80M"),
        ("params=1__0K", "such as 80M"),
        ("knee=3", "as 'knee'"),
        ("nothing", "Choose from: heads, fraction, params, macs, speedup, drop, knee, all"),
        ("", "Give a stopping rule"),
    ],
)
def test_a_wrong_rule_says_what_is_right(text, message):
    with pytest.raises(gg.GnormError, match=message):
        parse_rules([text], SITUATION)


def test_a_rule_that_fires_gives_its_reason():
    reason = "drop=0.01: accuracy fell by more than 0.05 in 3 steps in a row"
    assert parse_rules(["drop=0.01"], SITUATION).check(walked(FALLING)) == reason


def test_a_dip_does_not_end_a_run():
    """Two steps below the limit are a dip, three are not, even if a later step is within it again by chance."""
    assert stop("drop=0.01", walked([0.9, 0.7, 0.7, 0.9, 0.895, 0.88, 0.88])) == (None, 4)
    assert stop("drop=0.01", walked([0.9, 0.895, 0.88, 0.88, 0.88, 0.9])) == (None, 1)


def test_drops_of_a_measure_without_a_largest_value_are_relative():
    measure = Measure("perplexity", higher_is_better=False, grows_fast=True)
    rising = [40.0, 40.1, 40.39, 41.9, 45.0, 45.0, 45.0]
    steps = [replace(step, quality={"perplexity": value}) for step, value in zip(walked(rising), rising, strict=True)]
    situation = replace(SITUATION, measure=measure)
    rules = parse_rules(["drop=1%"], situation)
    assert rules.check(steps) == "drop=1%: perplexity rose by more than 5 % in 3 steps in a row"
    assert (rules.solution(steps), rules.why(steps)) == (2, "the last one within 1 % of the unpruned perplexity")
    names = {choice.name: choice.step for choice in choose(steps, measure, 10, fastest=True)}
    assert names == {"0.5 % worse": 1, "1 % worse": 2, "5 % worse": 3, "fastest": 6}
    assert find_step(steps, "drop=0.01", measure, 10, fastest=True) == 2
    parse_rules(["drop=2"], situation)  # three times the perplexity


def test_the_knee_of_a_perplexity_is_that_of_its_logarithm():
    measure = Measure("perplexity", higher_is_better=False, grows_fast=True)
    values = [40.0, 42.0, 60.0, 300.0, 2000.0, 90000.0]
    steps = [replace(step, quality={"perplexity": value}) for step, value in zip(walked(values), values, strict=True)]
    assert knee_of(steps, measure) == 2
    assert knee_of(steps, replace(measure, grows_fast=False)) == 4


def test_choices_and_steps_by_name():
    steps = walked([0.9, 0.91, 0.896, 0.892, 0.88, 0.86, 0.7, 0.7, 0.7])
    measure = SITUATION.measure
    choices = choose(steps, measure, 10, fastest=False)
    assert {choice.name: choice.step for choice in choices} == {
        "free": 1, "-0.5 points": 2, "-1 point": 3, "-2 points": 4, "-5 points, knee": 5
    }  # fmt: skip
    assert [choice.removed for choice in choices] == [1, 2, 3, 4, 5]
    assert choices[-1].promised == pytest.approx(1000 / 750)
    assert choose(steps, measure, 10, fastest=True)[-1].name == "fastest"

    def found(wanted, fastest=False):
        return find_step(steps, wanted, measure, 10, fastest=fastest)

    for choice in choices:
        named = "free" if choice.name == "free" else f"drop={LOSSES[choice.name.split(',')[0]]}"
        assert found(named) == found(choice.step) == choice.step
    assert (found("knee"), found("fastest", fastest=True)) == (5, 8)
    assert Choice.from_json(choices[0].to_json()) == choices[0]
    for wrong, message in (
        (9, "steps 0 to 8"), ("drop=2", "below 1"), ("best", "'free' or 'knee'"), (1.5, "give its number"),
        ("fastest", "'free' or 'knee'"),
    ):  # fmt: skip
        with pytest.raises(gg.GnormError, match=message):
            found(wrong)
    with pytest.raises(gg.GnormError, match="'free' or 'fastest'"):
        found("knee", fastest=True)


def test_a_loss_that_can_not_be_measured_is_free():
    """Four of 1,000 rows are lost, and two are won: within half a point, and the paired interval reaches zero."""
    rows = 1000
    before = np.arange(rows) < 900
    noise, loss = before.copy(), before.copy()
    noise[:4], noise[-2:], loss[:4] = False, True, False
    qualities = [0.9, 0.898, 0.896]
    steps = [
        replace(step, right=pack_rows(right))
        for step, right in zip(walked(qualities), (before, noise, loss), strict=True)
    ]
    assert find_step(steps, "free", SITUATION.measure, rows, fastest=False) == 1
    assert choose(steps, SITUATION.measure, rows, fastest=False)[0].name == "free"


@pytest.mark.parametrize(("model", "heads"), [("bert", 116), ("albert", 36), ("roberta", 268), ("xlm-roberta", 105)])
def test_the_knee_of_the_authors_curves(model, heads):
    with shared(f"paper/results/{model}-greedygnorm.csv").open() as file:
        points = [(float(row["Pruned_Heads"]), float(row["Accuracy"])) for row in csv.DictReader(file)]
    # ALBERT's file counts the 12 layers of each tied head: 36 are 3 tied heads
    assert points[knee(points)][0] == heads


def test_the_knee_of_a_curve_that_only_falls_below_its_chord_is_its_start():
    assert knee([(0, 1.0), (1, 0.1), (2, 0.0)]) == 0
    assert knee([(0, 1.0)]) == 0
    assert knee([(0, 0.76), *((gone, 0.33) for gone in range(1, 73))]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_rounding_makes_no_knee(seed):
    """Whether the curve is at its end at once or falls by a straight line: no point is above the chord."""
    chance = random.Random(seed)
    rows, heads, scale = chance.choice([100, 300, 917]), chance.randint(2, 144), chance.choice([1, -1e6])
    first, end = (chance.randint(*span) / rows * scale for span in ((rows // 2, rows), (0, rows // 3)))
    assert knee([(0, max(first, end)), *((gone, min(first, end)) for gone in range(1, heads + 1))]) == 0
    assert knee([(gone, (rows - 3 * gone) / rows * abs(scale)) for gone in range(heads + 1)]) == 0


def test_every_rule_can_be_written_as_its_form_says():
    examples = {
        "heads": "heads=2", "fraction": "fraction=0.5", "params": "params=800", "macs": "macs=0.8",
        "speedup": "speedup=1.3", "drop": "drop=0.05",
    }  # fmt: skip
    for name in RULES:
        rules = parse_rules([examples.get(name, name)], SITUATION)
        assert rules.check(walked([0.9])) is None
        assert rules.solution(walked([0.9])) == 0


def test_multiplications_stop_a_run():
    history = walked([0.9] * 12)
    assert stop("macs=0.8", history) == (4, 4)
    assert stop("speedup=1.25", history) == (4, 4)
    with pytest.raises(gg.GnormError, match=r"40\.0% of the multiplications remain \(2\.50 times as fast\)"):
        parse_rules(["speedup=3"], SITUATION)
    for wrong in ("macs=1", "macs=x", "speedup=1", "speedup=inf"):
        with pytest.raises(gg.GnormError, match="must be"):
            parse_rules([wrong], SITUATION)


def test_a_compression_ends_at_its_target_or_after_rounds_below_the_drop():
    measure = SITUATION.measure
    walk = walked([0.9, 0.9, 0.895, 0.85, 0.895, 0.84, 0.84, 0.8])
    rules = compression_rules(lambda step: step.parameters <= 500, 0.01, "the target", measure)
    assert rules.check(walk[:7]) is None, "two rounds below the limit do not end it"
    assert rules.check(walk) == "max_drop=0.01: accuracy fell by more than 0.05 in 3 steps in a row"
    assert rules.solution(walk) == 4, "the smallest model within the drop"
    reached = compression_rules(lambda step: step.parameters <= 850, 0.01, "the target", measure)
    assert reached.check(walk[:4]) == "the target is reached"
    assert reached.solution(walk[:4]) == 2, "a target does not excuse a larger drop"
    free = compression_rules(lambda step: step.parameters <= 850, None, "the target", measure)
    assert free.solution(walk[:4]) == 3
