"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from greedy_gnorm.errors import RunFolderError

RESUME = " Steps that were made are safe: --resume goes on."


@contextmanager
def writing_to(place: Path, more: str = "") -> Iterator[None]:
    """What the system says against a file or folder, as an error that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFolderError(f"Can't write to {place}: {reason}.{more}") from error


def write_text(path: Path, text: str) -> None:
    """Write a whole file of UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside, then move into place; what lies there already, a link to elsewhere too, is not written through."""
    partial = _beside(path, f"{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Readable JSON, strictly: NaN must have been taken out before."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


LOCK = ".lock"


def is_leftover(path: Path) -> bool:
    """Whether this is only what a process leaves that was killed before it had anything to say."""
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith(".partial"))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Work in a folder alone: a second process is refused; the lock goes with the process, however it ends.

    What a killed process left half-written is taken away.
    """
    _check_name(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_links(folder)
        with FileLock(folder / LOCK, timeout=0):
            for path in list(folder.rglob(".*.partial")):
                _remove(path)
            yield
    except Timeout as error:
        raise RunFolderError(f"Another process works in {folder}: wait for it, or name another folder.") from error


def _refuse_links(folder: Path) -> None:
    """A folder that a stranger made could lead elsewhere what is written to it."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise RunFolderError(f"{path} is a link to {os.readlink(path)}: put the file itself there, or remove it.")


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when the block ends well and leaves no trace when it fails.

    There is always a whole one or none at `path`: the old one is moved aside before it is taken apart.
    """
    partial, old = _beside(path, "partial"), _beside(path, "old.partial")
    _remove(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _remove(old)
    if path.exists():
        os.replace(path, old)
    os.replace(partial, path)
    _remove(old)


def _beside(path: Path, ending: str) -> Path:
    _check_name(path)
    return path.with_name(f".{path.name}.{ending}")


def _check_name(path: Path) -> None:
    if path.name in ("", ".."):
        raise RunFolderError(f"{path} can't be written: give it a name of its own.")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise RunFolderError(f"{str(path)!r} can't be written: its name is not UTF-8.") from error


def _remove(path: Path) -> None:
    """Take away a file or a folder, or a link to one, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
