"""What scoring a language model costs: peak memory and time against running it, on one row of 512 tokens.

    python benchmarks/language.py FOLDER [--tokens 512] [--units heads] [--objective logit-norm]

Each peak is that of a process of its own, on one thread; times are those of the processor, the two in turn.
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

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.modes import evaluating
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.task import task_of

PARTS = ("run", "score")


def works(folder: str, tokens: int, units: str, objective: str) -> dict[str, Callable[[], Any]]:
    """Running the model on a row, and scoring its units on that row."""
    torch.set_num_threads(1)
    model = gg.load(folder, dtype=torch.float32)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=chance)
    batches = ready_batches([{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    batches = replace(batches, items=tuple(map(task_of(model).completed, batches)))
    sites = find_sites(model, units)

    def run() -> None:
        with torch.inference_mode(), evaluating(model):
            model(**batches.items[0].inputs)

    return {"run": run, "score": lambda: gradient_norms(sites, batches, OBJECTIVES[objective])}


def peak(options: list[str], part: str) -> float:
    """The peak of the memory of a process that does one of them, in MB."""
    command = [sys.executable, __file__, *options, "--only", part]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def processor_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--units", default="heads")
    parser.add_argument("--objective", default="logit-norm")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=PARTS)
    given = parser.parse_args()
    shape = (given.folder, given.tokens, given.units, given.objective)
    if given.only is not None:
        works(*shape)[given.only]()
        print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
        return
    peaks = {part: peak(sys.argv[1:], part) for part in PARTS}
    both = works(*shape)
    for work in both.values():
        work()
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(given.repeats):
        for part in PARTS:
            times[part].append(processor_seconds(both[part]))
    medians = {part: statistics.median(found) for part, found in times.items()}
    found = {
        "peak MB": {part: round(value) for part, value in peaks.items()},
        "memory ratio": round(peaks["score"] / peaks["run"], 2),
        "seconds": {part: round(value, 3) for part, value in medians.items()},
        "time ratio": round(medians["score"] / medians["run"], 2),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
