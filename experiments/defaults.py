"""`gnorm compress` with its defaults on several tasks: python experiments/defaults.py [WAY] [NAME ...]

Each classifier of experiments/offline is compressed to a quarter of its multiplications in 20 rounds. Rounds 10, 16 and
20 have a half, a third and a quarter of them, and each is measured on all test rows. WAY is `labels` (the default),
`own` (labels drawn from the unpruned model), `deep` (down to 15 %) or `heads` (`gnorm prune`: four heads at a time,
fitted, until 80 % are gone). What was measured before is kept; at the end, and with `tables` for WAY, the tables of
docs/results.md are written.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import numpy as np
import torch
import yaml
from offline import HERE, RUNS, SHARED, classifier

import greedy_gnorm as gg
from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.loading import evaluation_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import row_statistics, tested
from greedy_gnorm.records.files import write_json
from greedy_gnorm.recovery.distillation import Distillation
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of

sys.path.insert(0, str(HERE.parent / "benchmarks"))

from pages import write

NAMES = ("tweets", "financial", "inference", "languages", "reactions")
QUARTER = {"macs": 0.25}
WAYS: dict[str, dict[str, Any]] = {
    "labels": QUARTER,
    "own": {**QUARTER, "labels": "own"},
    "deep": {"macs": 0.15},
    "heads": {
        "method": "reconstruction-loss-greedy",
        "recover": "least-squares",
        "heads_per_step": 4,
        "stop": "fraction=0.8",
    },
}
TITLES = {
    "labels": "Change of accuracy in points, by the multiplications that are left",
    "own": "The same, scored by labels drawn from the unpruned model",
    "deep": "At 15 % of the multiplications",
    "heads": "Heads alone, fitted, by the share of heads that is gone",
}
STEPS = 300
"""Steps of distillation."""


def shares_of(way: str) -> list[float]:
    return [0.15] if way == "deep" else [0.5, 0.33, 0.25]


def measure(way: str, name: str) -> None:
    """Compress one classifier, and write the quality of some rounds, fitted and distilled, to a file."""
    plan = yaml.safe_load((HERE / "offline" / f"{name}.yaml").read_text(encoding="utf-8"))
    folder, data = RUNS / name, SHARED / "data" / plan["data"]
    found = folder / f"defaults-{way}.json"
    if found.exists():
        return
    model = classifier(plan, data, folder / "classifier")
    prune = gg.prune if way == "heads" else gg.compress
    run = prune(str(model), str(data), out=folder / f"defaults-{way}", resume=True, **WAYS[way])
    rows = evaluation_batches(run.unpruned, run.tokenizer, task_of(run.unpruned), str(data), Settings())
    before = row_statistics(find_sites(copy.deepcopy(run.unpruned).float()), rows)
    results = {}
    for label, step in _steps(way, run).items():
        pruned = run.at(step).float()
        results[label] = _compared(pruned, before, rows)
        if way != "heads" and label == list(_steps(way, run))[-1]:
            assert run.recovery is not None
            calibration = run.recovery.calibration
            Distillation(calibration.original, calibration.batches, STEPS)(find_sites(pruned))
            results[f"{label}, distilled"] = _compared(pruned, before, rows)
        print(name, way, label, results[label], flush=True)
    write_json(found, results)


def _steps(way: str, run: gg.Run) -> dict[str, int]:
    """The rounds that are measured, by what is left of the multiplications, or gone of the heads."""
    if way == "heads":
        total = sum(site.total for site in find_sites(run.unpruned, "heads"))
        gone = np.cumsum([len(step.removed) for step in run.steps])
        return {f"{share:.0%}": int(np.argmin(np.abs(gone - share * total))) for share in (0.5, 0.8)}
    first = run.steps[0].cost.multiplications
    assert first is not None
    left = np.array([(step.cost.multiplications or 0) / first for step in run.steps])
    return {f"{share:.0%}": int(np.argmin(np.abs(left - share))) for share in shares_of(way)}


def _compared(model: Any, before: torch.Tensor, rows: Batches) -> dict[str, Any]:
    """Accuracy before and after, and the 95 % interval of the change on paired rows."""
    after = row_statistics(find_sites(model), rows)
    found = tested(task_of(model), rows, [before.numpy(), after.numpy()])
    return {
        "rows": found["rows"],
        "accuracy": found["quality"]["accuracy"],
        "change": found["intervals"]["accuracy"]["change"],
    }


def tables() -> None:
    """Write what was measured into docs/results.md, one table for each way."""
    found = {way: table for way in WAYS if (table := _table(way))}
    write("results.md", "defaults", "\n".join(f"{TITLES[way]}:\n\n{table}" for way, table in found.items()))


def _table(way: str) -> str:
    """The change of accuracy by task, and its mean over the tasks; empty if nothing was measured."""
    paths = {name: RUNS / name / f"defaults-{way}.json" for name in NAMES}
    results = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}
    if not results:
        return ""
    columns = list(next(iter(results.values())))
    firsts = [result[columns[0]] for result in results.values()]
    cells = [
        [name, f"{first['rows']:,}", f"{100 * first['accuracy'][0]:.2f}", *map(_cell, result.values())]
        for (name, result), first in zip(results.items(), firsts, strict=True)
    ]
    changes = [[np.diff(part["accuracy"]) for part in result.values()] for result in results.values()]
    cells.append(["mean", "", "", *(f"{100 * change:+.2f}" for change in np.mean(changes, axis=0).ravel())])
    return as_markdown(["task", "test rows", "unpruned", *columns], cells)


def _cell(found: dict[str, Any]) -> str:
    before, after = (100 * value for value in found["accuracy"])
    low, high = (100 * end for end in found["change"])
    return f"{after - before:+.2f} ({low:+.2f} to {high:+.2f})"


def main(arguments: list[str]) -> None:
    way, names = (arguments[0], arguments[1:]) if arguments else ("labels", [])
    if way != "tables":
        for name in names or NAMES:
            measure(way, name)
    tables()


if __name__ == "__main__":
    main(sys.argv[1:])
