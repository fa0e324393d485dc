"""Rank methods over tasks: python experiments/rankings.py

The means of the curves are read from the tables of docs/results.md, one for each task. Friedman's test asks whether the
methods differ at all; two of them differ if their mean ranks are further apart than Nemenyi's critical difference. The
table is written into docs/results.md, and the picture is docs/figures/ranks.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from scipy import stats

from greedy_gnorm.pruning.methods import PAPER
from greedy_gnorm.report.tables import as_markdown

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from pages import DOCS, write  # noqa: E402

PAGE = "results.md"
RECORD = "The record of heads"
"""A section that has tasks of other sections again."""
LEVEL = 0.05


def tables(text: str) -> dict[str, dict[str, float]]:
    """The mean over the curve by task and method, from the first table of each section that has the paper's methods."""
    found: dict[str, dict[str, float]] = {}
    section, header = "", list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            section, header = line.removeprefix("## "), []
        elif line.startswith("| method | runs | before |") and section not in found:
            header, found[section] = cells, {}
        elif header and line.startswith("| ") and cells[0] in PAPER:
            found[section][cells[0]] = float(cells[header.index("mean")].split()[0].rstrip("*="))
        elif not line.startswith("|"):
            header = []
    return {task: means for task, means in found.items() if set(means) == set(PAPER) and task != RECORD}


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
    means = tables((DOCS / PAGE).read_text(encoding="utf-8"))
    values = np.array([[means[task][method] for method in PAPER] for task in means])
    by_task = stats.rankdata(-values, axis=1)
    ranks = dict(zip(PAPER, by_task.mean(0).tolist(), strict=True))
    test, difference = stats.friedmanchisquare(*values.T), critical_difference(len(PAPER), len(means))
    draw(ranks, difference)
    cells = [[task, *(f"{rank:g}" for rank in line)] for task, line in zip(means, by_task, strict=True)]
    cells.append(["mean rank", *(f"{ranks[method]:.2f}" for method in PAPER)])
    told = (
        f"Friedman's chi-square {test.statistic:.1f}, p = {test.pvalue:.4f}; the critical difference of mean ranks is "
        f"{difference:.2f}.\n\n"
    )
    write(PAGE, "ranks", told + as_markdown(["rank by the mean of the curve", *PAPER], cells))


if __name__ == "__main__":
    main()
