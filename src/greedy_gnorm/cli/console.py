"""The results that a person sees in the terminal: summaries, tables, drawings; and the notes on the way there."""

from __future__ import annotations

import logging
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.logging import RichHandler

from greedy_gnorm.cli import sketch
from greedy_gnorm.cli.terminal import duration, err, out, show_table
from greedy_gnorm.comparison.analysis import LEGEND, Comparison, solution
from greedy_gnorm.deployment.export import Exported
from greedy_gnorm.passes.processes import is_first
from greedy_gnorm.pruning.choices import change_of
from greedy_gnorm.pruning.curves import curve
from greedy_gnorm.pruning.methods import GREEDY
from greedy_gnorm.pruning.run import Run
from greedy_gnorm.report.compression import cost_part, is_compression, kept_units, work_curve
from greedy_gnorm.report.tables import (
    FLOAT32,
    LATENCY_COLUMNS,
    choices_table,
    distilled_text,
    in_words,
    latency_cells,
    megabytes,
    stored_precision,
    take_option,
    test_table,
    with_interval,
)
from greedy_gnorm.report.writer import NAME
from greedy_gnorm.units import Latency, Measure, Step, Unit, removed_by


@contextmanager
def messages(*, quiet: bool) -> Iterator[None]:
    """Notes and warnings of greedy-gnorm as plain lines on stderr; other libraries are silenced."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    logging_of_transformers: Any = transformers.utils.logging
    logging_of_transformers.disable_progress_bar()
    logging_of_transformers.set_verbosity_error()
    handler = RichHandler(console=err, show_time=False, show_level=False, show_path=False, markup=False)
    log = logging.getLogger("greedy_gnorm")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    show = warnings.showwarning
    warnings.showwarning = _show_warning
    try:
        yield
    finally:
        warnings.showwarning = show
        log.removeHandler(handler)
        log.setLevel(level)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    if issubclass(category, UserWarning) and is_first():
        err.print(f"Warning: {message}", style="yellow", soft_wrap=True)


def show_run(run: Run, folder: Path, *, drawn: bool = True) -> None:
    """What was removed, quality and size before and after, the files; with a drawing if `drawn`."""
    summary = run.summary()
    out.print()
    counts = [(word, summary[word]) for word in ("heads", "neurons") if word in summary]
    gone = " and ".join(
        f"{each['removed']:,} of {each['total']:,} {word} ({each['removed'] / each['total']:.0%})"
        for word, each in counts
    )
    out.print(f"Removed {gone}.", highlight=False)
    chosen, last = run.solution.step, run.steps[-1].step
    out.print(f"Chose step {chosen} of {last}: {run.why}.", highlight=False, soft_wrap=True)
    if "taken" not in run.header:
        out.print(f"The run ended after step {last}: {run.reason}.", highlight=False, soft_wrap=True)
    if not run.removed:
        out.print("No step was better than keeping every head: the saved model is the original one.", highlight=False)
    if run.distilled is not None:
        out.print(distilled_text(run.distilled, run.measure), highlight=False, soft_wrap=True)
    show_table(*quality_table(run))
    before, after = summary["parameters"]
    cells = [["parameters", f"{before:,}", f"{after:,}", f"{after / before - 1:+.1%}"]]
    before, after = summary["bytes"]
    precision = stored_precision(run.header, run.steps[0])
    cells.append([f"MB ({precision.name})", megabytes(before), megabytes(after), f"{after / before - 1:+.1%}"])
    if "multiplications" in summary:
        before, after = summary["multiplications"]
        cells.append(["multiplications", "100%", f"{after / before:.1%}", f"{before / after:.2f} times fewer"])
    show_table(["", "before", "after", "change"], cells)
    if run.latencies:
        show_table(LATENCY_COLUMNS, [latency_cells(latency) for latency in run.latencies])
        timed = run.header["config"].get("dtype", "auto")
        timed = FLOAT32.name if timed == "auto" else timed  # as runs compute, whatever the weights are stored in
        if precision.bytes < FLOAT32.bytes and timed != precision.name:
            out.print(
                f"Timed in {timed}. The saved model loads in {precision.name}, as the original does; on a CPU, call "
                f"model.float() to run it at this speed.",
                highlight=False,
                soft_wrap=True,
            )
    if drawn:
        draw_run(run)
    if run.offered:
        rows = run.header["data"]["evaluation"]["rows"]
        out.print(
            f"Choices, by {in_words(run.measure.name)} on the {rows:,} rows that a step is chosen on:", highlight=False
        )
        show_table(*choices_table(run.offered, run.steps[0], run.measure))
        take = f"gnorm prune --from-run {shlex.quote(str(folder))} {take_option(run.offered[0])} --out OUT"
        out.print(f"To take one: {take}", highlight=False, soft_wrap=True)
    count = "1 step" if summary["steps"] == 1 else f"{summary['steps']} steps"
    out.print(f"{count} in {duration(summary['seconds'])}.", highlight=False)
    curve_files = folder / "figures" / "curve.png", folder / "tables" / "curve.csv"
    for name, place in (
        ("Model", f"{folder / 'model'}     (gg.load({str(folder / 'model')!r}))"),
        ("Journal", f"{folder / 'journal.jsonl'}, {folder / 'run.json'}"),
        ("Curve", ", ".join(str(path) for path in curve_files if path.exists())),
        ("Report", f"{folder / NAME}     (gnorm report {shlex.quote(str(folder))} --open)"),
    ):
        out.print(f"{name:9}{place}", highlight=False, soft_wrap=True)


def quality_table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Quality before and after: on test rows, or on the rows that the step was chosen on if there are no others."""
    if run.test is not None:
        return test_table(run.test, run.measure)
    rows = run.header["data"]["evaluation"]["rows"]
    sides = [run.steps[0], run.solution]
    cells = []
    for name in run.steps[0].quality:
        leads = name == run.measure.name
        before, after = (step.quality[name] for step in sides)
        intervals = [step.interval if leads else None for step in sides]
        change = change_of(sides, 1, rows) if leads else None
        cells.append(
            [name, *map(with_interval, (before, after), intervals), with_interval(after - before, change, "+")]
        )
    return [f"{rows:,} evaluation rows (95 % interval)", "before", "after", "change"], cells


