"""What a comparison shows: numbers by method, from the steps alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from greedy_gnorm.comparison.certainty import Course, Value, differ, interval, sampled_means
from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.model.sizes import MEGABYTE
from greedy_gnorm.pruning.budget import COMPARED, part_of
from greedy_gnorm.pruning.curves import Walk, at_share, knee_of, mean_over_curve, units_before_drop
from greedy_gnorm.pruning.methods import ALL_JOINTS, RANDOMS
from greedy_gnorm.records import schema
from greedy_gnorm.records.journal import EXPERIMENT_FILE, RUN_FILE, Journal, read_header
from greedy_gnorm.shown import Shown
from greedy_gnorm.tasks.ranks import kendall
from greedy_gnorm.tasks.task import measure_of
from greedy_gnorm.units import Matrix, Measure, Step, Vector, removed_by

SHARES = (0.25, 0.50, 0.75, 0.81)
DROPS = (0.01, 0.05)
FLOAT32 = 4
SHOWN = 7
"""How many methods the short form of a comparison names."""

Table = tuple[list[str], list[list[str]]]
"""Names of columns, and cells as text. The first of a comparison takes seconds, for the intervals of all."""


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Every walk of every method, and the header that they share."""

    header: dict[str, Any]
    curves: dict[str, list[Walk]]

    def __repr__(self) -> str:
        name, about = ("50%", "at 50% of the multiplications") if self.joint else ("mean", "mean over the curve")
        column = next(each for each in self.columns if each.name == name)
        means = sorted(column.means(self).items(), key=lambda item: -self.measure.worth(item[1]))
        start = column.written(self.measure.of(next(iter(self.curves.values()))[0][0]))
        lines = [f"Comparison of {len(means)} methods on {self.header['model']['name']}"]
        lines[0] += f": {self.measure.name}, {about} ({start} unpruned)"
        for method, mean in means[:SHOWN]:
            runs = len(self.curves[method])
            lines.append(f"  {method:<20} {column.written(mean)}  ({runs} run{'s' * (runs != 1)})")
        rest = len(means) - SHOWN
        return "\n".join(lines + [f"  and {rest} more"] * (rest > 0))

    @cached_property
    def columns(self) -> list[Column]:
        """What the methods are compared by, in the order of the table."""
        return (joint_columns if self.joint else columns)(self.measure)

    @cached_property
    def solution_columns(self) -> list[Column]:
        """What the solutions of the methods are compared by; joint methods have none."""
        return [] if self.joint else solution_columns(self.measure)

    @cached_property
    def samples(self) -> dict[str, Matrix] | None:
        """The means of all columns, those of the solutions last, in samples of rows and runs, by method."""
        values = [column.value for column in (*self.columns, *self.solution_columns)]
        return sampled_means(self.curves, self.measure, self.header["data"]["evaluation"]["rows"], values)

    @property
    def measure(self) -> Measure:
        """What is compared."""
        return measure_of(self.header)

    @property
    def joint(self) -> bool:
        """Whether heads and neurons were removed together, towards shares of the multiplications."""
        return set(self.curves) <= set(ALL_JOINTS)

    @property
    def heads(self) -> int:
        """Heads that a walk removes."""
        return len(removed_by(next(iter(self.curves.values()))[0]))

    @cached_property
    def summary(self) -> Table:
        """The methods by quality along the curve."""
        return _by_method(self, self.columns)

    @cached_property
    def overview(self) -> Table:
        """The methods by the four columns that say most, with ± half the width of their intervals."""
        names = JOINT_OVERVIEW if self.joint else OVERVIEW
        header, cells = _by_method(self, [column for column in self.columns if column.name in names], brief=True)
        return [header[0], *header[2:]], [[row[0], *row[2:]] for row in cells]  # without the number of runs

    @cached_property
    def solutions(self) -> Table:
        """The paper's table of solutions: the methods at the knees of their curves."""
        return _by_method(self, self.solution_columns)


def points_for(heads: int, count: int) -> list[int]:
    """Numbers of removed heads: evenly spread, and those around the shares that the tables show."""
    even = {round(heads * place / count) for place in range(1, count + 1)}
    shown = {end(share * heads) for share in SHARES for end in (math.floor, math.ceil)}
    return sorted((even | shown) - {0})


