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
    """Mean ranks on a line, the better half named on the left; bars join methods that can't be told apart."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    half = (len(ordered) + 1) // 2
    first, last = 1.0, float(len(ordered))
    figure, axis = pyplot.subplots(figsize=(7.5, 0.34 * half + 1.7), layout="constrained")
    axis.set(xlim=(first - 2.2, last + 2.2), ylim=(-0.62 * half - 1.6, 1.6))
    axis.axis("off")
    axis.plot([first, last], [0, 0], color="black", linewidth=1)
    for rank in range(1, len(ordered) + 1):
        axis.plot([rank, rank], [0, 0.15], color="black", linewidth=1)
        axis.annotate(f"{rank}", (rank, 0.3), ha="center", fontsize=9)
    bars = joined_ranks([rank for _, rank in ordered], difference)
    for place, (start, end) in enumerate(bars):
        axis.plot([start - 0.03, end + 0.03], [-0.22 - 0.2 * place] * 2, color="#D55E00", linewidth=3)
    below = -0.22 - 0.2 * len(bars)
    for place, (method, rank) in enumerate(ordered):
        left = place < half
        level = below - 0.25 - 0.62 * (place if left else len(ordered) - 1 - place)
        side = first - 0.3 if left else last + 0.3
        axis.plot([rank, rank, side], [0, level, level], color="#0072B2", linewidth=0.9)
        axis.plot(rank, 0, "o", color="#0072B2", markersize=5)
        text = f"{method} {rank:.2f}" if left else f"{rank:.2f} {method}"
        axis.annotate(text, (side, level), ha="right" if left else "left", va="center", fontsize=9)
    axis.plot([first, first + difference], [1.1, 1.1], color="black", linewidth=2)
    axis.annotate(f"critical difference {difference:.2f}", (first, 1.25), fontsize=9)
    axis.annotate("mean rank, 1 is the best", (last, 1.25), ha="right", fontsize=9)
    figure.savefig(DOCS / "figures" / "ranks.png", dpi=110)


def joined_ranks(ordered: list[float], difference: float) -> list[tuple[float, float]]:
    """The first and last rank of each group of methods that can't be told apart; a group within another is left out."""
    found: list[tuple[float, float]] = []
    for rank in ordered:
        last = max(other for other in ordered if other - rank <= difference)
        if last > rank and (not found or last > found[-1][1]):
            found.append((rank, last))
    return found


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
    chance = "p < 0.0001" if test.pvalue < 0.0001 else f"p = {test.pvalue:.4f}"
    told = (
        f"Friedman's chi-square {test.statistic:.1f}, {chance}; the critical difference of mean ranks is "
        f"{difference:.2f}.\n\n"
    )
    write(PAGE, "ranks", told + as_markdown(["rank by the mean of the curve", *found, "mean rank"], cells))


if __name__ == "__main__":
    main()
