"""Errors that users can fix; the command line shows the message without a traceback."""

from __future__ import annotations

from pathlib import Path

INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended."""


class GnormError(Exception):
    """A request can't be carried out; the message says why and what to do about it."""


class UnsupportedModel(GnormError):
    """The model is of a kind that can't be scored or cut."""


class DataError(GnormError):
    """The data can't be read, or does not fit the model."""


class NonFiniteScore(GnormError):
    """A score or a measure of quality is NaN or infinite."""


class ProcessGone(GnormError):
    """Another process of the run failed or ended."""


class ShownElsewhere(GnormError):
    """An error of one of several processes that the first process has shown."""


class RunFolderError(GnormError):
    """The output folder can't be used for this run."""


class Interrupted(Exception):
    """The work was interrupted and its record is intact; `record` is the first file that is written."""

    def __init__(self, record: Path) -> None:
        folder = record.parent
        state = (
            f"What was done so far is in {folder}; to continue, run the same command with --out {folder} --resume."
            if record.exists()
            else "Nothing was written."
        )
        super().__init__(f"Interrupted. {state}")
