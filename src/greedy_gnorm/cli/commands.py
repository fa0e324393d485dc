"""What each command does and shows; imported when a command runs, so that help needs no torch."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from greedy_gnorm.api import compare as run_compare
from greedy_gnorm.api import compress as run_compress
from greedy_gnorm.api import prune as run_prune
from greedy_gnorm.api import score as run_score
from greedy_gnorm.api import take_step
from greedy_gnorm.cli import console, terminal
from greedy_gnorm.cli.interrupts import Interrupts
from greedy_gnorm.cli.listing import options_text
from greedy_gnorm.cli.progress import Progress
from greedy_gnorm.cli.steps import PartDisplay, StepDisplay
from greedy_gnorm.deployment.export import export as run_export
from greedy_gnorm.errors import GnormError, Interrupted
from greedy_gnorm.model.checkpoint import load_config, skeleton
from greedy_gnorm.model.groups import choose_group_queries, set_group_queries
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.processes import broadcast, is_first
from greedy_gnorm.records.files import write_json, writing_to
from greedy_gnorm.records.kept import KEPT_FILE
from greedy_gnorm.report.compression import head_places, scores_of_heads
from greedy_gnorm.report.names import data_name, folder_name
from greedy_gnorm.report.outcome import FIGURES, redraw_figures
from greedy_gnorm.report.parameters import parameter_table
from greedy_gnorm.report.tables import as_csv, as_markdown, comparison_tables
from greedy_gnorm.report.writer import LiveReport, write_report
from greedy_gnorm.scores import score_with
from greedy_gnorm.units import Step, unit_name, vectors_to_json

RUNS: dict[str, tuple[Callable[..., Any], str]] = {
    "prune": (run_prune, "pruned"),
    "compress": (run_compress, "compressed"),
}
"""The commands that make a run: their functions, and what the result is called."""


def perform(
    command: str,
    model: str,
    data: str,
    out: Path | None,
    settings: dict[str, Any],
    *,
    eval_data: str | None = None,
    resume: bool,
    live: bool = False,
    quiet: bool,
    as_json: bool,
) -> None:
    """A run with its progress shown, which ends with its journal complete when it is interrupted."""
    function, result = RUNS[command]
    out = out or _free_folder(Path("runs"), f"{Path(model).name}-{result}", resume=resume)
    quiet = quiet or not is_first()
    with ExitStack() as stack:
        stack.enter_context(console.messages(quiet=quiet))
        display = StepDisplay(out, stack.enter_context(Progress(quiet=quiet)))
        page = stack.enter_context(LiveReport(out, on=live and is_first()))
        interrupts = stack.enter_context(Interrupts())

        def on_step(*step: Any) -> None:
            display(*step)
            page(*step)
            interrupts.check()

        try:
            run = function(model, data, eval_data=eval_data, out=out, resume=resume, on_step=on_step, **settings)
        except KeyboardInterrupt:
            raise Interrupted(out / "journal.jsonl") from None
    _show(run, out, quiet=quiet, as_json=as_json)


def take(run: Path, step: int | str, out: Path | None, options: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    if not is_first():
        return
    out = out or _free_folder(
        run.parent, f"{run.name}-{f'step-{step}' if isinstance(step, int) else step}", resume=False
    )
    with console.messages(quiet=quiet), Progress(quiet=quiet):
        taken = take_step(run, step, out=out, **options)
    _show(taken, out, quiet=quiet, as_json=as_json)


def _show(run: Any, out: Path, *, quiet: bool, as_json: bool) -> None:
    if not is_first():
        return
    if as_json:
        terminal.show_json({**run.summary(), "out": str(out)})
    else:
        console.show_run(run, out, drawn=not quiet)


def report(folders: Sequence[Path], out: Path | None, *, dpi: int | None, show: bool) -> None:
    if not is_first():
        return
    with Progress():
        path = write_report(folders, out)
        if dpi is not None:
            for folder in folders:
                redraw_figures(folder, dpi)
    if dpi is not None:
        for folder in folders:
            terminal.out.print(f"Figures  {folder / FIGURES}", highlight=False, soft_wrap=True)
    terminal.out.print(f"Report   {path}", highlight=False, soft_wrap=True)
    if show and not webbrowser.open(path.resolve().as_uri()):
        raise GnormError(f"No browser could be started. Open this file yourself: {path.resolve()}")


def score(
    model: str,
    data: str,
    out: Path | None,
    name: str,
    settings: dict[str, Any],
    *,
    resume: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    out = out or _free_folder(Path("runs"), f"{Path(model).name}-scores", resume=resume)
    silent = quiet or not is_first()
    with console.messages(quiet=silent), Progress(quiet=silent), Interrupts():
        try:
            scores = run_score(model, data, score=name, out=out, resume=resume, **settings)
        except KeyboardInterrupt:
            raise Interrupted(out / KEPT_FILE) from None
    if not is_first():
        return
    config = load_config(model, trust_remote_code=settings["trust_remote_code"])
    set_group_queries(config, choose_group_queries(config, settings["group_queries"]))
    sites = find_sites(skeleton(config), settings["units"] or "heads").infos
    content = {
        "model": model,
        "data": data,
        "score": name,
        "settings": settings,
        "values": vectors_to_json(scores.vectors),
        "parts": {part: vectors_to_json(vectors) for part, vectors in scores.parts.items()},
        "order": [list(head) for head in scores.order()],
    }
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "scores.json", content)
        if attention := [sites[place] for place in head_places(sites)]:
            from greedy_gnorm.report import figures  # loads matplotlib

            heat_map = figures.heat_map(scores_of_heads(scores, sites), name, attention)
            rows = f"up to {settings['samples']:,} rows" if settings["samples"] else "all rows"
            figures.save(heat_map, out / "scores", f"{folder_name(model)} on {data_name(data)}, {rows}")
    if as_json:
        terminal.show_json(content)
    elif not quiet:
        for word, order in (("Lowest", scores.order()), ("Highest", scores.order(highest_first=True))):
            heads = ", ".join(unit_name(sites, head) for head in order[:5])
            terminal.out.print(f"{word} scores: {heads}", highlight=False)
        if "half_width" in scores.parts:
            within = float(np.nanmean(np.concatenate(list(scores.parts["half_width"]))))
            options = options_text(score_with(name, settings["score_options"]))
            terminal.out.print(f"Scores to within ± {within:.4f} on average (95 %{options})", highlight=False)
        drawn = f", heat map {out / 'scores.png'}" if attention else ""
        terminal.out.print(f"Scores {out / 'scores.json'}{drawn}", highlight=False, soft_wrap=True)


def compare(model: str, data: str, out: Path | None, settings: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    out = out or _free_folder(Path("runs"), f"{Path(model).name}-compared", resume=settings["resume"])
    out = Path(broadcast(lambda: str(out)))  # as on the first host
    with ExitStack() as stack:
        stack.enter_context(console.messages(quiet=quiet or not is_first()))
        display = PartDisplay(out, stack.enter_context(Progress(quiet=quiet)))  # of every process: each has own walks
        interrupts = stack.enter_context(Interrupts())

        def show(part: object, step: Step, gone: int, limit: int) -> None:
            display(part, step, gone, limit)
            interrupts.check()

        try:
            result = run_compare(model, data, out=out, on_step=show, **settings)
        except KeyboardInterrupt:
            raise Interrupted(out / "experiment.json") from None
    if not is_first():
        return
    if as_json:
        rows = {
            name: [dict(zip(columns, row, strict=True)) for row in cells]
            for name, (columns, cells) in comparison_tables(result).items()
        }
        terminal.show_json({**rows, "out": str(out)})
        return
    terminal.show_table(*result.overview)
    if not quiet:
        console.draw_comparison(result)
    console.show_files(out)


def table(model: str, removed: int | None, form: str, *, trust_remote_code: bool) -> None:
    if not is_first():
        return
    with console.messages(quiet=True):
        parameters = parameter_table(model, removed, trust_remote_code=trust_remote_code)
    if form == "table":
        terminal.show_table(parameters.columns, parameters.cells)
        if parameters.quality is not None:
            terminal.say("The last row is on the rows that the step was chosen on. gnorm eval compares both on others.")
    else:
        print((as_csv if form == "csv" else as_markdown)(parameters.columns, parameters.cells), end="")


def export(folder: Path, options: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    if not is_first():
        return
    with console.messages(quiet=quiet), Progress(quiet=quiet):
        done = run_export(folder, **options)
    if as_json:
        terminal.show_json({**done.report, "out": str(done.folder)})
    elif not quiet:
        console.show_export(done)


def demo(out: Path | None, settings: dict[str, Any], *, resume: bool, quiet: bool, as_json: bool) -> None:
    from greedy_gnorm.demo import prepare  # it loads what trains a tokenizer, and only this needs it

    folder = out or _free_folder(Path("runs"), "demo", resume=resume)
    with console.messages(quiet=quiet):
        try:
            assets = prepare(seed=settings["seed"], say=terminal.silent if quiet else terminal.say)
        except OSError as error:
            raise GnormError(f"Can't save the demo's model: {error}.") from error
    inputs = str(assets.model), str(assets.data)
    perform("prune", *inputs, folder, settings, resume=resume, quiet=quiet, as_json=as_json)
    if as_json:
        return
    smaller = folder.with_name(f"{folder.name}-compressed")
    if not quiet:
        terminal.say(f"\nThe same model with heads and neurons removed, and what is left fitted ({smaller}):")
    settings = {"macs": DEMO_MACS, "rounds": DEMO_ROUNDS, "seed": settings["seed"]}
    again = resume and smaller.exists()
    perform("compress", *inputs, smaller, settings, resume=again, quiet=quiet, as_json=False)
    console.show_next_steps(folder, smaller)


DEMO_MACS, DEMO_ROUNDS = 0.4, 8
"""What the demo compresses its model to: the share of multiplications, and in how many rounds."""


def _free_folder(parent: Path, name: str, *, resume: bool) -> Path:
    """The first of name, name-2, name-3, ... that does not exist yet; to resume, the last that does."""
    names = [name, *(f"{name}-{number}" for number in range(2, 10_000))]
    free = next(place for place, each in enumerate(names) if not (parent / each).exists())
    return parent / names[max(free - 1, 0) if resume else free]
