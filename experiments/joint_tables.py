"""Write the tables of the joint comparisons into docs/results.md: python experiments/joint_tables.py [NAME ...]

Each cell is the mean accuracy over the runs in per cent, with the 95 % interval (Wilson) that a share of so many
evaluation rows has. The walks that are finished are kept in experiments/measured, so that a table can be completed on
another machine. Without names, the table of the compressions (`offline.py --compress`) is written too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from greedy_gnorm.comparison.analysis import read_comparison, read_parts, step_at_work
from greedy_gnorm.pruning.budget import COMPARED
from greedy_gnorm.pruning.methods import METHODS
from greedy_gnorm.records.files import write_json
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.tasks.intervals import wilson

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from pages import write  # noqa: E402

RUNS = HERE.parent / "runs" / "offline"
MEASURED = HERE / "measured"


def collect(name: str) -> None:
    """Add the finished walks of the comparisons in runs/offline to the file of what was measured.

    A walk of the same method and run takes the place of an earlier one.
    """
    kept = MEASURED / f"joint-{name}.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"rows": 0, "walks": []}
    for folder in sorted((RUNS / name).glob("joint*")):
        parts = read_parts(folder)
        measure = read_comparison(folder).measure
        for method, journals in parts.items():
            for journal in journals:
                values = [round(measure.of(step_at_work(journal.steps, share)), 4) for share in COMPARED]
                first = round(measure.of(journal.steps[0]), 4)
                runs = [journal.header["seed"]]
                others = [each for each in found["walks"] if (each["method"], each["runs"]) != (method, runs)]
                walk = {"method": method, "runs": runs, "unpruned": first, "quality": values}
                found = {"rows": journal.header["data"]["evaluation"]["rows"], "walks": [*others, walk]}
    if found["walks"]:
        MEASURED.mkdir(exist_ok=True)
        write_json(kept, found)


def table(rows: int, walks: list[dict[str, Any]]) -> str:
    """The methods by share of the multiplications."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for walk in walks:
        by_method.setdefault(walk["method"], []).append(walk)
    cells = []
    for method in sorted(by_method, key=list(METHODS).index):
        own = by_method[method]
        counts = [len(walk["runs"]) for walk in own]
        line = [method, str(sum(counts))]
        for value in np.average([walk["quality"] for walk in own], axis=0, weights=counts):
            low, high = wilson(round(value * rows), rows)
            line.append(f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})")
        cells.append(line)
    levels = " and ".join(f"{100 * level:.2f}" for level in sorted({walk["unpruned"] for walk in walks}))
    head = f"Unpruned {levels} on {rows:,} rows.\n\n"
    return head + as_markdown(["method", "runs", *(f"{share:.0%}" for share in COMPARED)], cells)


def compressed() -> str:
    """The models compressed to shares of their multiplications, on test rows."""
    paths = {
        (path.parts[-4], float(path.parts[-3].removeprefix("compress-"))): path
        for path in RUNS.glob("*/compress-*/eval/eval.json")
    }
    lines = []
    for (name, share), path in sorted(paths.items(), key=lambda item: (item[0][0], -item[0][1])):
        found = json.loads(path.read_text(encoding="utf-8"))
        before, after = (100 * value for value in found["quality"][found["leading"]])
        low, high = (100 * end for end in found["intervals"][found["leading"]]["change"])
        lines.append(
            [name, found["leading"], f"{found['rows']:,}", f"{before:.2f}", f"{share:.0%}",
             f"{after:.2f}", f"{after - before:+.2f} ({low:+.2f} to {high:+.2f})", f"{100 * found['agreement']:.1f}"]
        )  # fmt: skip
    columns = ["model", "measure", "test rows", "unpruned", "multiplications", "compressed", "change", "agreement"]
    return as_markdown(columns, lines)


def main() -> None:
    if not sys.argv[1:] and any(RUNS.glob("*/compress-*/eval/eval.json")):
        write("results.md", "compressed", compressed())
    measured = {path.stem.removeprefix("joint-") for path in MEASURED.glob("joint-*.json")}
    for name in sys.argv[1:] or sorted(measured | {path.parent.name for path in RUNS.glob("*/joint*")}):
        collect(name)
        found = json.loads((MEASURED / f"joint-{name}.json").read_text(encoding="utf-8"))
        write("results.md", f"joint-{name}", table(found["rows"], found["walks"]))


if __name__ == "__main__":
    main()
