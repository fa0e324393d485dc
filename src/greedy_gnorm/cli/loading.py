"""Loading the code of a command, which loads torch and transformers; that is said at once, for it takes seconds."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from greedy_gnorm.cli.progress import Progress
from greedy_gnorm.passes.peers import speaks_for_all
from greedy_gnorm.phases import phase


def load_code(module: str, *, quiet: bool = False) -> Any:
    """A module of this folder."""
    quiet = quiet or "torch" in sys.modules or not speaks_for_all()
    with Progress(quiet=quiet) as progress, phase("Loading torch and transformers"):
        progress.line("Loading torch and transformers ...")
        return import_module(f"greedy_gnorm.cli.{module}")
