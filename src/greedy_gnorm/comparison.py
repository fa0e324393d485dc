"""What a comparison shows: numbers by method, from the steps alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from greedy_gnorm import records
from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.heads import Step, removed_by
from greedy_gnorm.journal import HEADER, Journal, read_header
from greedy_gnorm.measure import FLOAT32, MEGABYTE
from greedy_gnorm.rules import curve, knee
from greedy_gnorm.strategies import RANDOM

EXPERIMENT = "experiment.json"
SHARES = (0.25, 0.50, 0.75, 0.81)
DROPS = (0.01, 0.05)

Walk = list[Step]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Comparison:
    """Every walk of every method, and the header that they share."""

    header: dict[str, Any]
    curves: dict[str, list[Walk]]

    @property
    def quality(self) -> str:
        """The measure that is compared."""
        return str(self.header["quality"])

    @property
    def heads(self) -> int:
        """Heads that a walk removes."""
        return len(removed_by(next(iter(self.curves.values()))[0]))


def at_share(points: Points, share: float) -> float:
    """Quality when this share of the heads is gone, between two points by a straight line."""
    heads, quality = zip(*points, strict=True)
    return float(np.interp(share * heads[-1], heads, quality))


def mean_over_curve(points: Points) -> float:
    """The curve's mean height: the area under it (trapezoids) over its width."""
    heads, quality = zip(*points, strict=True)
    return float(np.trapezoid(quality, heads) / (heads[-1] - heads[0]))


def heads_before_drop(points: Points, drop: float) -> float:
    """How many heads go before quality first falls more than this below the start."""
    floor = points[0][1] - drop - 1e-12
    safe = 0.0
    for gone, quality in points:
        if quality < floor:
            break
        safe = gone
    return safe


def solution(walk: Walk) -> Step:
    """The step at the knee of the curve."""
    return walk[knee(curve(walk))]


@dataclass(frozen=True)
class Column:
    """A column of a table: what it shows of a walk, how that is written, and which of the methods' means is best."""

    name: str
    value: Callable[[Walk], float]
    form: str = ".3f"
    best: Callable[[Sequence[float]], float] | None = max

    def written(self, value: float) -> str:
        """The number as text, without a negative zero."""
        return format(value, f"z{self.form}")


def columns() -> list[Column]:
    """The columns of the comparison, in their order."""
    return [
        Column("before", lambda walk: curve(walk)[0][1], best=None),
        *[Column(f"at {share:.0%}", lambda walk, s=share: at_share(curve(walk), s)) for share in SHARES],  # type: ignore[misc]
        Column("mean", lambda walk: mean_over_curve(curve(walk))),
        *[
            Column(f"heads before -{drop * 100:.0f} pt", lambda walk, d=drop: heads_before_drop(curve(walk), d), ".1f")  # type: ignore[misc]
            for drop in DROPS
        ],
        Column("knee: heads gone", knee_heads, ".1f"),
        Column("knee: quality", lambda walk: curve(walk)[knee(curve(walk))][1]),
    ]


def solution_columns(quality: str) -> list[Column]:
    """The columns of the solutions: quality in per cent and size (MB of float32) before and after."""

    def percent(step: Step) -> float:
        return 100 * step.quality[quality]

    def decrease(walk: Walk) -> float:
        before, after = percent(walk[0]), percent(solution(walk))
        return 100 * (before - after) / abs(before) if before else math.nan

    def megabytes(step: Step) -> float:
        return step.parameters * FLOAT32 / MEGABYTE

    return [
        Column("before", lambda walk: percent(walk[0]), ".2f", None),
        Column("after", lambda walk: percent(solution(walk)), ".2f", max),
        Column("decrease %", decrease, ".2f", min),
        Column("MB before", lambda walk: megabytes(walk[0]), ".2f", None),
        Column("MB after", lambda walk: megabytes(solution(walk)), ".2f", min),
        Column("reduction %", lambda walk: 100 * (1 - solution(walk).parameters / walk[0].parameters), ".2f", max),
        Column("heads gone", knee_heads, ".1f", max),
        Column("parameters before", lambda walk: walk[0].parameters, ",.0f", None),
        Column("parameters after", lambda walk: solution(walk).parameters, ",.0f", min),
    ]


def knee_heads(walk: Walk) -> int:
    """Heads gone at the solution."""
    return len(removed_by(walk[: solution(walk).step + 1]))


def table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The methods by quality along the curve."""
    return _by_method(comparison, columns())


def solutions(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The paper's table of solutions: the methods at the knees of their curves."""
    return _by_method(comparison, solution_columns(comparison.quality))


def _by_method(comparison: Comparison, shown: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Header and text cells: mean ± standard deviation over runs, the best of each column marked with an asterisk."""
    cells = [[method, str(len(walks))] for method, walks in comparison.curves.items()]
    for column in shown:
        values = [[column.value(walk) for walk in walks] for walks in comparison.curves.values()]
        means = [float(np.mean(runs)) for runs in values]
        best = None if column.best is None else column.written(column.best(means))
        for row, runs, mean in zip(cells, values, means, strict=True):
            if math.isnan(mean):
                row.append("-")
                continue
            text = column.written(mean)
            spread = f" ± {column.written(float(np.std(runs, ddof=1)))}" if len(runs) > 1 else ""
            row.append(f"{text}{spread}{'*' if text == best else ''}")
    return ["method", "runs", *(column.name for column in shown)], cells


def staleness(walk: Walk) -> list[tuple[int, float]]:
    """(heads gone, Kendall's tau between the first scores and the scores then, over the heads still there)."""
    scored = [step for step in walk if step.scores is not None]
    first = scored[0].scores
    assert first is not None
    points, gone = [], 0
    for step in scored:
        assert step.scores is not None
        there = ~np.isnan(step.scores.values)
        if there.sum() >= 3:
            tau = float(stats.kendalltau(first.keys[there], step.scores.keys[there]).statistic)
            if not math.isnan(tau):
                points.append((gone, tau))
        gone += len(step.removed)
    return points


def is_rescored(walk: Walk) -> bool:
    """Whether the scores change along the walk."""
    keys = [step.scores.keys for step in walk if step.scores is not None]
    return any(bool(((later != keys[0]) & ~np.isnan(later)).any()) for later in keys[1:])


def drifts(walks: Sequence[Walk]) -> list[list[tuple[int, float]]]:
    """The staleness of those walks that have a line to draw: scores that change, while heads enough are left."""
    return [points for walk in walks if is_rescored(walk) and len(points := staleness(walk)) > 1]


def read_experiment(folder: Path) -> dict[str, Any]:
    """What a comparison was asked."""
    return read_header(folder / EXPERIMENT, records.EXPERIMENT)


def read_parts(folder: Path) -> dict[str, list[Journal]]:
    """The finished parts of the comparison in a folder, by method, in the order of their runs."""
    about = read_experiment(folder)
    parts: dict[str, list[Journal]] = {}
    for method in about["methods"]:
        for run in range(about["trajectories" if method == RANDOM else "runs"]):
            part = folder / "parts" / f"{method}-{run}"
            if not (part / HEADER).exists():
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
