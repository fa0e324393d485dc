"""What the records of long runs take: python benchmarks/records.py writes to docs/performance.md.

Journals are made up: the time is that of reading them and of writing the page, the sizes are those of the files.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import write

from greedy_gnorm.records.journal import Journal
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.report.writer import write_report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from journals import header, walk

RUNS = {
    "BERT-base, 144 heads": (12, 12),
    "RoBERTa-large, 384 heads": (24, 16),
    "a decoder of 7B, 999 of 1,024 heads": (32, 32),
}


def processor_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def line(name: str, layers: int, heads: int, folder: Path) -> list[str]:
    """A run that removes heads one by one, as far as made-up journals go."""
    walk(folder, header(layers, heads), steps=min(layers * heads, 999))
    reading = processor_seconds(lambda: Journal.read(folder))
    writing = processor_seconds(lambda: write_report([folder]))
    sizes = [(folder / file).stat().st_size / 1e6 for file in ("journal.jsonl", "report.html")]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [name, f"{sizes[0]:.1f}", f"{reading:.1f}", f"{sizes[1]:.1f}", f"{writing:.1f}", f"{peak:.0f}"]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        cells = [line(name, *shape, Path(place) / str(number)) for number, (name, shape) in enumerate(RUNS.items())]
    columns = ["run", "journal, MB", "read, s", "page, MB", "page written, s", "memory of the process so far, MB"]
    write("performance.md", "records", as_markdown(columns, cells))


if __name__ == "__main__":
    main()
