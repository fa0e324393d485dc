"""Batches: tokenised rows, of like length together, the same every time they are walked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from greedy_gnorm.errors import DataError


@dataclass(frozen=True)
class Batch:
    """Padded rows: the model's keyword arguments, the labels, and which rows of the data they are."""

    inputs: dict[str, Tensor]
    labels: Tensor | None
    rows: tuple[int, ...]
    reference: Tensor | None = None  # logits of the unpruned model, for objectives that compare with it

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        labels = None if self.labels is None else self.labels.to(device)
        reference = None if self.reference is None else self.reference.to(device)
        return Batch({name: tensor.to(device) for name, tensor in self.inputs.items()}, labels, self.rows, reference)


@dataclass(frozen=True)
class Batches:
    """Rows ready for a model: re-iterable, seeded, fingerprinted."""

    items: tuple[Batch, ...]
    fingerprint: str
    seed: int = 0
    truncated: int = 0

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def rows(self) -> int:
        """How many rows there are in all."""
        return sum(len(batch) for batch in self.items)

    def to(self, device: torch.device) -> Batches:
        """The same batches on another device."""
        return Batches(tuple(batch.to(device) for batch in self.items), self.fingerprint, self.seed, self.truncated)


def bucketed(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Row numbers in groups of like length whose padded size stays within the budget, longest first."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= tokens_per_batch:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def padded(rows: Sequence[Mapping[str, Sequence[int]]], padding: Mapping[str, int]) -> dict[str, Tensor]:
    """Tokenised rows as tensors of one length, filled up on the right."""
    width = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.tensor([[*row[name], *[fill] * (width - len(row[name]))] for row in rows])
        for name, fill in padding.items()
    }


def ready_batches(items: Sequence[Mapping[str, Any]], *, seed: int = 0) -> Batches:
    """Batches from dicts of tensors (input_ids, attention_mask, labels, ...) that the caller made."""
    batches: list[Batch] = []
    digest = hashlib.sha256()
    start = 0
    for number, item in enumerate(items):
        tensors = {name: torch.as_tensor(value) for name, value in item.items()}
        if "input_ids" not in tensors or tensors["input_ids"].ndim != 2:
            raise DataError(f"Batch {number} needs input_ids of shape (rows, tokens).")
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        labels = tensors.pop("labels", None)
        count = len(tensors["input_ids"])
        batches.append(Batch(tensors, labels, tuple(range(start, start + count))))
        start += count
    if not batches:
        raise DataError("There are no batches to work on.")
    return Batches(tuple(batches), digest.hexdigest()[:16], seed)
