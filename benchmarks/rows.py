"""What many rows of data cost: python benchmarks/rows.py writes to docs/performance.md.

The demo's classifier and sentences, repeated with a number, as one table, in a process for each size. Batches
of all rows are not what a run makes: by default it scores on 512 rows, and chooses and tests on at most 1,000 each.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (1_000, 10_000, 100_000)
READ, RUN, ALL, FORWARD, MEMORY, MEMORY_ALL = (
    "reading and dividing, s",
    "batches of a run, s",
    "batches of all rows, s",
    "a forward pass over all rows, s",
    "memory for a run, MB",
    "memory for all rows, MB",
)


def write_rows(path: Path, count: int) -> None:
    from greedy_gnorm.demo import corpus

    pairs = corpus()
    with path.open("w", encoding="utf-8") as file:
        for row in range(count):
            text, label = pairs[row % len(pairs)]
            file.write(json.dumps({"text": f"{text} {row}", "label": label}) + "\n")


def _measure_here(count: int) -> dict[str, float]:
    """Processor seconds of each stage, and the memory beyond that of a process with the model alone."""
    import greedy_gnorm as gg
    from greedy_gnorm.data.encoding import encode
    from greedy_gnorm.data.sets import divided_rows
    from greedy_gnorm.data.sources import read_splits
    from greedy_gnorm.data.splits import sampled
    from greedy_gnorm.demo import prepare
    from greedy_gnorm.model.checkpoint import load_tokenizer
    from greedy_gnorm.model.sites import find_sites
    from greedy_gnorm.passes.evaluation import row_statistics
    from greedy_gnorm.settings import Settings
    from greedy_gnorm.tasks.task import task_of

    place = str(prepare().model)
    model, tokenizer, settings = gg.load(place), load_tokenizer(place), Settings()
    task, found = task_of(model), {}
    read_splits([{"text": "a row that loads the library", "label": "en"}])

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        found[name] = time.process_time() - start
        return result

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, count)
        before = _peak()
        pool, validation, test = timed(
            READ, lambda: divided_rows(task, tokenizer, str(path), None, settings, needs_labels=False)
        )
    sets = (sampled(pool, settings.samples, settings.seed), validation, test)
    batches = timed(RUN, lambda: [encode(rows, model, tokenizer, task, settings) for rows in sets if rows])
    found[MEMORY] = _peak() - before
    every = timed(ALL, lambda: encode([*pool, *validation, *(test or [])], model, tokenizer, task, settings))
    found[MEMORY_ALL] = _peak() - before
    timed(FORWARD, lambda: row_statistics(find_sites(model, "heads"), batches[0]))
    found[FORWARD] *= every.rows / batches[0].rows
    return found


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(count: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--here", str(count)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope between the two largest sizes, both on logarithmic scales."""
    return float(np.log(values[-1] / values[-2]) / np.log(sizes[-1] / sizes[-2]))


def main() -> None:
    from pages import write

    from greedy_gnorm.report.tables import as_markdown

    sizes = list(SIZES)
    lines = [measured(count) for count in sizes]
    cells = []
    for name in (READ, RUN, ALL, FORWARD, MEMORY, MEMORY_ALL):
        values = [line[name] for line in lines]
        digits = 0 if "MB" in name else 2
        cells.append([name, *(f"{value:,.{digits}f}" for value in values), f"{exponent(sizes, values):.2f}"])
    columns = ["", *(f"{count:,} rows" for count in sizes), "exponent"]
    write("performance.md", "rows", as_markdown(columns, cells))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(_measure_here(int(sys.argv[2]))))
    else:
        main()
