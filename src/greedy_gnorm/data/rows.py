"""A row of text and its label."""

from __future__ import annotations

from typing import NamedTuple

Label = int | float | tuple[float, ...]


class Row(NamedTuple):
    """One sentence or pair, and its label as the model counts it (None where there is none)."""

    text: str
    pair: str | None
    label: Label | None

    @property
    def words(self) -> tuple[str, str | None]:
        """What makes two rows the same: the text, whatever the label."""
        return self.text, self.pair
