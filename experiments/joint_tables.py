"""Write the tables of the joint comparisons into docs/results.md: python experiments/joint_tables.py [NAME ...]

Each cell is the mean accuracy over the runs in per cent, with the 95 % interval (Wilson) that a share of so many
evaluation rows has. Comparisons that are not finished are shown with the walks that they have.
"""

from __future__ import annotations

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


def main() -> None:
    names = sys.argv[1:] or sorted(path.parent.name for path in RUNS.glob("*/joint"))
    for name in names:
        folder = RUNS / name / "joint"
        journal = next(iter(read_parts(folder).values()))[0]
        rows = int(journal.header["data"]["evaluation"]["rows"])
        write("results.md", f"joint-{name}", table(read_comparison(folder), rows))


if __name__ == "__main__":
    main()
