"""`gnorm compress` with its defaults on several tasks: python experiments/defaults.py [WAY] [NAME ...]

Each classifier of experiments/offline, and the demo's, is compressed in 20 rounds, and the rounds that are nearest to
some shares of the multiplications are measured on all test rows; the last ones also after distillation. WAY is `labels`
(the default: down to a quarter), `own` (down to 15 %, with labels drawn from the unpruned model), `heads` (`gnorm
prune`: a twelfth of the heads at a time, fitted, until 80 % are gone) or `heads-own` (the same with labels drawn from
the unpruned model). What was measured is kept in experiments/measured. At the end, and with `tables` for WAY, the
tables of docs/results.md are written.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from offline import HERE, RUNS, classifier_of

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

NAMES = ("tweets", "financial", "inference", "languages", "reactions", "demo")
MEASURED = HERE / "measured"
STEPS = 300
"""Steps of distillation."""


def heads_at_once(name: str) -> int:
    """Heads that are removed before the next fit: about a twelfth of them, or one of ALBERT's eight."""
    return {"reactions": 1, "demo": 3}.get(name, 6)


@dataclass(frozen=True)
class Way:
    """How a classifier is pruned, and which of its steps are measured."""

    title: str
    settings: Mapping[str, Any]
    shares: Sequence[float]  # of the multiplications that are left, or of the heads that are gone
    distilled: Sequence[float] = ()
    heads_alone: bool = False


HEADS = {"method": "reconstruction-loss-greedy", "recover": "least-squares", "stop": "fraction=0.8"}
WAYS = {
    "labels": Way(
        "Change of accuracy in points, by the multiplications that are left", {"macs": 0.25}, (0.5, 0.33, 0.25), (0.25,)
    ),
    "own": Way(
        "The same without labels: scored by labels drawn from the unpruned model, down to 15 %",
        {"macs": 0.15, "labels": "own"},
        (0.5, 0.33, 0.25, 0.15),
        (0.25, 0.15),
    ),
    "heads": Way("Heads alone, fitted, by the share of heads that is gone", HEADS, (0.5, 0.8), heads_alone=True),
    "heads-own": Way("Heads alone, without labels", {**HEADS, "labels": "own"}, (0.5, 0.8), heads_alone=True),
}


def measure(way: str, name: str) -> None:
    """Compress one classifier, and write the quality of some steps, fitted and distilled, to a file."""
    found = MEASURED / f"{name}-{way}.json"
    if found.exists():
        return
    model, data = classifier_of(name)
    prune, settings = gg.compress, WAYS[way].settings
    if WAYS[way].heads_alone:
        prune, settings = gg.prune, {**settings, "heads_per_step": heads_at_once(name)}
    run = prune(str(model), str(data), out=RUNS / name / f"defaults-{way}", resume=True, **settings)
    rows = evaluation_batches(run.unpruned, run.tokenizer, task_of(run.unpruned), str(data), Settings())
    before = row_statistics(find_sites(copy.deepcopy(run.unpruned).float()), rows)
    results = {}
    for share in WAYS[way].shares:
        pruned = run.at(_nearest(run, way, share)).float()
        results[f"{share:.0%}"] = _compared(pruned, before, rows)
        if share in WAYS[way].distilled:
            assert run.recovery is not None
            calibration = run.recovery.calibration
            Distillation(calibration.original, calibration.batches, STEPS)(find_sites(pruned))
            results[f"{share:.0%}, distilled"] = _compared(pruned, before, rows)
        print(name, way, results, flush=True)
    MEASURED.mkdir(exist_ok=True)
    write_json(found, results)


def _nearest(run: gg.Run, way: str, share: float) -> int:
    """The step that is nearest to a share."""
    if WAYS[way].heads_alone:
        total = sum(site.total for site in find_sites(run.unpruned, "heads"))
        shares = np.cumsum([len(step.removed) for step in run.steps]) / total
    else:
        multiplications = np.array([step.cost.multiplications for step in run.steps], dtype=np.float64)
        shares = multiplications / multiplications[0]
    return int(np.argmin(np.abs(shares - share)))


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
    write("results.md", "defaults", "\n".join(f"{WAYS[way].title}:\n\n{table}" for way, table in found.items()))


def _table(way: str) -> str:
    """The change of accuracy by task, and the mean of several without the demo's; empty if nothing was measured."""
    paths = {name: MEASURED / f"{name}-{way}.json" for name in NAMES}
    results = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}
    if not results:
        return ""
    columns = list(next(iter(results.values())))
    firsts = [result[columns[0]] for result in results.values()]
    cells = [
        [name, f"{first['rows']:,}", f"{100 * first['accuracy'][0]:.2f}", *map(_cell, result.values())]
        for (name, result), first in zip(results.items(), firsts, strict=True)
    ]
    changes = [
        [np.diff(part["accuracy"]) for part in result.values()] for name, result in results.items() if name != "demo"
    ]
    if len(changes) > 1:
        means = (f"{100 * change:+.2f}" for change in np.mean(changes, axis=0).ravel())
        cells.append(["mean without the demo", "", "", *means])
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
