"""The files that a run or a comparison writes at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from greedy_gnorm.comparison.analysis import Comparison, read_comparison
from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.model.checkpoint import FORMATS, save
from greedy_gnorm.model.surgery import as_plain, dense
from greedy_gnorm.phases import phase
from greedy_gnorm.pruning.run import Run, sites_of
from greedy_gnorm.records.files import locked, replace_folder, write_text, writing_to
from greedy_gnorm.records.journal import EXPERIMENT_FILE, Journal
from greedy_gnorm.records.predictions import write_predictions
from greedy_gnorm.report import comparison_figures, figures
from greedy_gnorm.report.card import model_card
from greedy_gnorm.report.compression import head_places, is_compression, kept_units, scores_of_heads
from greedy_gnorm.report.looks import FEWEST_POINTS, colour_of
from greedy_gnorm.report.names import about
from greedy_gnorm.report.picture import Figure
from greedy_gnorm.report.tables import (
    LATENCY_COLUMNS,
    SizeTable,
    as_csv,
    as_markdown,
    choices_table,
    comparison_tables,
    latency_cells,
    stored_precision,
    test_table,
)
from greedy_gnorm.report.writer import write_report
from greedy_gnorm.tasks.task import measure_of
from greedy_gnorm.units import Cost, Matrix, SiteInfo, Step, Unit, removed_by, unit_name

FIGURES = "figures"


def write_outcome(run: Run, journal: Journal, form: str = FORMATS[0]) -> None:
    """The model, tables, figures and the page into the run's folder, and the result into run.json."""
    model, form = _in_form(run, form)
    sites = sites_of(run.header)
    with phase("Saving the model"), replace_folder(journal.folder / "model") as folder:
        save(model, run.tokenizer, folder)
        write_text(folder / "README.md", model_card(run, form))
    with replace_folder(journal.folder / "tables") as tables:
        compressed = is_compression(run.header)
        write_text(tables / "curve.csv", round_csv(run) if compressed else curve_csv(run.steps, sites))
        for name, (columns, cells) in _tables(run):
            write_text(tables / f"{name}.csv", as_csv(columns, cells))
            write_text(tables / f"{name}.md", as_markdown(columns, cells))
    with phase("Drawing figures"), replace_folder(journal.folder / FIGURES) as folder:
        for name, figure in _figures(run.header, run.steps, run.solution.step):
            figures.save(figure, folder / name, about(run.header))
    if run.predictions is not None:
        write_predictions(journal.folder, run.predictions)
    journal.finish(run.summary())
    write_report([journal.folder])


def _in_form(run: Run, form: str) -> tuple[Any, str]:
    """The model to save and its form: a uniform one is an ordinary model of its class where the class allows it."""
    if form == "dense":
        return dense(run.model), form
    plain = as_plain(run.model) if run.header["config"].get("uniform") else None
    return (run.model, form) if plain is None else (plain, "plain")


def _tables(run: Run) -> Iterator[tuple[str, tuple[Sequence[str], Sequence[Sequence[str]]]]]:
    """The tables of a run by name, each as columns and cells."""
    parameters = parameter_table(run)
    yield "parameters", (parameters.columns, parameters.cells)
    if run.latencies:
        yield "latency", (LATENCY_COLUMNS, [latency_cells(latency) for latency in run.latencies])
    if run.test is not None:
        yield "test", test_table(run.test, run.measure)
    if run.offered:
        yield "choices", choices_table(run.offered, run.steps[0], run.measure)


def _figures(header: Mapping[str, Any], steps: Sequence[Step], solution: int) -> Iterator[tuple[str, Figure]]:
    """The figures of a run by name; where neurons are removed too, units are counted and only heads have scores."""
    sites, measure, method = sites_of(header), measure_of(header), header["config"]["method"]
    compressed, heads = is_compression(header), [sites[place] for place in head_places(sites)]
    if len(steps) >= FEWEST_POINTS:
        draw = figures.work_figure if compressed else figures.curve
        yield "curve", draw(steps, solution, measure, colour_of(method))
    if compressed:
        yield "kept", figures.kept(kept_units(header, steps), solution)
    if len(heads) == len(sites):
        yield "mask", figures.mask(removed_by(steps[: solution + 1]), header["model"])
    scored = next((step.scores for step in steps if step.scores is not None), None)
    if scored is not None and heads:
        yield "scores", figures.heat_map(scores_of_heads(scored, sites), f"Scores before pruning ({method})", heads)


def redraw_figures(folder: Path, dpi: int) -> None:
    """Draw the figures of a run or a comparison again from its record, in another resolution."""
    place = folder / FIGURES
    if (folder / EXPERIMENT_FILE).exists():
        comparison = read_comparison(folder)
        with _figures_folder(folder):
            comparison_figures.write_all(comparison, place, dpi)
        return
    journal = Journal.read(folder)
    if "result" not in journal.header:
        raise RunFolderError(f"The run in {folder} is not finished, so it has no figures: continue it with --resume.")
    with _figures_folder(folder):
        for name, figure in _figures(journal.header, journal.steps, int(journal.header["result"]["solution"])):
            figures.save(figure, place / name, about(journal.header), dpi)


@contextmanager
def _figures_folder(folder: Path) -> Iterator[None]:
    """Lock a folder while its figures are drawn again; links in it are refused."""
    with writing_to(folder), locked(folder):
        (folder / FIGURES).mkdir(exist_ok=True)
        yield


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
        for name, (names, cells) in comparison_tables(comparison).items():
            write_text(tables / f"{name}.csv", as_csv(names, cells))
            write_text(tables / f"{name}.md", as_markdown(names, cells))
    with phase("Drawing figures"), replace_folder(folder / FIGURES) as pictures:
        comparison_figures.write_all(comparison, pictures)
        if gradient_changes is not None:
            head, changes = gradient_changes
            figure = comparison_figures.gradient_change_figure(changes, head, sites_of(comparison.header))
            figures.save(figure, pictures / "gradient-change", about(comparison.header))
    write_report([folder])


def round_csv(run: Run) -> str:
    """Units removed by kind, quality and cost, one line for each step of a run towards a budget."""
    kinds, names = kept_units(run.header, run.steps), list(run.steps[0].quality)
    costs = [name for name in Cost.__dataclass_fields__ if getattr(run.steps[0].cost, name) is not None]
    cells = [
        [
            str(step.step),
            *(str(kept.gone(step.step)) for kept in kinds),
            *(repr(step.quality[name]) for name in names),
            *(str(getattr(step.cost, name)) for name in costs),
        ]
        for step in run.steps
    ]
    return as_csv(["step", *(f"{kept.words}_removed" for kept in kinds), *names, *costs], cells)


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
