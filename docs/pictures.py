"""Make the README's pictures: accuracy against work from docs/results.md, and the page of a run of the demo."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

DOCS = Path(__file__).resolve().parent
FIGURES = DOCS / "figures"
METHODS = {
    "joint-refit": ("fitted by least squares\n(as gnorm compress does)", "#1f5fbf", "-"),
    "joint-gates": ("one factor for each unit", "#3f9c8f", "--"),
    "joint-rounds": ("not fitted", "#c27c1a", "--"),
    "joint-magnitude": ("smallest weights first", "#8a8a8a", ":"),
    "joint-random": ("at random", "#b8b8b8", ":"),
}
"""The methods that are drawn: their label, colour and line."""


def draw_gains(results: str, name: str, title: str, path: Path) -> None:
    """Draw a table of joint methods in docs/results.md: accuracy against the share of multiplications left."""
    part = results.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    unpruned, rows = re.search(r"Unpruned ([\d.]+) on ([\d,]+) rows", part).groups()  # type: ignore[union-attr]
    shares = [int(share) for share in re.findall(r"(\d+)%", part)]
    figure, axes = pyplot.subplots(figsize=(8.8, 3.6), layout="constrained")
    axes.axhline(float(unpruned), color="black", linewidth=1)
    axes.text(100, float(unpruned) + 0.6, f"unpruned: {unpruned}", va="bottom", fontsize=9)
    for method, (label, colour, line) in METHODS.items():
        cells = re.search(rf"^\| {method} \|.*$", part, flags=re.MULTILINE)[0].split("|")[3:-1]  # type: ignore[index]
        values = [[float(value) for value in re.findall(r"[\d.]+", cell)] for cell in cells]
        middle = [float(unpruned), *(value[0] for value in values)]
        axes.plot([100, *shares], middle, line, color=colour, label=label, marker="o", markersize=3.5)
        if method == "joint-refit":
            low, high = ([value[place] for value in values] for place in (1, 2))
            axes.fill_between(shares, low, high, color=colour, alpha=0.15, linewidth=0, label="95 % interval")
    axes.set(xlabel="multiplications left, %", ylabel="test accuracy, %", xlim=(102, 23))
    axes.set_title(f"{title}, {rows} test rows, no training", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def take_page(path: Path) -> None:
    """Run the demo in a folder of its own and take a picture of its page; requires chromium and its driver."""
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from browser import started

    from greedy_gnorm.cli.app import main

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if main(["demo", "--quiet"]) != 0:
            sys.exit("The demo failed.")
        with started() as browser:
            browser.open(Path("runs/demo/report.html"), width=1200)
            browser.picture(path, height=1330)


if __name__ == "__main__":
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    draw_gains(results, "joint-financial", "MiniLM on financial sentences", FIGURES / "gains.png")
    take_page(FIGURES / "report.png")
    print(f"Wrote gains.png and report.png in {FIGURES}.")
