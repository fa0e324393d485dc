"""What a command spends its time on: python benchmarks/phases.py [MODEL DATA] writes to docs/performance.md.

`gnorm prune` with its defaults on the demo's classifier or, with a model and data, the comparison of
benchmarks/comparison.py with `--points 6`, in a process of its own. Long work names its phases, and time
is added up by the innermost one. Scoring, evaluating, testing and measuring speed are passes over rows; everything else
is around them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from greedy_gnorm.phases import Phase, listening

PASSES = ("Scoring", "Evaluating", "Testing", "Measuring speed")
REST = "everything else"


def measured(arguments: list[str]) -> dict[str, float]:
    """Seconds of a command by phase, from the start of its process to the end."""
    command = [sys.executable, str(Path(__file__).resolve()), "--here", str(time.time()), *arguments]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def _measure_here(begun: float, arguments: list[str]) -> None:
    from greedy_gnorm.cli.app import main as command

    spent: Counter[str] = Counter({"starting Python": time.time() - begun})
    last, name = time.perf_counter(), REST

    def note(phases: Sequence[Phase]) -> None:
        nonlocal last, name
        now = time.perf_counter()
        spent[name] += now - last
        last, name = now, phases[-1].name if phases else REST

    with listening(note):
        try:
            command(arguments)
        except SystemExit as ended:
            if ended.code:
                raise
        note(())
    print(json.dumps(spent))


def table(spent: dict[str, float]) -> str:
    """The phases by their share of the time."""
    from greedy_gnorm.report.tables import as_markdown

    total = sum(spent.values())
    cells = [[name, f"{value / total:.0%}"] for name, value in sorted(spent.items(), key=lambda item: -item[1])]
    return as_markdown(["phase", "share of the time"], cells)


def of_comparison(model: str, data: str) -> None:
    """Write the phases of a comparison with few points."""
    from comparison import SETTINGS  # here, so that the measured process starts with as little as the command does
    from pages import write

    with tempfile.TemporaryDirectory() as folder:
        spent = measured(
            ["compare", model, "--data", data, *SETTINGS, "--points", "6", "--quiet", "--out", f"{folder}/run"]
        )
    write("performance.md", "comparison-phases", table(spent))


def of_pruning() -> None:
    """Write the phases of a run on the demo's classifier, and their share outside of passes."""
    from pages import write

    from greedy_gnorm.demo import prepare

    assets = prepare()
    with tempfile.TemporaryDirectory() as folder:
        spent = measured(["prune", str(assets.model), "--data", str(assets.data), "--quiet", "--out", f"{folder}/run"])
    outside = 1 - sum(spent.get(name, 0.0) for name in PASSES) / sum(spent.values())
    told = f"{outside:.0%} of the time is outside of passes (to reach: at most 33 %).\n\n"
    write("performance.md", "phases", told + table(spent))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--here", begun, *arguments]:
            _measure_here(float(begun), arguments)
        case [model, data]:
            of_comparison(model, data)
        case []:
            of_pruning()
        case _:
            sys.exit(__doc__)
