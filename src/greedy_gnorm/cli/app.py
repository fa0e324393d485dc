"""The command line: options and one thin call per command.

The code of a command is imported when its arguments are checked, since torch and transformers take seconds: help and
errors are shown at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from greedy_gnorm.cli import checks
from greedy_gnorm.cli.interrupts import Interrupts
from greedy_gnorm.cli.listing import show_methods
from greedy_gnorm.cli.loading import load_code
from greedy_gnorm.cli.measure import bench, evaluate
from greedy_gnorm.cli.options import (
    Config,
    Data,
    EvalData,
    Json,
    Methods,
    Model,
    OptionalData,
    OptionalModel,
    OptionalOut,
    Quiet,
    Version,
    Workers,
    given_names,
    with_settings,
)
from greedy_gnorm.cli.terminal import say
from greedy_gnorm.cli.workers import workers as working_together
from greedy_gnorm.errors import INTERRUPTED, GnormError, Interrupted, ShownElsewhere
from greedy_gnorm.passes.peers import launched, speaks_for_all
from greedy_gnorm.pruning.rules import check_rules, forms
from greedy_gnorm.settings import COMPARING, COMPRESSING, PRUNING, SCORING, Settings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(
    help="Make Hugging Face transformer models smaller and faster without retraining, with proof of the cost."
)
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (may follow the command).")
    ] = False,
    version: Version = False,
) -> None:
    """Options of every command; `main` removes --debug from the arguments before."""


class ModelFormat(StrEnum):
    pruned = "pruned"
    dense = "dense"


TAKING = {
    "model", "out", "from-run", "at", "at-step", "quiet", "json", "trust-remote-code", "format", "latency",
}  # fmt: skip
"""The options that `prune --from-run` takes."""


@app.command()
@with_settings(PRUNING)
def prune(
    context: typer.Context,
    settings: dict[str, Any],
    model: OptionalModel = None,
    data: OptionalData = None,
    out: OptionalOut = None,
    eval_data: EvalData = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Write report.html during the run.")] = False,
    from_run: Annotated[
        Path | None, typer.Option(help="Save a step of an earlier run instead of starting one; no data is needed.")
    ] = None,
    at_step: Annotated[int | None, typer.Option(help="With --from-run: the number of the step to save.")] = None,
    at: Annotated[
        str | None, typer.Option(help="With --from-run: the step to save, as drop=0.01, free or knee.")
    ] = None,
    form: Annotated[
        ModelFormat,
        typer.Option("--format", help="The saved model: smaller (pruned), or original shapes with zeros (dense)."),
    ] = ModelFormat.pruned,
    latency: Annotated[bool, typer.Option(help="Measure the speed before and after.")] = True,
    push_to_hub: Annotated[str | None, typer.Option(metavar="NAME", help="Upload the pruned model to the hub.")] = None,
    workers: Workers = 1,
    quiet: Quiet = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Prune a classifier: score, remove the least important head and score again, until a rule stops the run."""
    step = at if at_step is None else at_step
    if (from_run is None) != (step is None) or (at is not None and at_step is not None):
        raise GnormError(
            "Use --from-run together with one of --at and --at-step: gnorm prune --from-run DIR --at drop=0.01."
        )
    if from_run is not None and step is not None:
        if others := given_names(context) - TAKING:
            options = ", ".join(f"--{name}" for name in sorted(others))
            raise GnormError(f"--from-run uses the settings of that run: remove {options}.")
        taking = {"model": model, "trust_remote_code": settings["trust_remote_code"], "latency": latency}
        checks.check_step(from_run, step)
        load_code("commands", quiet=quiet).take(
            from_run, step, out, {**taking, "format": form.value}, quiet=quiet, as_json=as_json
        )
    elif model is None or data is None:
        raise GnormError("Give a model and data, gnorm prune MODEL --data DATA, or --from-run DIR --at drop=0.01.")
    else:
        more = {"format": form.value, "latency": latency, "push_to_hub": push_to_hub}
        shown = {"live": live, "quiet": quiet, "as_json": as_json}
        together = working_together(workers, context.obj)
        _perform("prune", model, data, out, settings, more, together, eval_data=eval_data, resume=resume, **shown)


