"""Run folders made up in an instant: journals without a model behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from greedy_gnorm.pruning.choices import choose
from greedy_gnorm.pruning.curves import knee_of
from greedy_gnorm.pruning.run import unit_counts
from greedy_gnorm.records.files import write_json
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.records.schema import SCHEMA
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import measure_of
from greedy_gnorm.units import Cost, Scores, Step, Unit, removed_by

LATENCY = {
    "runtime": "torch", "batch": 8, "tokens": 128, "threads": 2, "repeats": 9, "before_ms": 200.0,
    "before_spread": [190.0, 210.0], "after_ms": 160.0, "after_spread": [150.0, 170.0], "promised": 1.3,
}  # fmt: skip


SCORES = {"precision": 0.8, "recall": 0.7, "f1": 0.75}
PREDICTIONS = {
    "rows": 1421,
    "classes": ["neg", "neutral", "pos"],
    "per_class": [
        {"class": name, "rows": 400, "before": SCORES, "after": {**SCORES, "recall": recall}}
        for name, recall in (("neg", 0.65), ("neutral", 0.7), ("pos", 0.75))
    ],
    "confusion": {"before": [[300, 80, 20]] * 3, "after": [[290, 90, 20]] * 3},
    "agreement": 0.95,
    "changed_count": 71,
    "changed": [
        {
            "text": f"the film number {place}", "text_pair": None, "label": "pos",
            "before": {"label": "pos", "probability": 0.61}, "after": {"label": "neg", "probability": 0.553},
        }
        for place in range(60)
    ],
}  # fmt: skip
"""predictions.json."""
TEST = {
    "rows": 1421,
    "quality": {"accuracy": [0.8037, 0.8001], "macro_f1": [0.79, 0.78]},
    "intervals": {"accuracy": {"before": [0.7822, 0.8235], "after": [0.7784, 0.82], "change": [-0.0106, 0.0035]}},
}

RAGGED = [(4,), (4, 6), (6,)]
"""Three layers: one of 4 heads, one with two attention modules of 4 and 6 heads, one of 6 heads."""


def header(
    sites: int = 3,
    heads: int = 4,
    *,
    layout: Sequence[Sequence[int]] | None = None,
    layers: int = 1,
    model: str = "my-model",
    on_hub: bool = False,
    dtype: str | None = "float32",
    quality: str = "accuracy",
    higher_is_better: bool = True,
    source: str = "reviews.csv",
    removed: tuple[Unit, ...] = (),
    **settings: Any,
) -> dict[str, Any]:
    """run.json before the first step; `layout` gives the heads of each attention module of each layer."""
    layout = [(heads,)] * sites if layout is None else layout
    given = Settings.of({"stop": ("all",), **settings})
    rows = {"source": source, "rows": 100, "batches": 7, "truncated": 0, "fingerprint": "0123456789abcdef"}
    return {
        "schema": SCHEMA,
        "model": {
            "name": model, "type": "bert", "weights": "fedcba9876543210", "parameters": 1_000_000,
            "sites": [
                {"name": f"layer.{layer}.{place}", "kind": "attention", "layer": layer, "units": units,
                 "applications": layers}
                for layer, modules in enumerate(layout) for place, units in enumerate(modules)
            ],
            "removed": [list(head) for head in removed],
            **({"dtype": dtype} if dtype else {}),
            **({"on_hub": True} if on_hub else {}),
        },
        "data": {"scoring": rows, "evaluation": {**rows, "rows": 50}},
        "config": {**given.to_json(), "objective": "logit-norm"},
        "seed": given.seed,
        "quality": quality,
        "higher_is_better": higher_is_better,
        "versions": {"python": "3.11", "greedy-gnorm": "0.1.0"},
        "started": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip


def walk(
    folder: Path,
    head: dict[str, Any],
    *,
    steps: int | None = None,
    latency: bool = False,
    rescored: bool = True,
    complete: bool = False,
) -> Journal:
    """A journal whose scores, order and quality come from the header's seed; unfinished where `steps` ends it early.

    A `complete` one counts multiplications and has intervals, a final test, choices and predictions.
    """
    journal = Journal.begin(folder, head)
    chance = np.random.default_rng(head["seed"])
    counts = [site["units"] for site in head["model"]["sites"]]
    left = {Unit(site, index) for site, count in enumerate(counts) for index in range(count)}
    left -= {Unit(*gone) for gone in head["model"]["removed"]}
    total, parameters = len(left), head["model"]["parameters"]
    width = {"float16": 2, "bfloat16": 2}.get(head["model"].get("dtype"), 4)
    logs = chance.normal(-5, 2, sum(counts))
    middle = 0.75 - 0.1 * (head["seed"] // 100) + chance.normal(0, 0.02)  # where quality falls
    for number in range((total if steps is None else steps) + 1):
        scores, gone = None, ()
        if number:
            logs = logs + (chance.normal(0, 0.3, sum(counts)) if rescored else 0)
            there = np.split(logs, np.cumsum(counts)[:-1])
            scores = Scores([np.exp(each) for each in there], there)
            scores = scores.without(set(scores.units()) - left)
            gone = (scores.order()[0],)
            left -= set(gone)
            parameters -= 1000
        accuracy = float(round(0.05 + 0.9 / (1 + np.exp(12 * (number / total - middle))), 4)) if number else 0.96
        quality = {"accuracy": accuracy, "macro_f1": accuracy - 0.01, "loss": 1 - accuracy}
        if head["quality"] not in quality:  # a measure that is no share: from 20 to 400
            quality = {head["quality"]: float(round(20 / accuracy, 4)), "loss": 1 - accuracy}
        seconds = {"score": 0.5, "remove": 0.01, "evaluate": 0.25} if number else {"evaluate": 0.25}
        stop = None if left else "no head is left to remove"
        cost = Cost(parameters, width * parameters, 1000 * (parameters - 900_000) if complete else None)
        interval = (accuracy - 0.012, accuracy + 0.012) if complete else None
        journal.append(Step(number, gone, scores, quality, cost, seconds, stop, interval))
    if not left:
        measure = measure_of(journal.header)
        choices = [each.to_json() for each in choose(journal.steps, measure, 300, fastest=False)]
        result = {"solution": knee_of(journal.steps, measure), "latency": [LATENCY] if latency else []}
        journal.finish({**result, "test": TEST, "choices": choices} if complete else result)
    if complete:
        write_json(folder / "predictions.json", PREDICTIONS)
    return journal


def comparison(folder: Path, methods: dict[str, int], **options: Any) -> Path:
    """A comparison's folder: so many runs of each method."""
    folder.mkdir()
    write_json(
        folder / "experiment.json",
        {**header(**options), "methods": list(methods), "runs": 2, "trajectories": methods.get("random", 1)},
    )
    for method, runs in methods.items():
        for run in range(runs):
            seed = 100 * list(methods).index(method) + run
            journal = walk(
                folder / "parts" / f"{method}-{run}",
                header(method=method, seed=seed, **options),
                rescored="ae" not in method,
            )
            write_json(
                journal.folder / "run.json", {key: value for key, value in journal.header.items() if key != "result"}
            )
    return folder