def solution(walk: Walk, measure: Measure) -> Step:
    """The step at the knee of the curve."""
    return walk[knee_of(walk, measure)]


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a table: what it shows of a walk, how that is written, and which of the methods' means is best."""

    name: str
    value: Value
    form: str = ".3f"
    best: Callable[[Sequence[float]], float] | None = max

    def means(self, comparison: Comparison) -> dict[str, float]:
        """The mean over the runs of each method."""
        return {
            method: float(np.mean([self.value(Course.of(walk, comparison.measure)) for walk in walks]))
            for method, walks in comparison.curves.items()
        }

    def written(self, value: float) -> str:
        """The number as text, without a negative zero."""
        return format(value, f"z{self.form}")


def columns(measure: Measure) -> list[Column]:
    """The columns of the comparison, in their order."""
    better = max if measure.higher_is_better else min

    def at(share: float) -> Value:
        return lambda course: at_share(course.points, share)

    def before_drop(drop: float) -> Value:
        return lambda course: units_before_drop(course.points, drop, measure)

    return [
        Column("before", _start, best=None),
        *[Column(f"at {share:.0%}", at(share), best=better) for share in SHARES],
        Column("mean", lambda course: mean_over_curve(course.points), best=better),
        *[Column(_drop_title(drop, measure), before_drop(drop), ".1f") for drop in DROPS],
        Column("knee: heads gone", _knee_heads, ".1f"),
        Column("knee: quality", _knee_quality, best=better),
    ]


def joint_columns(measure: Measure) -> list[Column]:
    """The columns of a comparison of joint methods: quality at shares of the multiplications."""
    better = max if measure.higher_is_better else min

    def at(share: float) -> Value:
        return lambda course: course.points[step_at_work(course.walk, share).step][1]

    return [
        Column("100%", _start, ".4f", None),
        *[Column(f"{share:.0%}", at(share), ".4f", better) for share in COMPARED],
        Column("seconds", lambda course: sum(sum(step.seconds.values()) for step in course.walk), ".0f", min),
    ]


def _start(course: Course) -> float:
    return course.points[0][1]


def _knee_heads(course: Course) -> float:
    return course.points[course.knee][0]


def _knee_quality(course: Course) -> float:
    return course.points[course.knee][1]


def step_at_work(walk: Walk, share: float) -> Step:
    """The first step that has at most this share of the multiplications."""
    start = part_of(walk[0].cost, "multiplications")
    return next(step for step in walk if part_of(step.cost, "multiplications") <= share * start * (1 + 1e-6))


def _is_share(measure: Measure) -> bool:
    """Whether the measure is read in per cent."""
    return measure.largest == 1


def _drop_title(drop: float, measure: Measure) -> str:
    return f"heads before -{drop * 100:.0f} pt" if _is_share(measure) else f"heads before {measure.amount(drop)} worse"


def solution_columns(measure: Measure) -> list[Column]:
    """The columns of the solutions: quality (per cent of a share) and size (MB of float32) before and after."""
    better, scale = max if measure.higher_is_better else min, 100 if _is_share(measure) else 1

    def decrease(course: Course) -> float:
        before, after = _start(course), _knee_quality(course)
        return 100 * (before - after) / abs(before) if before else math.nan

    def whole(course: Course) -> int:
        return course.walk[0].parameters

    def left(course: Course) -> int:
        return course.walk[course.knee].parameters

    def megabytes(parameters: Callable[[Course], int]) -> Value:
        return lambda course: parameters(course) * FLOAT32 / MEGABYTE

    return [
        Column("before", lambda course: scale * _start(course), ".2f", None),
        Column("after", lambda course: scale * _knee_quality(course), ".2f", better),
        Column("decrease %", decrease, ".2f", min if measure.higher_is_better else max),
        Column("MB before", megabytes(whole), ".2f", None),
        Column("MB after", megabytes(left), ".2f", min),
        Column("reduction %", lambda course: 100 * (1 - left(course) / whole(course)), ".2f", max),
        Column("heads gone", _knee_heads, ".1f", max),
        Column("parameters before", whole, ",.0f", None),
        Column("parameters after", left, ",.0f", min),
    ]


def knee_heads(walk: Walk, measure: Measure) -> int:
    """Heads gone at the solution."""
    return len(removed_by(walk[: solution(walk, measure).step + 1]))


