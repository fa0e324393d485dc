"""Loading the code of a command, which loads torch and transformers; that is said at once, for it takes seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

from greedy_gnorm.cli.progress import Progress
from greedy_gnorm.passes.peers import speaks_for_all
from greedy_gnorm.phases import phase


def load_code(module: str, *, quiet: bool = False) -> Any:
    """A module of this folder."""
    loaded = "torch" in sys.modules
    quiet = quiet or loaded or not speaks_for_all()
    with Progress(quiet=quiet) as progress, phase("Loading torch and transformers"):
        progress.line("Loading torch and transformers ...")
        with nullcontext() if loaded else _kept_to_the_end():
            return import_module(f"greedy_gnorm.cli.{module}")


@contextmanager
def _kept_to_the_end() -> Iterator[None]:
    """Python does not look for garbage while the block runs, and never among what the block made.

    Code is needed until the process ends. Looking through all of it again and again would take a fifth of the time of
    loading, and some tenths of a second each time later on.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
    gc.freeze()
