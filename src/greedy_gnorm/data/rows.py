"""A row of the data, and what it becomes for the model."""

from __future__ import annotations

from typing import Any, NamedTuple

Text = str | tuple[Any, ...]
"""A text, or several parts of one, such as the words of a sentence."""
TOKENS, PIXELS = "input_ids", "pixel_values"
"""The input of models of text, (B, T) or (B, choices, T), and of images, (B, channels, height, width)."""
Label = int | float | tuple[Any, ...]
IGNORED = -100
"""The label of a token that has none."""


class Row(NamedTuple):
    """A text or a pair of texts, and its label as the model's number, or numbers (None if there is none)."""

    text: Text
    pair: Text | None
    label: Label | None

    @property
    def words(self) -> tuple[Text, Text | None]:
        """The text, which decides whether two rows are the same, whatever their labels."""
        return self.text, self.pair

    @property
    def source(self) -> Any:
        """What rows of different uses must not share: the text, unless a task says otherwise."""
        return self.words

    @property
    def hashed(self) -> tuple[Any, ...]:
        """What a fingerprint of the data takes from the row, besides the model's inputs."""
        return tuple(self)


class Encoded(NamedTuple):
    """A row, or a part of it, as one row of a batch: the model's inputs without padding and the label.

    `row` is the number of the row it was made from. `label` is a list if there is one for every token. `positions` is 1
    for the tokens whose outputs count, where the model has an output for every token. `note` is anything that the task
    needs to judge the outputs. Where a row has several choices, the inputs are a list for each of them. An image is one
    tensor, and `tokens` says how many tokens the model makes of it.
    """

    inputs: dict[str, Any]
    label: Any
    row: int
    positions: list[int] | None = None
    note: Any = None
    tokens: int | None = None

    @property
    def choices(self) -> int | None:
        """The number of choices, if the model reads several for each row."""
        if self.tokens is not None:
            return None
        ids = self.inputs[TOKENS]
        return len(ids) if isinstance(ids[0], list) else None

    def __len__(self) -> int:
        """The number of tokens; choices are padded to the longest."""
        if self.tokens is not None:
            return self.tokens
        ids = self.inputs[TOKENS]
        return len(ids) if self.choices is None else self.choices * max(map(len, ids))
