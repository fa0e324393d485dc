"""What a comparison costs: `make bench-comparison MODEL=FOLDER DATA=FILE` writes to docs/performance.md.

The paper's five methods, one run, 25 random trajectories, 32 rows to score on and 64 to evaluate on, in plain forward
passes over the rows to evaluate on, with as many threads as the machine has cores. Each way is a command of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from pages import write
from rivals import plain_forward

from greedy_gnorm.data.loading import evaluation_batches
from greedy_gnorm.model.checkpoint import load, load_tokenizer
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of

HERE = Path(__file__).resolve().parents[1]
SETTINGS = ["--methods", "paper", "--runs", "1", "--samples", "32", "--eval-samples", "64"]
WAYS = {
    "after each head": [],
    "`--points 24`": ["--points", "24"],
    "`--points 6`": ["--points", "6"],
    "after each head, `--workers 2`": ["--workers", "2"],
    "`--points 6 --workers 2`": ["--points", "6", "--workers", "2"],
}


def environment_of(tree: Path, threads: int | None) -> dict[str, str]:
    """Variables for a process with the package and the benchmarks of a source tree, and so many threads."""
    paths = os.pathsep.join(str(tree / part) for part in ("src", "benchmarks"))
    return {**os.environ, "PYTHONPATH": paths} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def forward_seconds(model: str, data: str, threads: int | None = None) -> float:
    """The least time of a plain forward pass over the rows that quality is measured on."""
    if threads is not None:
        torch.set_num_threads(threads)
    classifier = load(model).float().eval()
    tokenizer = load_tokenizer(model, config=classifier.config)
    batches = evaluation_batches(classifier, tokenizer, task_of(classifier), data, Settings(eval_samples=64))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        plain_forward(classifier, batches)
        times.append(time.perf_counter() - start)
    return min(times)


def compared(
    model: str, data: str, options: list[str], tree: Path = HERE, threads: int | None = None
) -> tuple[float, float]:
    """Seconds of a command of a version, and of the walks within it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "comparison"
        command = [sys.executable, "-m", "greedy_gnorm", "compare", model, "--data", data, "--out", str(out), "--quiet"]
        start = time.perf_counter()
        environment = environment_of(tree, threads)
        subprocess.run([*command, *SETTINGS, *options], check=True, capture_output=True, env=environment)
        whole = time.perf_counter() - start
        steps = [
            json.loads(line) for path in out.glob("parts/*/journal.jsonl") for line in path.read_text().splitlines()
        ]
        return whole, sum(sum(step["seconds"].values()) for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    given = parser.parse_args()
    cells: list[list[str]] = []
    first = 0.0
    for name, options in WAYS.items():
        unit = forward_seconds(given.model, given.data)
        whole, walks = compared(given.model, given.data, options)
        processes = 2 if "--workers" in options else 1
        first = first or whole / unit
        cells.append([name, f"{walks / processes / unit:.0f}", f"{whole / unit:.0f}", f"{first / (whole / unit):.1f}"])
        print(cells[-1], flush=True)
    header = ["quality is measured", "walks", "whole command", "times as fast"]
    write("performance.md", "comparison", f"{torch.get_num_threads()} threads.\n\n" + as_markdown(header, cells))


if __name__ == "__main__":
    main()
