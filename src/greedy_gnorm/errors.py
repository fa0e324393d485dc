"""Errors that a user can act on: one clear message each, shown without a traceback on the command line."""

from __future__ import annotations

from pathlib import Path

INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended."""


class GnormError(Exception):
    """Something in the request can't be done; the message says what was wrong and what to do."""


class UnsupportedModel(GnormError):
    """The model's attention can't be found, cut or scored."""


class DataError(GnormError):
    """The data can't be read, or does not fit the model."""


class NonFiniteScore(GnormError):
    """A score came out NaN or infinite."""


class ProcessGone(GnormError):
    """Another process of the run failed or ended."""


class ShownElsewhere(GnormError):
    """An error of one of several processes that the first process has shown."""


class RunFolderError(GnormError):
    """The output folder can't be used for this run."""


class Interrupted(Exception):
    """Ctrl-C during a run whose journal is safe; `record` is the first file that it writes."""

    def __init__(self, record: Path) -> None:
        begun, folder = record.exists(), record.parent
        how = (
            f"The steps so far are in {folder}; go on with the same command, --out {folder} and --resume."
            if begun
            else "Nothing was written."
        )
        super().__init__(f"Interrupted. {how}")
