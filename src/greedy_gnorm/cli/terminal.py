"""Writing to the terminal: progress goes to stderr, results to stdout. Nothing in here needs torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

out = Console(markup=False, emoji=False)
err = Console(stderr=True, markup=False, emoji=False)


def say(text: str, style: str | None = None) -> None:
    """A line on stderr."""
    err.print(text, style=style, highlight=False, soft_wrap=True)


def silent(text: str) -> None:
    """Nothing."""


def show_table(columns: Sequence[str], cells: Sequence[Sequence[str]], *, numbers: bool = True) -> None:
    """A table on stdout, numbers aligned to the right; as wide as it needs where the output is no terminal."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if numbers and place else "left")
    for row in cells:
        table.add_row(*row)
    (out if out.is_terminal else Console(width=200, markup=False, emoji=False)).print(table)


def show_json(content: Any) -> None:
    """Plain JSON on stdout."""
    print(json.dumps(content, indent=2, allow_nan=False))


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
