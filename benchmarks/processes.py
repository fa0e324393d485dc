"""How much faster several processes are than one, a thread each: python benchmarks/processes.py [MODEL DATA].

Without names it is the demo's classifier. The runs take turns, so that a noisy machine disturbs all alike; times are
those of the steps in the journals, without the start. It also says how far the scores of several are from those of one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from pages import write

from greedy_gnorm.demo import prepare
from greedy_gnorm.report.tables import as_markdown

COUNTS = (1, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="*", metavar="MODEL DATA", help="the demo's by default")
    parser.add_argument("--heads", type=int, default=8, help="how many heads go")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--eval-samples", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.source:
        (model, data), name = given.source, Path(given.source[0]).name
    else:
        assets = prepare(seed=0, say=print)
        (model, data), name = (assets.model, assets.data), "the demo's classifier"
    call = [
        "-m", "greedy_gnorm", "prune", str(model), "--data", str(data), "--stop", f"heads={given.heads}",
        "--samples", str(given.samples), "--eval-samples", str(given.eval_samples), "--no-latency", "--quiet",
    ]  # fmt: skip
    found: dict[int, list[list[dict[str, Any]]]] = {count: [] for count in COUNTS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(given.rounds):
            for count in COUNTS:
                found[count].append(steps(count, call, Path(folder) / f"{turn}-{count}"))
                print(f"round {turn + 1}, processes {count}: {seconds(found[count][-1]):.1f} s", flush=True)
    alone = found[1][0]
    cells = []
    for count in COUNTS:
        ratios = [seconds(one) / seconds(several) for one, several in zip(found[1], found[count], strict=True)]
        same = all([step["removed"] for step in run] == [step["removed"] for step in alone] for run in found[count])
        furthest = max(distance(run, alone) for run in found[count])
        cells.append([str(count), f"{statistics.median(ratios):.2f}", "yes" if same else "NO", f"{furthest:.0e}"])
    header = ["processes of one thread", "times as fast as one", "same order", "scores differ by at most"]
    write("scale.md", "processes", f"{name}, {os.cpu_count()} cores:\n\n{as_markdown(header, cells)}")


def steps(count: int, call: list[str], out: Path) -> list[dict[str, Any]]:
    """The journal of a run by so many processes."""
    launcher = [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launcher, *call, "--out", str(out)], check=True, env=environment)
    return [json.loads(line) for line in (out / "journal.jsonl").read_text(encoding="utf-8").splitlines()]


def seconds(run: list[dict[str, Any]]) -> float:
    return sum(sum(step["seconds"].values()) for step in run)


def distance(run: list[dict[str, Any]], alone: list[dict[str, Any]]) -> float:
    """The largest relative difference of a score."""
    pairs = [(ours["scores"], theirs["scores"]) for ours, theirs in zip(run, alone, strict=True) if ours["scores"]]
    values = [(np.array(ours, dtype=float), np.array(theirs, dtype=float)) for ours, theirs in pairs]
    return max(float(np.nanmax(np.abs(ours - theirs) / np.abs(theirs))) for ours, theirs in values)


if __name__ == "__main__":
    main()
