"""The unpruned and the pruned model of a run, to be measured side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from greedy_gnorm.errors import GnormError, RunFolderError
from greedy_gnorm.model.checkpoint import load, load_tokenizer
from greedy_gnorm.model.padding import set_padding
from greedy_gnorm.pruning.run import Run
from greedy_gnorm.records.journal import RUN_FILE, Journal
from greedy_gnorm.records.schema import complete_settings
from greedy_gnorm.records.unpruned import load_unpruned, unpruned_source
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import Task, task_of


@dataclass(frozen=True)
class Pair:
    """Both models, where they come from, the run's settings, and its folder if it has one."""

    before: Any
    after: Any
    tokenizer: Any
    names: tuple[str, str]
    settings: Settings = field(default_factory=Settings)
    folder: Path | None = None

    @property
    def task(self) -> Task:
        """The task of both models; raises GnormError if they predict different things."""
        first, second = task_of(self.before), task_of(self.after)
        if (first.name, first.classes) != (second.name, second.classes):
            raise GnormError(
                f"{self.names[0]} and {self.names[1]} do not predict the same: {_told(first)}, and {_told(second)}."
            )
        return first


def _told(task: Task) -> str:
    return f"{task.name} ({', '.join(task.classes)})" if task.classes else task.name


def load_pair(run: Run | str | Path, model: str | Path | None = None, *, trust_remote_code: bool = False) -> Pair:
    """Both models of a run, given as the object, its folder or the `model` folder in it.

    `model` is the folder or name of the unpruned model, if it was moved or if the folder holds no run.
    """
    if isinstance(run, Run):
        if model is not None:
            raise GnormError("A run in Python has its unpruned model: leave model out.")
        names = str(run.header["model"]["name"]), "the pruned model"
        return Pair(run.unpruned, run.model, run.tokenizer, names, _settings(run.header))
    folder = Path(run)
    if folder.name == "model" and (folder.parent / RUN_FILE).exists():
        folder = folder.parent
    if (folder / RUN_FILE).exists():
        return _of_run(folder, model, trust_remote_code)
    if not folder.is_dir():
        raise RunFolderError(f"There is no folder {folder}.")
    if model is None:
        raise GnormError(f"{folder} holds no run ({RUN_FILE}): name the unpruned model with --model.")
    before, after = (load(each, trust_remote_code=trust_remote_code) for each in (model, folder))
    tokenizer = load_tokenizer(folder, config=after.config, trust_remote_code=trust_remote_code)
    for each in (before, after):
        set_padding(each, tokenizer)
    return Pair(before, after, tokenizer, (str(model), str(folder)), folder=folder)


def _of_run(folder: Path, model: str | Path | None, trust_remote_code: bool) -> Pair:
    journal, pruned = Journal.read(folder), folder / "model"
    if not pruned.is_dir():
        raise RunFolderError(f"The run in {folder} is not finished and has no model yet: continue it with --resume.")
    source = unpruned_source(journal, model)
    before = load_unpruned(journal, source, trust_remote_code=trust_remote_code)
    after = load(pruned, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(pruned, config=after.config, trust_remote_code=trust_remote_code)
    set_padding(before, tokenizer)
    return Pair(before, after, tokenizer, (str(source), str(pruned)), _settings(journal.header), folder)


def _settings(header: Mapping[str, Any]) -> Settings:
    return Settings.of(complete_settings(header["config"]))
