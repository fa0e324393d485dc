"""What can be said before anything is loaded: names, rules, paths and folders. Nothing in here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from greedy_gnorm.cli.terminal import say
from greedy_gnorm.comparison.parts import check_settings, parts_for
from greedy_gnorm.data.sources import check_source
from greedy_gnorm.errors import RunFolderError
from greedy_gnorm.model.source import is_hub_name, locate
from greedy_gnorm.passes.peers import speaks_for_all
from greedy_gnorm.pruning.choices import step_named
from greedy_gnorm.pruning.methods import check_joint, methods_named, resolve_method, resolve_score
from greedy_gnorm.records.journal import EXPERIMENT_FILE, RUN_FILE, Journal, check_folder
from greedy_gnorm.settings import Settings

Given = ParamSpec("Given")


def _once(check: Callable[Given, None]) -> Callable[Given, None]:
    """Where a launcher started several processes, one of them speaks for all."""

    @wraps(check)
    def wrapper(*arguments: Given.args, **options: Given.kwargs) -> None:
        if speaks_for_all():
            check(*arguments, **options)

    return wrapper


@_once
def check_run(command: str, settings: Mapping[str, Any], out: Path | None, *, resume: bool) -> None:
    """The names and rules of `prune` or `compress`, and the folder to write to."""
    given = Settings.of(settings)
    resolve_method(given)
    if command == "compress":
        check_joint(given.method)
    if out is not None:
        check_folder(out, RUN_FILE, "run", resume=resume)


@_once
def check_score(name: str, settings: Mapping[str, Any]) -> None:
    """The names of `score`."""
    resolve_score(name, Settings.of(settings))


@_once
def check_comparison(
    methods: str | Sequence[str], runs: int, trajectories: int, settings: Mapping[str, Any], out: Path | None,
    *, resume: bool,
) -> None:  # fmt: skip
    """The names of `compare`, and the folder to write to."""
    names = methods_named(methods)
    parts_for(names, runs, trajectories)
    check_settings(names, Settings.of({**settings, "stop": "all"}))
    if out is not None:
        check_folder(out, EXPERIMENT_FILE, "comparison", resume=resume)


@_once
def check_inputs(model: str | None, data: str | None = None, eval_data: str | None = None, *, quiet: bool) -> None:
    """Files of rows, and the model's folder or name; that there is no such folder is said before the hub is asked."""
    for source in (data, eval_data):
        if source is not None:
            check_source(source)
    if model is not None and is_hub_name(model):
        if not quiet:
            say(f"There is no folder {model} here: looking for it on the hub.")
        locate(model)


@_once
def check_step(folder: Path, step: int | str) -> None:
    """The folder of a run, and that it has the step."""
    check_exists(folder)
    journal = Journal.read(folder)
    step_named(journal.header, journal.steps, step)


@_once
def check_exists(*folders: Path) -> None:
    """Folders to read."""
    for folder in folders:
        if not folder.exists():
            raise RunFolderError(f"There is no folder {folder}.")