def joint_header(
    layers: int = 3,
    heads: int = 4,
    neurons: int = 20,
    *,
    units: str = "both",
    method: str = "joint-refit",
    **options: Any,
) -> dict[str, Any]:
    """run.json of a compression before the first step."""
    kinds = {"heads": [("attention", heads)], "ffn": [("ffn", neurons)]}
    kinds["both"] = [*kinds["heads"], *kinds["ffn"]]
    settings = {"macs": 0.5, "rounds": 4, **({"units": units} if units != "both" else {})}
    head = header(method=method, **{**settings, **options})
    head["model"]["sites"] = [
        {"name": f"layer.{layer}.{kind}", "kind": kind, "layer": layer, "units": count, "applications": 1}
        for layer in range(layers) for kind, count in kinds[units]
    ]  # fmt: skip
    scoring = head["data"]["scoring"]
    parts = {"scoring": 100, "calibration": 400, "evaluation": 50, "test": 1421}
    head["data"] = {name: {**scoring, "rows": rows} for name, rows in parts.items()}
    shape = {"rows": 8, "tokens": 24.5, "squares": 700.0}
    return {"command": "compress", **head, "shape": shape}


def joint_walk(
    folder: Path, head: dict[str, Any], *, rounds: int = 4, share: float = 0.5, finished: bool = True
) -> Journal:
    """The journal of a compression whose rounds remove the same share of what is left, down to `share`."""
    journal = Journal.begin(folder, head)
    chance = np.random.default_rng(head["seed"])
    counts = [site["units"] for site in head["model"]["sites"]]
    total = sum(counts)
    left = {Unit(site, index) for site, count in enumerate(counts) for index in range(count)}
    drop = 0.0001 * head["seed"]
    for number in range(rounds + 1):
        scores, gone, seconds = None, (), {"evaluate": 0.25}
        if number:
            scores = Scores([chance.uniform(0.1, 1, count) for count in counts])
            scores = scores.without(set(scores.units()) - left)
            gone = tuple(sorted(scores.order()[: len(left) - round(total * share ** (number / rounds))]))
            left -= set(gone)
            seconds = {"score": 0.5, "remove": 0.01, "recover": 2.0, "evaluate": 0.25}
        accuracy = float(round(0.8 - (0.004 + drop) * number**2, 4))
        quality = {"accuracy": accuracy, "macro_f1": accuracy - 0.01, "loss": 1 - accuracy}
        parameters = 100_000 + 9_000 * len(left)
        cost = Cost(parameters, 4 * parameters, 1_000_000 * len(left) // total)
        stop = "--macs 0.5 is reached" if number == rounds and finished else None
        journal.append(Step(number, gone, scores, quality, cost, seconds, stop))
    if finished:
        journal.finish(_joint_result(journal))
    return journal


def _joint_result(journal: Journal) -> dict[str, Any]:
    """The result of a compression: the last step, tested, with choices of which all are timed."""
    steps, measure = journal.steps, measure_of(journal.header)
    gone = removed_by(steps)
    choices = [
        replace(choice, measured=round(0.9 * (choice.promised or 1), 3), milliseconds=180 / (choice.promised or 1))
        for choice in choose(steps, measure, 300, fastest=True)
    ]
    return {
        "solution": len(steps) - 1,
        **unit_counts(journal.header, gone),
        "multiplications": [steps[0].cost.multiplications, steps[-1].cost.multiplications],
        "test": TEST,
        "choices": [choice.to_json() for choice in choices],
        "latency": [LATENCY],
    }


def joint_comparison(folder: Path, methods: dict[str, int]) -> Path:
    """The folder of a comparison of joint methods: so many runs of each."""
    folder.mkdir()
    head = joint_header(macs=None)
    del head["command"]
    runs = {"runs": 2, "trajectories": methods.get("joint-random", 1)}
    write_json(folder / "experiment.json", {**head, "methods": list(methods), **runs})
    for place, (method, count) in enumerate(methods.items()):
        for run in range(count):
            part = joint_header(method=method, seed=10 * place + run, macs=None)
            del part["command"]
            journal = joint_walk(folder / "parts" / f"{method}-{run}", part, rounds=8, share=0.25)
            bare = {key: value for key, value in journal.header.items() if key != "result"}
            write_json(journal.folder / "run.json", bare)
    return folder
