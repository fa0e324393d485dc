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
from greedy_gnorm.cli import console
from greedy_gnorm.cli.interrupts import Interrupts
from greedy_gnorm.demo import prepare
from greedy_gnorm.deployment.export import export as run_export
from greedy_gnorm.errors import GnormError, Interrupted
from greedy_gnorm.model.checkpoint import load_config, skeleton
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.processes import is_first
from greedy_gnorm.pruning.methods import METHODS
from greedy_gnorm.pruning.rules import RULES
from greedy_gnorm.records.files import write_bytes, write_json, writing_to
from greedy_gnorm.report import figures
from greedy_gnorm.report.compression import head_places, scores_of_heads
from greedy_gnorm.report.parameters import parameter_table
from greedy_gnorm.report.tables import as_csv, as_markdown, comparison_tables
from greedy_gnorm.report.writer import LiveReport, write_report
from greedy_gnorm.scores import SCORES, Score, score_with
from greedy_gnorm.tasks.objectives import OBJECTIVES
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
        display = stack.enter_context(console.StepDisplay(out, quiet=quiet))
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
    with console.messages(quiet=quiet):
        taken = take_step(run, step, out=out, **options)
    _show(taken, out, quiet=quiet, as_json=as_json)


def _show(run: Any, out: Path, *, quiet: bool, as_json: bool) -> None:
    if not is_first():
        return
    if as_json:
        console.show_json({**run.summary(), "out": str(out)})
    else:
        console.show_run(run, out, drawn=not quiet)


def report(folders: Sequence[Path], out: Path | None, *, show: bool) -> None:
    if not is_first():
        return
    path = write_report(folders, out)
    console.out.print(f"Report   {path}", highlight=False, soft_wrap=True)
    if show and not webbrowser.open(path.resolve().as_uri()):
        raise GnormError(f"No browser could be started. Open this file yourself: {path.resolve()}")


def score(model: str, data: str, out: Path, name: str, settings: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    with console.messages(quiet=quiet or not is_first()):
        scores = run_score(model, data, score=name, **settings)
    if not is_first():
        return
    config = load_config(model, trust_remote_code=settings["trust_remote_code"])
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
            heat_map = figures.heat_map(scores_of_heads(scores, sites), name, attention)
            for suffix, picture in figures.pictures(heat_map).items():
                write_bytes(out / f"scores{suffix}", picture)
    if as_json:
        console.show_json(content)
    elif not quiet:
        for word, order in (("Lowest", scores.order()), ("Highest", scores.order(highest_first=True))):
            heads = ", ".join(unit_name(sites, head) for head in order[:5])
            console.out.print(f"{word} scores: {heads}", highlight=False)
        if "half_width" in scores.parts:
            within = float(np.nanmean(np.concatenate(list(scores.parts["half_width"]))))
            options = _options(score_with(name, settings["score_options"]))
            console.out.print(f"Scores to within ± {within:.4f} on average (95 %{options})", highlight=False)
        drawn = f", heat map {out / 'scores.png'}" if attention else ""
        console.out.print(f"Scores {out / 'scores.json'}{drawn}", highlight=False, soft_wrap=True)


def compare(model: str, data: str, out: Path, settings: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    with ExitStack() as stack:
        stack.enter_context(console.messages(quiet=quiet or not is_first()))
        display = stack.enter_context(
            console.PartDisplay(out, quiet=quiet)
        )  # of every process: each has walks of its own
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
    tables = comparison_tables(result)
    if as_json:
        rows = {
            name: [dict(zip(columns, row, strict=True)) for row in cells] for name, (columns, cells) in tables.items()
        }
        console.show_json({**rows, "out": str(out)})
        return
    for columns, cells in tables.values():
        console.show_table(columns, cells)
    if not quiet:
        console.draw_comparison(result)
    console.show_files(out, joint=result.joint)


def table(model: str, removed: int | None, form: str, *, trust_remote_code: bool) -> None:
    if not is_first():
        return
    with console.messages(quiet=True):
        parameters = parameter_table(model, removed, trust_remote_code=trust_remote_code)
    if form == "table":
        console.show_table(parameters.columns, parameters.cells)
    else:
        print((as_csv if form == "csv" else as_markdown)(parameters.columns, parameters.cells), end="")


def export(folder: Path, options: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    if not is_first():
        return
    with console.messages(quiet=quiet):
        done = run_export(folder, **options)
    if as_json:
        console.show_json({**done.report, "out": str(done.folder)})
    elif not quiet:
        console.show_export(done)


def methods(*, as_json: bool) -> None:
    if not is_first():
        return
    rows = [
        {
            "--method": name,
            "score": method.score,
            "removes": "heads" if method.units == "heads" else "heads and neurons",
            "first": "highest" if method.highest_first else "lowest",
            "scores": "every step" if method.recompute else "once",
            "recovery": method.recover,
            "objective": score.objective or "-",
            "labels": "needed" if score.asks_for_labels(OBJECTIVES[score.objective or "logit-norm"]) else "-",
            "cost of scoring": score.cost,
            "paper": score.paper,
        }
        for name in METHODS
        if (method := METHODS[name]) and (score := SCORES[method.score])
    ]
    objectives = {
        name: OBJECTIVES[name].about + (", needs labels" if OBJECTIVES[name].needs_labels else "")
        for name in OBJECTIVES
    }
    scores = {name: f"{SCORES[name].about}{_options(SCORES[name])}" for name in SCORES}
    rules = {RULES[name].form: RULES[name].about for name in RULES}
    if as_json:
        console.show_json({"methods": rows, "scores": scores, "objectives": objectives, "rules": rules})
        return
    console.show_table(list(rows[0]), [list(row.values()) for row in rows], numbers=False)
    for name, column, content in (
        ("score", "what it is (--score-options)", scores),
        ("objective", "number computed for each sentence", objectives),
        ("stop", "when the run ends", rules),
    ):
        cells = [list(row) for row in content.items()]
        console.show_table([f"--{name}", column], cells, numbers=False)


def _options(score: Score) -> str:
    return "".join(f"; {name}={value}" for name, value in score.defaults().items())


def demo(out: Path | None, settings: dict[str, Any], *, resume: bool, quiet: bool, as_json: bool) -> None:
    folder = out or _free_folder(Path("runs"), "demo", resume=resume)
    with console.messages(quiet=quiet):
        try:
            assets = prepare(seed=settings["seed"], say=console.silent if quiet else console.say)
        except OSError as error:
            raise GnormError(f"Can't save the demo's model: {error}.") from error
    inputs = str(assets.model), str(assets.data)
    perform("prune", *inputs, folder, settings, resume=resume, quiet=quiet, as_json=as_json)
    if as_json:
        return
    smaller = folder.with_name(f"{folder.name}-compressed")
    if not quiet:
        console.say(f"\nThe same model with heads and neurons removed, and what is left fitted ({smaller}):")
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
