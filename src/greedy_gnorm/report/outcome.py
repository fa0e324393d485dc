"""The files that a run or a comparison writes at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from greedy_gnorm.comparison.analysis import Comparison, solutions_table, summary_table
from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import save
from greedy_gnorm.model.surgery import dense
from greedy_gnorm.pruning.run import Run, sites_of
from greedy_gnorm.records.files import replace_folder, write_text
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.report import comparison_figures, figures
from greedy_gnorm.report.card import model_card
from greedy_gnorm.report.tables import (
    LATENCY_COLUMNS,
    SizeTable,
    as_csv,
    as_markdown,
    latency_cells,
    stored_precision,
)
from greedy_gnorm.report.writer import write_report
from greedy_gnorm.units import Matrix, SiteInfo, Step, Unit, unit_name

FORMATS = ("pruned", "dense")
"""How a model is saved: without the removed units, or in the original shapes with zeros for them."""


def check_format(form: str) -> None:
    """Refuse an unknown format of a saved model."""
    if form not in FORMATS:
        raise GnormError(f"Unknown format {form!r}. Choose from: {', '.join(FORMATS)}.")


def write_outcome(run: Run, journal: Journal, form: str = FORMATS[0]) -> None:
    """The model, tables, figures and the page into the run's folder, and the result into run.json."""
    model, sites = dense(run.model) if form == "dense" else run.model, sites_of(run.header)
    with replace_folder(journal.folder / "model") as folder:
        save(model, run.tokenizer, folder)
        write_text(folder / "README.md", model_card(run, form))
    with replace_folder(journal.folder / "tables") as tables:
        write_text(tables / "curve.csv", curve_csv(run.steps, sites))
        parameters = parameter_table(run)
        write_text(tables / "parameters.csv", as_csv(parameters.columns, parameters.cells))
        write_text(tables / "parameters.md", as_markdown(parameters.columns, parameters.cells))
        if run.latencies:
            times = [latency_cells(latency) for latency in run.latencies]
            write_text(tables / "latency.csv", as_csv(LATENCY_COLUMNS, times))
            write_text(tables / "latency.md", as_markdown(LATENCY_COLUMNS, times))
    with replace_folder(journal.folder / "figures") as folder:
        figures.save(figures.curve(run.steps, run.solution.step, run.measure), folder / "curve")
        figures.save(figures.mask(run.removed, run.header["model"]), folder / "mask")
        scored = next((step.scores for step in run.steps if step.scores is not None), None)
        if scored is not None:
            title = f"Scores before pruning ({run.header['config']['method']})"
            figures.save(figures.heat_map(scored, title, sites), folder / "scores")
    journal.finish(run.summary())
    write_report([journal.folder])


def parameter_table(run: Run) -> SizeTable:
    """The paper's parameter table for a run's model and solution, in the precision that the model is stored in."""
    before, after = (run.measure.of(step) for step in (run.steps[0], run.solution))
    precision = stored_precision(run.header, run.steps[0])
    return SizeTable.of(*run.counts, precision, (run.measure.name, before, after))


def write_comparison(
    comparison: Comparison, folder: Path, gradient_changes: tuple[Unit, Sequence[Matrix]] | None
) -> None:
    """Tables, figures and the page of a comparison; with how removing one head changes gradients, where given."""
    with replace_folder(folder / "tables") as tables:
        for name, (names, cells) in (
            ("comparison", summary_table(comparison)),
            ("solutions", solutions_table(comparison)),
        ):
            write_text(tables / f"{name}.csv", as_csv(names, cells))
            write_text(tables / f"{name}.md", as_markdown(names, cells))
    with replace_folder(folder / "figures") as pictures:
        comparison_figures.write_all(comparison, pictures)
        if gradient_changes is not None:
            head, changes = gradient_changes
            figure = comparison_figures.gradient_change_figure(changes, head, sites_of(comparison.header))
            figures.save(figure, pictures / "gradient-change")
    write_report([folder])


def curve_csv(steps: Sequence[Step], sites: Sequence[SiteInfo]) -> str:
    """Heads removed, quality and size, one line for each step."""
    names = list(steps[0].quality)
    cells, gone = [], 0
    for step in steps:
        gone += len(step.removed)
        heads = " ".join(unit_name(sites, head) for head in step.removed)
        cells.append(
            [str(gone), heads, *(repr(step.quality[name]) for name in names), str(step.parameters), str(step.bytes)]
        )
    return as_csv(["heads_removed", "removed", *names, "parameters", "bytes"], cells)
