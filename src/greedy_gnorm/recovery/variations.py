"""Rows with some of their tokens replaced, so that a training never sees the same row twice.

A model is certain of the rows that it was fine-tuned on. A pruned model learns to repeat this after a few passes over
them, without coming closer to the unpruned one on other rows. But the unpruned model can be asked about any row, also
about one that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.data.rows import TOKENS

REPLACED = 0.25
"""The share of tokens that are replaced, on average; it differs from row to row, between none and twice this."""


class Variations:
    """Replaces tokens by others, drawn from all rows as often as they occur.

    Tokens that every row has stay, as those do that mark its beginning and end. Images stay as they are.
    """

    def __init__(self, batches: Batches) -> None:
        self._seed = batches.seed
        rows = [ids for batch in batches for ids in _sequences(batch)]
        everywhere = set.intersection(*(set(ids.tolist()) for ids in rows)) if rows else set[int]()
        self._kept = torch.tensor(sorted(everywhere), dtype=torch.long)
        tokens = torch.cat(rows) if rows else self._kept
        self._tokens = tokens[~torch.isin(tokens, self._kept)]

    def __call__(self, batch: Batch, number: int) -> Batch:
        """A batch with tokens replaced; the same batch and number always give the same tokens."""
        if TOKENS not in batch.inputs or not len(self._tokens):
            return batch
        chance = torch.Generator().manual_seed(self._seed * 2**32 + number)
        ids = batch.inputs[TOKENS]
        shares = 2 * REPLACED * torch.rand(len(ids), *[1] * (ids.dim() - 1), generator=chance)
        places = torch.rand(ids.shape, generator=chance) < shares
        drawn = self._tokens[torch.randint(len(self._tokens), ids.shape, generator=chance)]
        places = places.to(ids.device) & _real(batch) & ~torch.isin(ids, self._kept.to(ids))
        return replace(batch, inputs={**batch.inputs, TOKENS: torch.where(places, drawn.to(ids), ids)})


def _real(batch: Batch) -> Tensor:
    """Which tokens are no padding, as the ids are."""
    ids = batch.inputs[TOKENS]
    return batch.inputs.get("attention_mask", torch.ones_like(ids)).bool()


def _sequences(batch: Batch) -> Iterator[Tensor]:
    """The tokens of each sequence without padding."""
    if TOKENS in batch.inputs:
        ids, real = batch.inputs[TOKENS].cpu(), _real(batch).cpu()
        for row, mask in zip(ids.flatten(0, -2), real.flatten(0, -2), strict=True):
            yield row[mask]
