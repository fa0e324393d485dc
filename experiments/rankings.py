"""Rank methods over tasks: python experiments/rankings.py

The means of the curves are those of the record of heads (experiments/heads.py). Friedman's test asks whether the
methods differ at all; two of them differ if their mean ranks are further apart than Nemenyi's critical difference. The
table is written into docs/results.md, and the picture is docs/figures/ranks.png.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from defaults import MEASURED, NAMES
from matplotlib import pyplot
from offline import HERE
from scipy import stats

from greedy_gnorm.report.tables import as_markdown

sys.path.insert(0, str(HERE.parent / "benchmarks"))

from pages import DOCS, write

PAGE = "results.md"
LEVEL = 0.05


def means() -> dict[str, dict[str, float]]:
    """The mean over the curve by task and method, as the record of heads has it."""
    paths = {name: MEASURED / f"heads-{name}.json" for name in NAMES}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))["means"] for name, path in paths.items() if path.exists()
    }


def critical_difference(methods: int, tasks: int) -> float:
    """The distance of mean ranks from which on two methods differ (Nemenyi, at the 5 % level)."""
    quantile = stats.studentized_range.ppf(1 - LEVEL, methods, np.inf) / np.sqrt(2)
    return float(quantile * np.sqrt(methods * (methods + 1) / (6 * tasks)))


def draw(ranks: dict[str, float], difference: float) -> None:
    """Mean ranks on a line; methods that can't be told apart are joined."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    figure, axis = pyplot.subplots(figsize=(7, 2.4), layout="constrained")
    axis.set(xlim=(0.6, len(ranks) + 0.4), ylim=(-2.6, 1.6), yticks=[])
    axis.set_xlabel("mean rank over the tasks (1 is the best)")
    for side in ("left", "right", "top"):
        axis.spines[side].set_visible(False)
    for place, (method, rank) in enumerate(ordered):
        axis.plot(rank, 0, "o", color="#0072B2")
        above = (0, 8 + 24 * (place % 2))
        axis.annotate(f"{method}\n{rank:.2f}", (rank, 0), above, textcoords="offset points", ha="center", fontsize=9)
    level, joined = 0.0, 0.0
    for _, rank in ordered:
        last = max(other for _, other in ordered if other - rank <= difference)
        if last > max(rank, joined):  # a bar within another says nothing new
            level, joined = level - 0.6, last
            axis.plot([rank, last], [level, level], color="#D55E00", linewidth=3)
    axis.plot([1, 1 + difference], [-2.3, -2.3], color="black", linewidth=1)
    axis.annotate("critical difference", (1 + difference / 2, -2.2), ha="center", fontsize=8)
    figure.savefig(DOCS / "figures" / "ranks.png", dpi=110)


def main() -> None:
    found = means()
    methods = list(next(iter(found.values())))
    values = np.array([[found[task][method] for method in methods] for task in found])
    by_task = stats.rankdata(-values, axis=1)
    ranks = dict(zip(methods, by_task.mean(0).tolist(), strict=True))
    test, difference = stats.friedmanchisquare(*values.T), critical_difference(len(methods), len(found))
    draw(ranks, difference)
    methods.sort(key=ranks.__getitem__)
    cells = [
        [method, *(f"{rank:g}" for rank in by_task[:, list(ranks).index(method)]), f"{ranks[method]:.2f}"]
        for method in methods
    ]
    told = (
        f"Friedman's chi-square {test.statistic:.1f}, p = {test.pvalue:.4f}; the critical difference of mean ranks is "
        f"{difference:.2f}.\n\n"
    )
    write(PAGE, "ranks", told + as_markdown(["rank by the mean of the curve", *found, "mean rank"], cells))


if __name__ == "__main__":
    main()