@app.command()
@with_settings(COMPRESSING, method="joint-refit")
def compress(
    context: typer.Context,
    model: Model,
    data: Data,
    settings: dict[str, Any],
    out: OptionalOut = None,
    eval_data: EvalData = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Write report.html during the run.")] = False,
    form: Annotated[
        ModelFormat,
        typer.Option("--format", help="The saved model: smaller (pruned), or original shapes with zeros (dense)."),
    ] = ModelFormat.pruned,
    measure_speed: Annotated[bool, typer.Option(help="Measure the speed of the result and of the choices.")] = True,
    push_to_hub: Annotated[str | None, typer.Option(metavar="NAME", help="Upload the result to the hub.")] = None,
    workers: Workers = 1,
    quiet: Quiet = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Make a model smaller and faster without training: remove heads and neurons, and fit what is left.

    Give targets (--macs, --speedup, --latency, --params, --size), or none for the smallest model that loses at most one
    point.
    """
    more = {"format": form.value, "measure_speed": measure_speed, "push_to_hub": push_to_hub}
    shown = {"live": live, "quiet": quiet, "as_json": as_json}
    together = working_together(workers, context.obj)
    _perform("compress", model, data, out, settings, more, together, eval_data=eval_data, resume=resume, **shown)


def _perform(
    command: str,
    model: str,
    data: str,
    out: Path | None,
    settings: dict[str, Any],
    more: dict[str, Any],
    together: AbstractContextManager[None],
    *,
    eval_data: str | None,
    resume: bool,
    **shown: bool,
) -> None:
    """Check a run before anything is loaded, then perform it; `more` is what belongs to the command alone."""
    checks.check_run(command, settings, out, resume=resume)
    checks.check_inputs(model, data, eval_data, quiet=shown["quiet"])
    with together:
        commands = load_code("commands", quiet=shown["quiet"])
        commands.perform(command, model, data, out, {**settings, **more}, eval_data=eval_data, resume=resume, **shown)


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="A run, a comparison, or several runs to show side by side.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write. Default: report.html in the folder, or above all folders."),
    ] = None,
    dpi: Annotated[
        int | None,
        typer.Option(min=1, help="Draw figures/ again too, with so many dots per inch. Runs write them with 150."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write report.html, a page in one file, from the journal of a run; the run need not be finished."""
    checks.check_exists(*folders)
    load_code("commands").report(folders, out, dpi=dpi, show=show)


@app.command()
@with_settings(SCORING)
def score(
    model: Model,
    data: Data,
    settings: dict[str, Any],
    out: OptionalOut = None,
    name: Annotated[str, typer.Option("--score", help="The score; `gnorm methods` lists them.")] = "gnorm",
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted score of many passes.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Score every head once; write scores.json and a heat map."""
    checks.check_score(name, settings)
    checks.check_inputs(model, data, quiet=quiet)
    load_code("commands", quiet=quiet).score(
        model, data, out, name, settings, resume=resume, quiet=quiet, as_json=as_json
    )


@app.command()
@with_settings(COMPARING)
def compare(
    context: typer.Context,
    model: Model,
    data: Data,
    settings: dict[str, Any],
    out: OptionalOut = None,
    eval_data: EvalData = None,
    methods: Methods = "paper",
    runs: Annotated[int, typer.Option(help="Runs of each method, each on another scoring sample.")] = 3,
    trajectories: Annotated[int, typer.Option(help="Runs of the method random.")] = 25,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the comparison in the output folder.")] = False,
    workers: Workers = 1,
    quiet: Quiet = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Prune with several methods until no head is left and compare them: tables and the paper's figures."""
    checks.check_comparison(methods, runs, trajectories, settings, out, resume=resume)
    checks.check_inputs(model, data, eval_data, quiet=quiet)
    settings |= {"eval_data": eval_data, "methods": methods, "runs": runs, "trajectories": trajectories}
    with working_together(workers, context.obj):
        load_code("commands", quiet=quiet).compare(
            model, data, out, {**settings, "resume": resume}, quiet=quiet, as_json=as_json
        )


class TableFormat(StrEnum):
    table = "table"
    csv = "csv"
    md = "md"


@app.command()
def table(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|CONFIG", help="A model or run folder, a config.json, a hub name.")
    ],
    removed: Annotated[int | None, typer.Option(help="How many heads to remove for the columns after pruning.")] = None,
    form: Annotated[TableFormat, typer.Option("--format", help="How to print it.")] = TableFormat.table,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Allow the model's own code.")] = False,
) -> None:
    """Print the number of parameters before and after pruning; no weights are loaded."""
    checks.check_inputs(model, quiet=True)
    load_code("commands", quiet=True).table(model, removed, form.value, trust_remote_code=trust_remote_code)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, or of a model.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX, checked against torch; the only format.")] = True,
    int8: Annotated[bool, typer.Option("--int8", help="Also write and measure it with 8-bit weights.")] = False,
    data: Annotated[str | None, typer.Option(help="Rows for the 8-bit model. Default: the run's own.")] = None,
    tolerance: Annotated[float, typer.Option(help="The largest accepted difference from torch's outputs.")] = 1e-4,
    out: Annotated[Path | None, typer.Option(help="The folder to write to. Default: DIR/onnx.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Allow the model's own code.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Export a pruned model for other runtimes."""
    checks.check_exists(folder)
    options = {"out": out, "int8": int8, "data": data, "tolerance": tolerance, "trust_remote_code": trust_remote_code}
    load_code("commands", quiet=quiet).export(folder, options, quiet=quiet, as_json=as_json)


app.command("eval")(evaluate)
app.command()(bench)


@app.command()
def methods(as_json: Json = False) -> None:
    """List methods, scores, objectives and stopping rules."""
    if speaks_for_all():
        show_methods(as_json=as_json)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="The folder to write to. Default: runs/demo.")] = None,
    stop: Annotated[list[str], typer.Option(help=f"When to stop: {forms()}.")] = ["drop=0.01"],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the training and of the samples.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Try it out: train a small classifier of 20 languages, then prune it."""
    settings = {"stop": stop, "seed": seed}
    check_rules(Settings.of(settings).stop)
    load_code("commands", quiet=quiet).demo(out, settings, resume=resume, quiet=quiet, as_json=as_json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0 for success, 2 for an error that the user can fix, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        with _process_group():
            app([part for part in given if part != "--debug"], prog_name="gnorm", obj=given)
        sys.stdout.flush()
    except SystemExit as end:
        if end.code == INTERRUPTED and speaks_for_all():
            print("Interrupted.", file=sys.stderr)
        return end.code if isinstance(end.code, int) else 1
    except GnormError as error:
        if debug:
            raise
        if not isinstance(error, ShownElsewhere):
            say(f"Error: {error}", "red")
        return 2
    except OSError as error:
        if debug or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries to write it once more
        say(f"Error: The result can't be shown: {error.strerror}.", "red")
        return 2
    except Interrupted as error:
        if speaks_for_all():
            say(str(error))
        return INTERRUPTED
    return 0


@contextmanager
def _process_group() -> Iterator[None]:
    """Join the other processes where a launcher started several; a single process needs no torch to find out."""
    if not launched():
        yield
        return
    from greedy_gnorm.passes.processes import process_group

    # A launcher ends all processes when one fails: the first one must live long enough to say why
    with Interrupts(), process_group(say):
        yield
