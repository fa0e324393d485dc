"""Files and folders that are written completely or not at all."""

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

RESUME = " The steps so far are saved: continue with --resume."


@contextmanager
def writing_to(place: Path, more: str = "") -> Iterator[None]:
    """Turn the system's error about a file or folder into one that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFolderError(f"Can't write to {place}: {reason}.{more}") from error


def write_text(path: Path, text: str) -> None:
    """Write a whole file of UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write to a temporary file and move it into place; an existing file or link is replaced, not written through."""
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
    """Indented JSON; NaN is refused, since JSON has none."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


LOCK = ".lock"


def is_leftover(path: Path) -> bool:
    """Whether a killed process left this: a lock or a temporary file."""
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith(".partial"))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process and refuse a second one; the lock ends with the process, however that ends.

    Temporary files of a killed process are deleted.
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
        raise RunFolderError(f"Another process works in {folder}: wait for it, or use another folder.") from error


def _refuse_links(folder: Path) -> None:
    """Refuse links: in a folder from someone else they could redirect what is written."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise RunFolderError(f"{path} is a link to {os.readlink(path)}: put the file itself there, or remove it.")


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that replaces `path` when the block succeeds and is deleted when it fails.

    There is always a complete folder or none at `path`: the old one is moved aside before it is deleted.
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
        raise RunFolderError(f"{path} can't be written: it has no name of its own.")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise RunFolderError(f"{str(path)!r} can't be written: its name is not UTF-8.") from error


def _remove(path: Path) -> None:
    """Delete a file or a folder, or a link to one, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
