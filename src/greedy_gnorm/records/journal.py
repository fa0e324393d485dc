"""The record of a run: run.json (model, data and settings) and journal.jsonl (one Step per line, flushed at once)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from greedy_gnorm.errors import GnormError, RunFolderError
from greedy_gnorm.records import schema
from greedy_gnorm.records.files import RESUME, is_leftover, locked, write_json, writing_to
from greedy_gnorm.units import SiteInfo, Step

log = logging.getLogger("greedy_gnorm")
RUN_FILE = "run.json"
JOURNAL_FILE = "journal.jsonl"
EXPERIMENT_FILE = "experiment.json"
"""The record of a comparison, which has the journals of its parts in folders of their own."""
SEAL = "seal"
RESOURCES = {"device", "device_map", "tokens_per_batch", "cache_memory"}
"""Settings that say where to compute and with how much memory: two runs that differ only in these are the same."""


class Journal:
    """The steps of one run in its folder; steps are only ever appended."""

    def __init__(self, folder: Path, header: dict[str, Any], steps: list[Step], seal: str = "") -> None:
        self.folder = folder
        self.header = header
        self.steps = steps
        self.seal = seal

    @classmethod
    def begin(cls, folder: Path, header: dict[str, Any]) -> Journal:
        """Start a run in a new or empty folder."""
        check_folder(folder, RUN_FILE, "run", resume=False)
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / JOURNAL_FILE).touch()
            write_json(folder / RUN_FILE, header)
        return cls(folder, header, [])

    @classmethod
    def resume(cls, folder: Path, header: dict[str, Any]) -> Journal:
        """Continue the run in this folder if it is the same run; start one if there is none."""
        if not (folder / RUN_FILE).exists() or _is_unstarted(folder / RUN_FILE):
            return cls.begin(folder, header)
        journal = cls.read(folder)
        check_same("run", folder, journal.header, header)
        journal._drop_torn_line()
        return journal

    @classmethod
    def read(cls, folder: Path) -> Journal:
        """The run in this folder, finished or not; nothing is written, and a torn last line is ignored."""
        header = read_header(folder / RUN_FILE)
        try:
            content = (folder / JOURNAL_FILE).read_bytes()
        except OSError as error:
            raise RunFolderError(f"{folder} holds no readable run: {error}.") from error
        whole, newline, _ = content.rpartition(b"\n")
        steps, seal = [], ""
        sites = [SiteInfo.from_json(site) for site in header["model"]["sites"]]
        for number, line in enumerate(whole.split(b"\n") if newline else []):
            step, seal = _step(folder / JOURNAL_FILE, number, line, seal, sites)
            steps.append(step)
        fault = schema.steps_fault(header, steps)
        if fault is not None:
            raise RunFolderError(f"{folder / JOURNAL_FILE} does not fit {RUN_FILE}: {fault}.")
        return cls(folder, header, steps, seal)

    def _drop_torn_line(self) -> None:
        path = self.folder / JOURNAL_FILE
        whole, newline, rest = path.read_bytes().rpartition(b"\n")
        if rest:
            warnings.warn(f"The last line of {path} is torn; that step is repeated.", stacklevel=3)
            os.truncate(path, len(whole) + len(newline))

    def append(self, step: Step) -> None:
        """Write one step and make sure that it is on the disk."""
        path, line = self.folder / JOURNAL_FILE, step.to_json()
        seal = _seal(self.seal, line)
        with writing_to(path, RESUME), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, SEAL: seal}, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.steps.append(step)
        self.seal = seal

    def finish(self, result: Mapping[str, Any]) -> None:
        """Add the outcome to run.json."""
        self.header = {**self.header, "result": dict(result)}
        write_json(self.folder / RUN_FILE, self.header)


def check_folder(folder: Path, record: str, what: str, *, resume: bool) -> None:
    """Refuse a folder that is not empty, unless its record shows that it holds what is to be resumed.

    A run that ended before its first step left nothing to lose: another one may take its place.
    """
    with writing_to(folder):
        held = {path.name for path in folder.iterdir() if not _is_unstarted(path)} if folder.exists() else set()
    if record in held and not resume:
        raise RunFolderError(f"{folder} already holds a {what}: continue it with --resume, or use another folder.")
    if held and record not in held:
        raise RunFolderError(f"{folder} is not empty and holds no {what}: use another folder.")
    if resume and not held:
        log.info(f"{folder} holds no {what} to resume: starting from the beginning.")


def read_header(path: Path, shape: Mapping[str, Any] = schema.RUN) -> dict[str, Any]:
    """run.json, or experiment.json with its shape, in the present schema."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path.parent} holds no readable run: {path.name}: {error}.") from error
    if schema.is_later(content):
        raise RunFolderError(
            f"{path} was written by a later version of greedy-gnorm (schema {content['schema']}, this version reads "
            f"up to {schema.SCHEMA}): upgrade greedy-gnorm."
        )
    try:
        header = schema.upgraded(content)
        fault = schema.header_fault(header, shape)
    except GnormError as error:
        fault = str(error).rstrip(".")
    if fault is not None:
        raise RunFolderError(f"{path} is damaged, or not the file of a run: {fault}.")
    return dict(header)


