"""What scoring a language model costs: peak memory and time against running it, on one row of 512 tokens.

    python benchmarks/language.py FOLDER [--tokens 512]

`make bench-language MODEL=FOLDER` writes the table to docs/performance.md. Each peak is that of a process of its own,
on one thread; times are those of the processor, the two in turn.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pages import write

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.modes import evaluating
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.pruning.methods import objective_for
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.scores import SCORES
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of

PARTS = ("run", "score")
WORDS = {"heads": "groups of heads", "both": "groups and neurons"}


def works(folder: str, tokens: int, units: str, score: str) -> dict[str, Callable[[], Any]]:
    """Running the model on a row, and scoring its units on that row."""
    torch.set_num_threads(1)
    model = gg.load(folder, dtype=torch.float32)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=chance)
    batches = ready_batches([{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    batches = replace(batches, items=tuple(map(task_of(model).completed, batches)))
    sites, chosen = find_sites(model, units), SCORES[score]
    objective = objective_for(chosen, Settings())

    def run() -> None:
        with torch.inference_mode(), evaluating(model):
            model(**batches.items[0].inputs)

    return {"run": run, "score": lambda: chosen(sites, batches, objective)}


def peak(options: list[str], part: str) -> float:
    """The peak of the memory of a process that does one of them, in MB."""
    command = [sys.executable, __file__, *options, "--only", part]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def processor_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(options: list[str], units: str, score: str, repeats: int) -> list[str]:
    """A line of the table: what scoring these units by this score takes, over what running the model takes."""
    peaks = {part: peak([*options, "--units", units, "--score", score], part) for part in PARTS}
    both = works(options[0], int(options[2]), units, score)
    for work in both.values():
        work()
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(repeats):
        for part in PARTS:
            times[part].append(processor_seconds(both[part]))
    medians = {part: statistics.median(found) for part, found in times.items()}
    ratios = (peaks["score"] / peaks["run"], medians["score"] / medians["run"])
    return [f"{score}, {WORDS[units]}", *(f"{ratio:.2f}" for ratio in ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    for name in ("--units", "--score", "--only"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only is not None:
        works(given.folder, given.tokens, given.units, given.score)[given.only]()
        print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
        return
    options = [given.folder, "--tokens", str(given.tokens)]
    cells = [
        measured(options, *work, given.repeats) for work in (("heads", "gnorm"), ("both", "fisher"), ("both", "gnorm"))
    ]
    write("performance.md", "language", as_markdown(["score", "memory", "time"], cells))


if __name__ == "__main__":
    main()
