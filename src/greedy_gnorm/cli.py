"""The command line: one thin call per command."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from greedy_gnorm import console, figures
from greedy_gnorm.config import Settings
from greedy_gnorm.distributed import is_first, joined
from greedy_gnorm.errors import GnormError
from greedy_gnorm.files import write_json, writing_to
from greedy_gnorm.heads import Step, matrix_to_json
from greedy_gnorm.interrupts import Interrupts
from greedy_gnorm.measure import HEADER, as_csv, as_markdown, table_cells
from greedy_gnorm.objectives import OBJECTIVES
from greedy_gnorm.options import (
    PRUNING,
    SCORING,
    Config,
    Data,
    EvalData,
    Json,
    Model,
    OptionalData,
    OptionalModel,
    Out,
    Quiet,
    given_names,
    with_settings,
)  # fmt: skip
from greedy_gnorm.rules import RULES, check_names, forms
from greedy_gnorm.scores import SCORES, Score
from greedy_gnorm.strategies import STRATEGIES
from greedy_gnorm.tables import model_size_table

INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(help="Prune attention heads from Hugging Face transformer models: Greedy-Gnorm, exact and fast.")
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (anywhere on the line).")
    ] = False,
) -> None:
    """Options of every command; `main` takes --debug off the line before."""


class ModelFormat(StrEnum):
    pruned = "pruned"
    dense = "dense"


@app.command()
@with_settings(*PRUNING)
def prune(
    context: typer.Context,
    out: Out,
    settings: dict[str, Any],
    model: OptionalModel = None,
    data: OptionalData = None,
    eval_data: EvalData = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Write report.html while the run goes on.")] = False,
    from_run: Annotated[
        Path | None, typer.Option(help="Take a step of a recorded run instead; needs no data and scores nothing.")
    ] = None,
    at_step: Annotated[int | None, typer.Option(help="With --from-run: the step to take.")] = None,
    form: Annotated[
        ModelFormat,
        typer.Option("--format", help="The saved model: smaller (pruned), or old shapes with zeros (dense)."),
    ] = ModelFormat.pruned,
    latency: Annotated[bool, typer.Option(help="Measure the speed before and after.")] = True,
    push_to_hub: Annotated[str | None, typer.Option(metavar="NAME", help="Upload the pruned model to the hub.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Prune a classifier: score, remove the least important head, score again, until a rule says stop."""
    if (from_run is None) != (at_step is None):
        raise GnormError("--from-run and --at-step belong together: gnorm prune --from-run DIR --at-step N --out OUT.")
    if from_run is not None and at_step is not None:
        known = {"model", "out", "from_run", "at_step", "quiet", "as_json", "trust_remote_code", "form", "latency"}
        if others := given_names(context) - known:
            raise GnormError(f"--from-run takes a run as it is: {', '.join(sorted(others))} can't be changed.")
        taking = {"model": model, "trust_remote_code": settings["trust_remote_code"], "latency": latency}
        _take_and_show(from_run, at_step, out, {**taking, "format": form.value}, quiet=quiet, as_json=as_json)
    elif model is None or data is None:
        raise GnormError("Say what to prune: gnorm prune MODEL --data DATA --out OUT, or --from-run DIR --at-step N.")
    else:
        settings |= {"format": form.value, "latency": latency, "push_to_hub": push_to_hub}
        _prune_and_show(
            model, data, out, settings, eval_data=eval_data, resume=resume, live=live, quiet=quiet, as_json=as_json
        )