def _is_unstarted(path: Path) -> bool:
    """Whether this file was left by a run that ended before it wrote its first step."""
    if path.name not in (RUN_FILE, JOURNAL_FILE):
        return is_leftover(path)
    journal = path.with_name(JOURNAL_FILE)
    return journal.is_file() and journal.stat().st_size == 0


def _step(path: Path, number: int, line: bytes, before: str, sites: Sequence[SiteInfo]) -> tuple[Step, str]:
    """The step of a line, and the seal of the journal up to it."""
    try:
        content = json.loads(line)
        fault = schema.line_fault(content)
    except (ValueError, RecursionError) as error:
        fault = str(error)
    if fault is None and content["step"] != number:
        fault = f"it is step {content['step']}, not {number}"
    seal = "" if fault is not None else _seal(before, content)
    if fault is None and content.get(SEAL, seal) != seal:
        fault = "it was changed after it was written: its seal does not match"
    if fault is not None:
        raise RunFolderError(f"Line {number + 1} of {path} is damaged ({fault}).")
    return Step.from_json(content, sites), seal


def _seal(before: str, line: Mapping[str, Any]) -> str:
    """A short hash of a line and all lines before it; without times, so that equal runs have equal seals."""
    sealed = {name: value for name, value in line.items() if name not in ("seconds", SEAL)}
    return hashlib.blake2b((before + json.dumps(sealed, sort_keys=True)).encode(), digest_size=8).hexdigest()


def chain_seals(lines: Iterable[Mapping[str, Any]]) -> str:
    """The seal of the last of these lines, which stands for all of them."""
    seal = ""
    for line in lines:
        seal = _seal(seal, line)
    return seal


def identity(header: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two runs the same: settings, weights and rows, but not paths, versions, devices or memory."""
    settings = {**header["config"], **schema.complete_settings(header["config"])}
    return {
        **{name: value for name, value in settings.items() if name not in RESOURCES or _trains_on(name, settings)},
        "model": header["model"]["weights"],
        "model configuration": header["model"].get("configuration"),
        **{f"{name} rows": part["fingerprint"] for name, part in header["data"].items()},
        "taken": header.get("taken"),
    }


def _trains_on(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether the weights depend on this resource: a training takes a step after each batch."""
    return name == "tokens_per_batch" and settings["recover"] == "distill"


def check_same(what: str, folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another run or comparison, and say what differs."""
    found = [_in_words(*each) for each in differences(identity(was), identity(now))]
    if found:
        raise RunFolderError(f"{folder} holds another {what}: {'; '.join(found)}. Use another folder.")


def _in_words(name: str, old: Any, new: Any) -> str:
    """What differs between two runs, with both values unless they are fingerprints."""
    if name == "model":
        return "the weights of the model differ"
    if name == "model configuration":
        return "the model configuration differs"
    if name.endswith(" rows"):
        return f"the {name} differ"
    return f"{name} was {old!r} and is now {new!r}"


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The names whose values differ, with both values."""
    names = [*was, *(name for name in now if name not in was)]
    return [(name, was.get(name), now.get(name)) for name in names if was.get(name) != now.get(name)]


@contextmanager
def open_journal(folder: Path, header: dict[str, Any], *, resume: bool) -> Iterator[Journal]:
    """The journal of a run in this folder, new or continued; other processes are locked out meanwhile."""
    check_folder(folder, RUN_FILE, "run", resume=resume)
    with writing_to(folder, RESUME), locked(folder):
        yield (Journal.resume if resume else Journal.begin)(folder, header)
