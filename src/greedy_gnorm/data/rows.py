"""A row of text and its label."""

from __future__ import annotations

from typing import NamedTuple

Label = int | float | tuple[float, ...]


class Row(NamedTuple):
    """A sentence or a pair of sentences, and its label as the model's number (None if there is none)."""

    text: str
    pair: str | None
    label: Label | None

    @property
    def words(self) -> tuple[str, str | None]:
        """The text, which decides whether two rows are the same, whatever their labels."""
        return self.text, self.pair
