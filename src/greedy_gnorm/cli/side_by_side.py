"""What `gnorm eval` and `gnorm bench` do and show: the unpruned and the pruned model side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from greedy_gnorm.cli import console, terminal
from greedy_gnorm.cli.progress import Progress
from greedy_gnorm.deployment.bench import Bench
from greedy_gnorm.deployment.bench import bench as run_bench
from greedy_gnorm.deployment.evaluation import Evaluation
from greedy_gnorm.deployment.evaluation import evaluate as run_evaluate
from greedy_gnorm.passes.processes import is_first, single_process
from greedy_gnorm.report.bench import ABOUT
from greedy_gnorm.report.evaluation import (
    SIDES,
    changed_table,
    changed_title,
    class_table,
    confusion_table,
    measure_table,
)
from greedy_gnorm.report.tables import LATENCY_COLUMNS, latency_cells

MOST_CLASSES = 12
"""Classes of a confusion matrix that is shown in the terminal."""
LONGEST_TEXT = 100
"""Characters of a text that is shown in the terminal."""


def evaluate(
    folder: Path, data: str, settings: dict[str, Any], *, out: Path | None, quiet: bool, as_json: bool
) -> None:
    if not is_first():
        return
    with console.messages(quiet=quiet), Progress(quiet=quiet), single_process():
        evaluation = run_evaluate(folder, data, out=out, **settings)
    if as_json:
        terminal.show_json({**evaluation.to_json(), "out": None if out is None else str(out)})
        return
    _show_evaluation(evaluation, quiet=quiet)
    if out is not None:
        _say(f"Files    {out}")


def _show_evaluation(evaluation: Evaluation, *, quiet: bool) -> None:
    """The measures; unless quiet, also the classes, what is confused and the predictions that changed."""
    content = evaluation.to_json()
    terminal.show_table(*measure_table(content))
    if quiet:
        return
    if evaluation.per_class:
        terminal.show_table(*class_table(content))
    if evaluation.confusion is None:
        return
    if len(evaluation.classes) <= MOST_CLASSES:
        for side in SIDES:
            terminal.show_table(*confusion_table(content, side))
    else:
        _say(f"The confusion of {len(evaluation.classes)} classes is too large to show: use --json or --out.")
    _say(changed_title(content))
    if evaluation.changed:
        columns, cells = changed_table(content)
        terminal.show_table(columns, [[_shortened(row[0]), *row[1:]] for row in cells], numbers=False)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_TEXT else f"{line[: LONGEST_TEXT - 4]} ..."


def bench(folder: Path, options: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    if not is_first():
        return
    with console.messages(quiet=quiet), Progress(quiet=quiet), single_process():
        result = run_bench(folder, **options)
    if as_json:
        terminal.show_json({**result.to_json(), "out": str(result.folder)})
    else:
        _show_bench(result)


def _show_bench(result: Bench) -> None:
    terminal.show_table(LATENCY_COLUMNS, [latency_cells(latency) for latency in result.latencies])
    _say(ABOUT)
    for note in result.left_out:
        _say(f"Left out: {note}")
    assert result.folder is not None
    _say(f"Files    {result.folder / 'bench.md'}, {result.folder / 'bench.csv'}, {result.folder / 'bench.png'}")


def _say(text: str) -> None:
    terminal.out.print(text, highlight=False, soft_wrap=True)
