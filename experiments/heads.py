"""The record of head pruning: python experiments/heads.py [--fitted] [--runs N] [NAME ...]

Methods that remove heads are compared on the classifiers of experiments/offline: five scoring samples, quality at ten
points of the curve (after every head of ALBERT) on all test rows, or on as many as ROWS says. With --fitted, a sixth of
the heads is removed at a time, and least squares fits what is left. What was measured is kept in experiments/measured,
and the tables of docs/results.md are written after each comparison. One that was interrupted goes on, and one that was
made with fewer scoring samples (--runs) gains the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
from defaults import MEASURED, NAMES, heads_at_once
from offline import HERE, RUNS, classifier_of, tell

import greedy_gnorm as gg
from greedy_gnorm.comparison.analysis import Comparison, read_comparison
from greedy_gnorm.records.files import write_json
from greedy_gnorm.report.tables import as_markdown

sys.path.insert(0, str(HERE.parent / "benchmarks"))

from pages import write

ROWS = {"inference": 700, "languages": 700, "reactions": 700}
"""Evaluation rows where all of them would take hours."""
RUNS_OF_EACH = 5
SCORED = 32
PLAIN = {"methods": "paper,gnorm-static,gnorm-plus-greedy,fisher-greedy,kl-fisher-greedy", "points": 6}
FITTED = {
    "methods": "greedy-gnorm,kl-fisher-greedy,reconstruction-loss-greedy,random",
    "recover": "least-squares",
    "calibration_tokens": 16384,
}
SHOWN = ("method", "runs", "before", "at 25%", "at 50%", "at 75%", "at 81%", "mean", "scoring, forwards")


def measure(name: str, fitted: bool, runs: int) -> None:
    """Compare the methods on one classifier, and keep the table, unless there is one of as many runs."""
    kept = MEASURED / f"{_kind(fitted)}-{name}.json"
    if kept.exists() and json.loads(kept.read_text(encoding="utf-8"))["runs"] >= runs:
        return
    model, data = classifier_of(name)
    out = RUNS / name / _kind(fitted)
    gg.compare(str(model), str(data), out=out, resume=True, on_step=tell, **settings(name, fitted, runs))
    write_json(kept, summary(read_comparison(out)))


def settings(name: str, fitted: bool, runs: int = RUNS_OF_EACH) -> dict[str, Any]:
    """How the methods are compared on a task."""
    common = {"runs": runs, "trajectories": runs, "samples": SCORED, "eval_samples": ROWS.get(name)}
    return {**common, **FITTED, "heads_per_step": 2 * heads_at_once(name)} if fitted else {**common, **PLAIN}


def summary(comparison: Comparison) -> dict[str, Any]:
    """The methods by quality along the curve and what their scores cost, their means, and the time of all walks."""
    header, cells = comparison.summary
    places = [header.index(name) for name in SHOWN[:-1]]
    mean = next(column for column in comparison.columns if column.name == "mean")
    steps = [step for walks in comparison.curves.values() for walk in walks for step in walk]
    costs = scoring_forwards(comparison)
    return {
        "rows": comparison.header["data"]["evaluation"]["rows"],
        "runs": min(map(len, comparison.curves.values())),
        "minutes": sum(sum(step.seconds.values()) for step in steps) / 60,
        "means": mean.means(comparison),
        "cells": [[*(row[place] for place in places), f"{costs[row[0]]:.0f}"] for row in cells],
    }


def scoring_forwards(comparison: Comparison) -> dict[str, float]:
    """What the scores of a walk cost, in evaluations of as many rows by the unpruned model."""
    data, curves = comparison.header["data"], comparison.curves
    evaluation = max(walk[0].seconds["evaluate"] for walks in curves.values() for walk in walks)  # others copy it
    forward = evaluation / data["evaluation"]["rows"] * data["scoring"]["rows"]
    return {
        method: float(np.mean([sum(step.seconds.get("score", 0.0) for step in walk) for walk in walks]) / forward)
        for method, walks in curves.items()
    }


def tables(fitted: bool) -> str:
    """A table for each task that was measured."""
    parts = []
    for name in NAMES:
        path = MEASURED / f"{_kind(fitted)}-{name}.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            told = f"{found['rows']:,} rows; the walks took {found['minutes']:.0f} minutes."
            parts.append(f"#### {name.capitalize()}\n\n{told}\n\n{as_markdown(list(SHOWN), found['cells'])}")
    return "\n".join(parts)


def _kind(fitted: bool) -> str:
    return "heads-fitted" if fitted else "heads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="which classifiers; all by default")
    parser.add_argument("--fitted", action="store_true", help="fit what is left by least squares")
    parser.add_argument("--runs", type=int, default=RUNS_OF_EACH, help=f"scoring samples; {RUNS_OF_EACH} by default")
    given = parser.parse_args()
    for name in given.names or NAMES:
        start = time.monotonic()
        measure(name, given.fitted, given.runs)
        print(f"{name}: {time.monotonic() - start:.0f} s")
        write("results.md", _kind(given.fitted), tables(given.fitted))


if __name__ == "__main__":
    main()
