"""Write the tables of the joint comparisons into docs/results.md: python experiments/joint_tables.py [NAME ...]

Each cell is the mean accuracy over the runs in per cent, with the 95 % interval (Wilson) that a share of so many
evaluation rows has. Comparisons that are not finished are shown with the walks that they have. Without names, the table
of the compressions (`offline.py --compress`) is written too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from greedy_gnorm.comparison.analysis import Comparison, read_comparison, read_parts, step_at_work
from greedy_gnorm.pruning.budget import COMPARED
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.tasks.intervals import wilson

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from pages import write  # noqa: E402

RUNS = HERE.parent / "runs" / "offline"


def table(comparison: Comparison, rows: int) -> str:
    """The methods by share of the multiplications."""
    measure, cells = comparison.measure, []
    first = next(iter(comparison.curves.values()))[0][0]
    for method, walks in comparison.curves.items():
        line = [method, str(len(walks))]
        for share in COMPARED:
            value = float(np.mean([measure.of(step_at_work(walk, share)) for walk in walks]))
            low, high = wilson(round(value * rows), rows)
            line.append(f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})")
        cells.append(line)
    head = f"Unpruned {100 * measure.of(first):.2f} on {rows:,} rows.\n\n"
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
    names = sys.argv[1:] or sorted(path.parent.name for path in RUNS.glob("*/joint"))
    for name in names:
        folder = RUNS / name / "joint"
        journal = next(iter(read_parts(folder).values()))[0]
        rows = int(journal.header["data"]["evaluation"]["rows"])
        write("results.md", f"joint-{name}", table(read_comparison(folder), rows))


if __name__ == "__main__":
    main()
