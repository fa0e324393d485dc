"""Batches of tokenised rows of similar length, the same in every iteration."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greedy_gnorm.data.rows import PIXELS, TOKENS, Text
from greedy_gnorm.errors import DataError

DIMENSIONS = {TOKENS: ("rows, tokens", "rows, choices, tokens"), PIXELS: ("rows, channels, height, width",)}
HALF = 0.5
"""The usual threshold of a probability."""


@dataclass(frozen=True)
class Batch:
    """Padded rows: the model's keyword arguments, the labels, and the row numbers in the data."""

    inputs: dict[str, Tensor]
    labels: Tensor | None
    rows: tuple[int, ...]
    reference: Tensor | None = None  # outputs of the unpruned model, for objectives that compare with them
    predicted: Tensor | None = None  # labels that the unpruned model predicts, to measure agreement with it
    positions: Tensor | None = None  # 1 for a token whose output counts, (B, T), if the model has one for every token
    notes: tuple[Any, ...] = ()  # what the task needs to judge each row's outputs, if anything
    threshold: float = HALF  # the probability above which a label is predicted, where a row may have several
    tokens: int | None = None  # what the model makes of each image, if rows are images

    def __len__(self) -> int:
        return len(self.rows)

    def real_tokens(self, tokens: int | None = None) -> Tensor:
        """1 for a token, 0 for padding, (B, T), or (B * choices, T) as the layers of the model get them.

        Images have no padding, and only their model knows their `tokens`.
        """
        if PIXELS in self.inputs:
            tokens = self.tokens if tokens is None else tokens
            if tokens is None:
                raise DataError("Images have no length of their own: it is not known how many tokens a row has.")
            return torch.ones(len(self), tokens, device=self.inputs[PIXELS].device)
        ids = self.inputs[TOKENS]
        mask = self.inputs.get("attention_mask", torch.ones_like(ids)).float()
        return mask.view(-1, mask.shape[-1])

    def by_row(self, tensor: Tensor) -> Tensor:
        """What a layer has for each sequence, (B * choices, ...), as (B, choices, ...); one choice is the usual row."""
        return tensor.reshape(len(self), tensor.shape[0] // len(self), *tensor.shape[1:])

    def joined(self, tensor: Tensor) -> Tensor:
        """What a layer has for each token, (B * choices, T, ...), with the choices of a row one after another."""
        return self.by_row(tensor).flatten(1, 2)

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, inputs={name: tensor.to(device) for name, tensor in self.inputs.items()}, **tensors)


@dataclass(frozen=True)
class Batches:
    """Batches that can be iterated many times, with a seed and a fingerprint of their rows.

    `judged_by` names the labels that quality is measured with: `labels`, those `predicted` by the unpruned model, or
    both. `texts` are the texts of all rows, by the number of the row, where the rows were given as text.
    """

    items: tuple[Batch, ...]
    fingerprint: str
    seed: int = 0
    truncated: int = 0
    judged_by: tuple[str, ...] = ("labels",)
    texts: tuple[tuple[Text, Text | None], ...] = field(default=(), repr=False)
    given: int | None = None  # the rows of the data, where they may be several rows of batches each

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def rows(self) -> int:
        """The number of rows in all batches."""
        return sum(len(batch) for batch in self.items)

    @property
    def data_rows(self) -> int:
        """The number of rows of the data."""
        return self.rows if self.given is None else self.given

    def lengths(self) -> list[int]:
        """The tokens of each sequence that the model reads, without padding."""
        return [int(length) for batch in self.items for length in batch.real_tokens().sum(1).tolist()]

    def to(self, device: torch.device) -> Batches:
        """The same batches on another device."""
        return replace(self, items=tuple(batch.to(device) for batch in self.items))

    def sharing(self, others: Batches) -> Batches:
        """These batches with the tensors of the others if the rows are the same, so that one pass serves both."""
        return replace(self, items=others.items) if self.fingerprint == others.fingerprint else self


START_OF_A_BATCH = 64
"""The fixed cost of a batch in tokens: reading the weights, calling the operations."""


def bucketed(lengths: Sequence[int], tokens_per_batch: int, start: int = START_OF_A_BATCH) -> list[list[int]]:
    """Group row numbers by length, longest first, so that no group exceeds the budget when padded.

    Of all ways to cut the sorted rows into groups, this one has the lowest cost in padded tokens and fixed costs.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    sizes = np.array([lengths[row] for row in order])
    costs = np.zeros(len(order) + 1)  # costs[n]: the lowest cost of the first n rows
    begins = np.zeros(len(order) + 1, dtype=int)  # where the last group of that solution begins
    for end in range(1, len(order) + 1):
        # A group is padded to its first row, the longest; a row that exceeds the budget is a group of its own
        least = max(0, end - max(1, tokens_per_batch // max(1, int(sizes[end - 1]))))
        candidates = np.arange(least, end)
        padded_sizes = (end - candidates) * sizes[candidates]
        totals = costs[candidates] + padded_sizes + start
        totals[(padded_sizes > tokens_per_batch) & (candidates < end - 1)] = np.inf
        begins[end] = candidates[totals.argmin()]
        costs[end] = totals.min()
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[begins[end] : end])
        end = int(begins[end])
    return groups[::-1]


def padded(rows: Sequence[Mapping[str, Any]], padding: Mapping[str, int]) -> dict[str, Tensor]:
    """Pad tokenised rows on the right to tensors of equal length; a row may be several choices, or an image."""
    return {name: _padded([row[name] for row in rows], fill) for name, fill in padding.items()}


def _padded(rows: Sequence[Any], fill: int) -> Tensor:
    if isinstance(rows[0], Tensor):
        return torch.stack(list(rows))
    if not isinstance(rows[0][0], list):
        return padded_lists(rows, fill)
    flat = padded_lists([choice for row in rows for choice in row], fill)
    return flat.view(len(rows), -1, flat.shape[-1])


def padded_lists(lists: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Pad lists on the right to a tensor, (lists, longest)."""
    width = max(map(len, lists))
    return torch.tensor([[*numbers, *[fill] * (width - len(numbers))] for numbers in lists])


def ready_batches(items: Sequence[Mapping[str, Any]], *, seed: int = 0, threshold: float | None = None) -> Batches:
    """Batches from the caller's own dicts of tensors (input_ids or pixel_values, attention_mask, labels, ...)."""
    batches: list[Batch] = []
    digest = hashlib.sha256()
    start = 0
    for number, item in enumerate(items):
        tensors = {name: torch.as_tensor(value) for name, value in item.items()}
        main = PIXELS if PIXELS in tensors else TOKENS
        if main not in tensors or all(tensors[main].ndim != shape.count(",") + 1 for shape in DIMENSIONS[main]):
            shapes = " or ".join(f"({shape})" for shape in DIMENSIONS[main])
            raise DataError(f"Batch {number} must have {main} of shape {shapes}.")
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        labels = tensors.pop("labels", None)
        count = len(tensors[main])
        batches.append(Batch(tensors, labels, tuple(range(start, start + count)), threshold=threshold or HALF))
        start += count
    if not batches:
        raise DataError("The list of batches is empty.")
    return Batches(tuple(batches), digest.hexdigest()[:16], seed)
