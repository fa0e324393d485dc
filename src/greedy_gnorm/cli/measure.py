"""The options of `gnorm eval` and `gnorm bench`, and a thin call for each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from greedy_gnorm.cli import checks
from greedy_gnorm.cli.loading import load_code
from greedy_gnorm.cli.options import Config, Data, Json, MovedModel, Quiet, RunFolder, Runtimes, counts, with_settings
from greedy_gnorm.settings import EVALUATING


@with_settings(EVALUATING)
def evaluate(
    folder: RunFolder,
    data: Data,
    settings: dict[str, Any],
    model: MovedModel = None,
    examples: Annotated[int, typer.Option(min=0, help="Rows with a changed prediction to show.")] = 10,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write eval.json, eval.md and CSV tables to. Default: none.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Compare the unpruned and the pruned model on labelled rows: measures, classes, predictions that changed.

    Columns and the label map are those of the run unless others are given.
    """
    checks.check_exists(folder)
    checks.check_inputs(model, data, quiet=quiet)
    settings |= {"model": model, "examples": examples}
    load_code("side_by_side", quiet=quiet).evaluate(folder, data, settings, out=out, quiet=quiet, as_json=as_json)


def bench(
    folder: RunFolder,
    batches: Annotated[Any, counts("Rows in a batch.")] = "1,8,32",
    tokens: Annotated[Any, counts("Tokens in a row; lengths that the model does not accept are left out.")] = "32,128",
    runtimes: Runtimes = None,
    threads: Annotated[Any, counts("Numbers of threads. Default: as many as torch uses.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each measurement.")] = 1.0,
    model: MovedModel = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write to. Default: DIR/bench.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Allow the model's own code.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Time the unpruned and the pruned model in turn, on the CPU, in several runtimes: a table and a figure."""
    checks.check_exists(folder)
    options = {"batches": batches, "tokens": tokens, "runtimes": runtimes, "threads": threads, "seconds": seconds}
    options |= {"model": model, "out": out, "trust_remote_code": trust_remote_code}
    load_code("side_by_side", quiet=quiet).bench(folder, options, quiet=quiet, as_json=as_json)