def _take_and_show(run: Path, step: int, out: Path, options: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    from greedy_gnorm.replay import take_step

    with console.messages(quiet=quiet):
        taken = take_step(run, step, out=out, **options)
    _show(taken, out, quiet=quiet, as_json=as_json)


def _prune_and_show(
    model: str,
    data: str,
    out: Path,
    settings: dict[str, Any],
    *,
    eval_data: str | None = None,
    resume: bool,
    live: bool = False,
    quiet: bool,
    as_json: bool,
) -> None:
    from greedy_gnorm.report import LiveReport
    from greedy_gnorm.run import prune as run_prune

    quiet = quiet or not is_first()
    with ExitStack() as stack:
        stack.enter_context(console.messages(quiet=quiet))
        display = stack.enter_context(console.StepDisplay(quiet=quiet))
        page = stack.enter_context(LiveReport(out, on=live and is_first()))
        interrupts = stack.enter_context(Interrupts())

        def on_step(*step: Any) -> None:
            display(*step)
            page(*step)
            interrupts.check()

        try:
            run = run_prune(model, None, data, eval_data=eval_data, out=out, resume=resume, on_step=on_step, **settings)
        except KeyboardInterrupt:
            raise Interrupted(out / "journal.jsonl") from None
    _show(run, out, quiet=quiet, as_json=as_json)


def _show(run: Any, out: Path, *, quiet: bool, as_json: bool) -> None:
    if not is_first():
        return
    if as_json:
        console.show_json({**run.summary(), "out": str(out)})
    else:
        console.show_run(run, out, drawn=not quiet)


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="A run, a comparison, or several runs to put side by side.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; report.html in the folder, or in that which holds them all.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Make report.html from the journal: one page that needs nothing else; also of a run that is not finished."""
    from greedy_gnorm.report import write_report

    path = write_report(folders, out)
    console.out.print(f"Report   {path}", highlight=False, soft_wrap=True)
    if show and not webbrowser.open(path.resolve().as_uri()):
        raise GnormError(f"No browser could be started: open {path.resolve()} yourself.")


@app.command()
@with_settings(*SCORING)
def score(
    model: Model,
    data: Data,
    out: Out,
    settings: dict[str, Any],
    name: Annotated[str, typer.Option("--score", help=f"The score: {', '.join(SCORES)}.")] = "gnorm",
    quiet: Quiet = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Score every head once: scores.json and a heat map."""
    from greedy_gnorm.run import score as run_score

    with console.messages(quiet=quiet):
        scores = run_score(model, data, score=name, **settings)
    content = {
        "model": model,
        "data": data,
        "score": name,
        "settings": settings,
        "values": matrix_to_json(scores.values),
        "parts": {part: matrix_to_json(matrix) for part, matrix in scores.parts.items()},
        "order": [list(head) for head in scores.order()],
    }
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "scores.json", content)
        figures.save(figures.heat_map(scores, name), out / "scores")
    if as_json:
        console.show_json(content)
    elif not quiet:
        lowest, highest = scores.order()[:5], scores.order(highest_first=True)[:5]
        console.out.print(f"Lowest scores (site.head): {', '.join(map(str, lowest))}", highlight=False)
        console.out.print(f"Highest: {', '.join(map(str, highest))}", highlight=False)
        console.out.print(
            f"Matrix {out / 'scores.json'}, heat map {out / 'scores.png'}", highlight=False, soft_wrap=True
        )


@app.command()
@with_settings(*(name for name in SCORING if name != "device_map"), "eval_samples", "cache_memory")
def compare(
    model: Model,
    data: Data,
    out: Out,
    settings: dict[str, Any],
    eval_data: EvalData = None,
    methods: Annotated[str, typer.Option(help="paper, all, or names of `gnorm methods` divided by commas.")] = "paper",
    runs: Annotated[int, typer.Option(help="Runs of each method, each on another scoring sample.")] = 3,
    trajectories: Annotated[int, typer.Option(help="Trajectories of the method random.")] = 25,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in the output folder.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Walk several methods down to the last head and put them side by side: tables and the paper's figures."""
    from greedy_gnorm.comparison import solutions as solutions_table
    from greedy_gnorm.comparison import table as comparison_table
    from greedy_gnorm.experiment import compare as run_compare

    with console.messages(quiet=quiet), console.PartDisplay(quiet=quiet) as display, Interrupts() as interrupts:

        def show(part: object, step: Step, gone: int, limit: int) -> None:
            display(part, step, gone, limit)
            interrupts.check()

        try:
            result = run_compare(
                model, None, data, eval_data=eval_data, out=out, methods=methods, runs=runs, trajectories=trajectories,
                resume=resume, on_step=show, **settings,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise Interrupted(out / "experiment.json") from None
    if not is_first():
        return
    tables = {"comparison": comparison_table(result), "solutions": solutions_table(result)}
    if as_json:
        rows = {
            name: [dict(zip(header, row, strict=True)) for row in cells] for name, (header, cells) in tables.items()
        }
        console.show_json({**rows, "out": str(out)})
        return
    for header, cells in tables.values():
        console.show_table(header, cells)
    if not quiet:
        console.draw_comparison(result)
    console.say_where(out)


class TableFormat(StrEnum):
    table = "table"
    csv = "csv"
    md = "md"


@app.command()
def table(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|CONFIG", help="A model or run folder, a config.json, a hub name.")
    ],
    removed: Annotated[int | None, typer.Option(help="Heads to remove, for the columns after pruning.")] = None,
    form: Annotated[TableFormat, typer.Option("--format", help="How to print it.")] = TableFormat.table,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Allow the model's own code.")] = False,
) -> None:
    """The parameter table before and after; no weights are loaded."""
    with console.messages(quiet=True):
        rows, quality = model_size_table(model, removed, trust_remote_code=trust_remote_code)
    cells = table_cells(rows, quality)
    if form is TableFormat.table:
        console.show_table(HEADER, cells)
    else:
        print((as_csv if form is TableFormat.csv else as_markdown)(HEADER, cells), end="")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, or of a model.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write it as ONNX, checked against torch.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Also with weights in 8 bits, and what that costs.")] = False,
    data: Annotated[str | None, typer.Option(help="Rows for the quality in 8 bits; the run's own by default.")] = None,
    tolerance: Annotated[float, typer.Option(help="The largest difference to torch's logits that passes.")] = 1e-4,
    out: Annotated[Path | None, typer.Option(help="The folder to write to; DIR/onnx by default.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Allow the model's own code.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a pruned model for other runtimes."""
    from greedy_gnorm.export import export as run_export

    if not onnx:
        raise GnormError("Say what to write: --onnx.")
    with console.messages(quiet=quiet):
        done = run_export(
            folder, out=out, int8=int8, data=data, tolerance=tolerance, trust_remote_code=trust_remote_code
        )
    if as_json:
        console.show_json({**done.report, "out": str(done.folder)})
    elif not quiet:
        console.show_export(done)


@app.command()
def methods(as_json: Json = False) -> None:
    """List methods, scores, objectives and stopping rules."""
    rows = [
        {
            "--method": name,
            "score": strategy.score,
            "removes first": "highest" if strategy.highest_first else "lowest",
            "scores": "every step" if strategy.recompute else "once",
            "objective": score.objective or "-",
            "labels": "needed" if score.asks_for_labels(OBJECTIVES[score.objective or "logit-norm"]) else "-",
            "cost of a scoring": score.cost,
            "paper": score.paper,
        }
        for name in STRATEGIES
        if (strategy := STRATEGIES[name]) and (score := SCORES[strategy.score])
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
        ("objective", "the number per sentence", objectives),
        ("stop", "when the run ends", rules),
    ):
        cells = [list(row) for row in content.items()]
        console.show_table([f"--{name}", column], cells, numbers=False)


def _options(score: Score) -> str:
    return "".join(f"; {name}={value}" for name, value in score.defaults().items())


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="The folder to write to; runs/demo by default.")] = None,
    stop: Annotated[list[str], typer.Option(help=f"When to stop: {forms()}.")] = ["knee"],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the training and of the samples.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """The main job on the embedded default: train a small classifier of 20 languages, then prune it."""
    from greedy_gnorm.demo import prepare

    settings = {"stop": stop, "seed": seed}
    check_names(Settings.of(settings).stop)
    folder = out or _free_folder(Path("runs"), "demo", resume=resume)
    with console.messages(quiet=quiet):
        try:
            assets = prepare(seed=seed, say=console.silent if quiet else console.say)
        except OSError as error:
            raise GnormError(f"Can't keep the demo's model: {error}.") from error
    _prune_and_show(str(assets.model), str(assets.data), folder, settings, resume=resume, quiet=quiet, as_json=as_json)
    if not as_json:
        console.say_how_to_go_on(folder)


def _free_folder(parent: Path, name: str, *, resume: bool) -> Path:
    """The first of name, name-2, name-3, ... that is not there yet; to resume, the last that is."""
    names = [name, *(f"{name}-{number}" for number in range(2, 10_000))]
    free = next(place for place, each in enumerate(names) if not (parent / each).exists())
    return parent / names[max(free - 1, 0) if resume else free]


class Interrupted(Exception):
    """Ctrl-C during a run whose journal is safe."""

    def __init__(self, record: Path) -> None:
        begun, folder = record.exists(), record.parent
        how = (
            f"The steps so far are in {folder}; go on with the same command, --out {folder} and --resume."
            if begun
            else "Nothing was written."
        )
        super().__init__(f"Interrupted. {how}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 well, 2 for what the user can mend, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        with joined():
            app([part for part in given if part != "--debug"], prog_name="gnorm")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            console.err.print("Interrupted.")
        return end.code if isinstance(end.code, int) else 1
    except GnormError as error:
        if debug:
            raise
        console.err.print(f"Error: {error}", style="red", soft_wrap=True)
        return 2
    except Interrupted as error:
        console.err.print(str(error), soft_wrap=True)
        return INTERRUPTED
    return 0