OVERVIEW = ("at 50%", "mean", "knee: heads gone", "knee: quality")
JOINT_OVERVIEW = ("75%", "50%", "33%", "25%")
"""The columns that say most, which fit a terminal."""
BEST, TIED = "*", "="
"""The marks of a table: clearly the best of its column, or not clearly worse than the best."""
LEGEND = (
    f"Means over runs with 95 % intervals over rows and runs. {BEST} is clearly the best of its column; {TIED} is the "
    f"best, or not clearly worse than it."
)


def _by_method(comparison: Comparison, shown: Sequence[Column], *, brief: bool = False) -> Table:
    """Header and text cells: the mean over runs with its 95 % interval, and a mark for the best of each column."""
    curves, samples = comparison.curves, comparison.samples
    known = [*comparison.columns, *comparison.solution_columns]
    cells = {method: [method, str(len(walks))] for method, walks in curves.items()}
    for column in shown:
        means, place = column.means(comparison), known.index(column)
        drawn = None if samples is None else {method: samples[method][:, place] for method in curves}
        marks = _marks(column, means, drawn)
        for method, mean in means.items():
            if math.isnan(mean):
                cells[method].append("-")
                continue
            around = None if drawn is None else interval(drawn[method])
            spread = ""
            if around is not None:
                low, high = around
                spread = f" ({column.written(low)} to {column.written(high)})"
                if brief:
                    spread = f" ± {column.written((high - low) / 2)}"
            cells[method].append(f"{column.written(mean)}{spread}{marks.get(method, '')}")
    return ["method", "runs", *(column.name for column in shown)], list(cells.values())


def _marks(column: Column, means: dict[str, float], drawn: dict[str, Vector] | None) -> dict[str, str]:
    """The mark of each method: the best if all others are clearly worse, else it and those that are not are tied."""
    known = {method: mean for method, mean in means.items() if not math.isnan(mean)}
    if column.best is None or drawn is None or len(known) < 2:
        return {}
    best = next(method for method, mean in known.items() if mean == column.best(list(known.values())))
    ties = [method for method in known if method != best and not differ(drawn[best], drawn[method])]
    return dict.fromkeys([best, *ties], TIED) if ties else {best: BEST}


def staleness(walk: Walk) -> list[tuple[int, float]]:
    """(units gone, Kendall's tau between the first scores and the scores then, over the units still there)."""
    scored = [(step, np.concatenate(list(step.scores.keys))) for step in walk if step.scores is not None]
    first = scored[0][1]
    points, gone = [], 0
    for step, keys in scored:
        there = ~np.isnan(keys)
        if there.sum() >= 3:
            tau = kendall(first[there], keys[there])
            if not math.isnan(tau):
                points.append((gone, tau))
        gone += len(step.removed)
    return points


def is_rescored(walk: Walk) -> bool:
    """Whether the scores change along the walk."""
    keys = [np.concatenate(list(step.scores.keys)) for step in walk if step.scores is not None]
    return any(bool(((later != keys[0]) & ~np.isnan(later)).any()) for later in keys[1:])


def drifts(walks: Sequence[Walk]) -> list[list[tuple[int, float]]]:
    """The staleness of those walks that have a line to draw: scores that change, while heads enough are left."""
    return [points for walk in walks if is_rescored(walk) and len(points := staleness(walk)) > 1]


def read_experiment(folder: Path) -> dict[str, Any]:
    """What a comparison was asked."""
    return read_header(folder / EXPERIMENT_FILE, schema.EXPERIMENT)


def read_parts(folder: Path) -> dict[str, list[Journal]]:
    """The finished parts of the comparison in a folder, by method, in the order of their runs."""
    about = read_experiment(folder)
    parts: dict[str, list[Journal]] = {}
    for method in about["methods"]:
        for run in range(about["trajectories" if method in RANDOMS else "runs"]):
            part = folder / "parts" / f"{method}-{run}"
            if not (part / RUN_FILE).exists():
                continue
            journal = Journal.read(part)
            if journal.steps and journal.steps[-1].stop is not None:
                parts.setdefault(method, []).append(journal)
    if not parts:
        raise RunFolderError(f"{folder} holds no finished part of a comparison.")
    return parts


def read_comparison(folder: Path) -> Comparison:
    """The comparison in a folder, from its journals alone; parts that are not finished are left out."""
    parts = read_parts(folder)
    header = next(iter(parts.values()))[0].header
    return Comparison(header, {name: [journal.steps for journal in runs] for name, runs in parts.items()})