def draw_run(run: Run) -> None:
    """The mask of the solution, or the units that it has left, and the curve, in characters."""
    plain, compressed = _is_plain(), is_compression(run.header)
    if compressed:
        _draw([*sketch.bars(kept_units(run.header, run.steps), run.solution.step, plain=plain), ""])
    else:
        draw_mask(run.header["model"], run.removed)
    points = _work_points(run.steps, run.measure) if compressed else curve(run.steps, run.measure)
    if len(points) > 1:
        _draw([f"  {line}" for line in sketch.curve(points, plain=plain)])
        mark = " " * sketch.place(points, run.solution.step) + "^ solution"
        along = _work_along([run.steps], points) if compressed else f"after 0 to {points[-1][0]:.0f} heads removed"
        caption = f"{_axis(run.measure, sketch.axis(points))}, {along}"
        _draw([f"  {mark}", f"  {caption}", ""])


def draw_comparison(comparison: Comparison) -> None:
    """The mask at the knee of Greedy-Gnorm or the first method, and one curve for each method, in characters.

    Walks towards a budget have curves only.
    """
    if not comparison.joint:
        name = GREEDY if GREEDY in comparison.curves else next(iter(comparison.curves))
        walk = comparison.curves[name][0]
        _draw([f"{name} at its knee:"])
        draw_mask(comparison.header["model"], removed_by(walk[: solution(walk, comparison.measure).step + 1]))
    points_of = _work_points if comparison.joint else curve
    curves = {method: points_of(walks[0], comparison.measure) for method, walks in comparison.curves.items()}
    longest, between = max(map(len, curves)), sketch.axis(*curves.values())
    for method, points in curves.items():
        (line,) = sketch.curve(points, between, height=1, plain=_is_plain())
        _draw([f"{method:{longest}}  {line}"])
    along = f"after 0 to {comparison.heads} heads removed"
    if comparison.joint:
        along = _work_along([walks[0] for walks in comparison.curves.values()], next(iter(curves.values())))
    caption = f"{_axis(comparison.measure, between)}, {along}"
    _draw([f"The first run of each method: {caption}", ""])


def _work_points(steps: Sequence[Step], measure: Measure) -> list[tuple[float, float]]:
    """(per cent of the cost saved, quality), which is drawn from left to right."""
    return [(100 - left, quality) for left, quality in work_curve(steps, measure, cost_part([steps]))]


def _work_along(walks: Sequence[Sequence[Step]], points: sketch.Points) -> str:
    return f"from 100 % to {100 - points[-1][0]:.0f} % of the {cost_part(walks)}"


def _axis(measure: Measure, between: sketch.Axis) -> str:
    """What the height of a curve means."""
    direction = "" if measure.higher_is_better else ", lower is better"
    return f"{measure.name.replace('_', ' ')} ({between[0]:.4g} to {between[1]:.4g}{direction})"


def draw_mask(model: Mapping[str, Any], removed: Sequence[Unit]) -> None:
    """The heads that are left, in characters."""
    kept, gone = ("#", ".") if _is_plain() else ("■", "·")
    _draw([*sketch.mask(model, removed, plain=_is_plain()), f"     layers x heads: {kept} kept, {gone} removed", ""])


def _draw(lines: Sequence[str]) -> None:
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)


def _is_plain() -> bool:
    return not out.encoding.lower().startswith("utf")


def show_export(done: Exported) -> None:
    """The files, the difference from torch, the speed, and the quality in 8 bits."""
    report, small = done.report, done.report.get("int8")
    difference = report["largest difference to torch"]
    out.print(f"Largest difference from torch's outputs: {difference:.2e}", highlight=False)
    latencies = [*report["latency"], *(small["latency"] if small else [])]
    columns = [*LATENCY_COLUMNS[:3], "ms first", "ms second", "Speed-up"]
    show_table(columns, [latency_cells(Latency.from_json(each))[: len(columns)] for each in latencies])
    files = {report["file"]: report["bytes"], **({small["file"]: small["bytes"]} if small else {})}
    if small:
        qualities = "  ".join(f"{name} {value:.4f}" for name, value in small["quality"].items())
        out.print(f"Quality on {small['rows']} rows: {qualities}", highlight=False)
    for name, size in files.items():
        out.print(f"{done.folder / name}  {megabytes(size)} MB", highlight=False, soft_wrap=True)


def show_next_steps(pruned: Path, compressed: Path) -> None:
    """After the demo: how to do the same with another model."""
    out.print("\nThe same with your own model and labelled text:")
    for command in ("prune MODEL --data rows.csv", "compress MODEL --data rows.csv"):
        out.print(f"  gnorm {command}", highlight=False, soft_wrap=True)
    for folder in (pruned, compressed):
        out.print(f"The parameters of {folder}: gnorm table {folder}", highlight=False, soft_wrap=True)


def show_files(folder: Path) -> None:
    """The files of a comparison."""
    out.print(f"{LEGEND} The tables have more columns.", highlight=False)
    for name, place in (("Tables", "tables"), ("Figures", "figures"), ("Report", NAME)):
        out.print(f"{name:9}{folder / place}", highlight=False, soft_wrap=True)
