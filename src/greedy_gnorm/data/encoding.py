"""Turning rows of text into batches of tokens."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from greedy_gnorm.data.batches import Batch, Batches, bucketed, padded
from greedy_gnorm.data.rows import Row
from greedy_gnorm.errors import DataError
from greedy_gnorm.settings import Settings

log = logging.getLogger("greedy_gnorm")


def encode(rows: Sequence[Row], model: nn.Module, tokenizer: Any, settings: Settings, what: str = "scoring") -> Batches:
    """Tokenise rows, truncate those that are too long (and log it), and group rows of similar length."""
    if tokenizer is None:
        raise DataError("Rows of text require a tokenizer.")
    limit = longest_input(model, tokenizer)
    tokenised, truncated = _tokenise(rows, tokenizer, limit)
    if truncated:
        text = "%d of %d %s rows are longer than the model's %d tokens and were truncated"
        log.info(text, truncated, len(rows), what, limit)
    fill = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id, "attention_mask": 0}
    if fill["input_ids"] is None:
        raise DataError("The tokenizer has no padding token.")
    accepted = set(inspect.signature(model.forward).parameters)
    if getattr(model.config, "type_vocab_size", 2) < 2:
        accepted -= {"token_type_ids"}
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    largest = max(max(row["input_ids"]) for row in tokenised)
    if largest >= embeddings.num_embeddings:
        raise DataError(
            f"The tokenizer gives token {largest}, but the model has {embeddings.num_embeddings} embeddings: use the "
            f"model's own tokenizer."
        )
    padding = {name: value for name, value in fill.items() if name in tokenised[0] and name in accepted}
    labels = None if any(row.label is None for row in rows) else torch.tensor([row.label for row in rows])
    items = []
    for group in bucketed([len(row["input_ids"]) for row in tokenised], settings.tokens_per_batch):
        inputs = padded([tokenised[place] for place in group], padding)
        items.append(Batch(inputs, None if labels is None else labels[group], tuple(group)))
    texts = tuple(row.words for row in rows)
    return Batches(tuple(items), fingerprint(rows, tokenised), settings.seed, truncated, texts=texts)


def _tokenise(rows: Sequence[Row], tokenizer: Any, limit: int) -> tuple[list[dict[str, list[int]]], int]:
    """Token ids and masks of each row, and how many rows were truncated."""

    def call(some: Sequence[Row], **options: Any) -> list[dict[str, list[int]]]:
        pairs = None if some[0].pair is None else [row.pair for row in some]
        columns = tokenizer([row.text for row in some], pairs, return_attention_mask=True, verbose=False, **options)
        return [{name: columns[name][place] for name in columns} for place in range(len(some))]

    tokenised = call(rows)
    long = [place for place, row in enumerate(tokenised) if len(row["input_ids"]) > limit]
    if long:
        cut = call([rows[place] for place in long], truncation=True, max_length=limit)
        for place, row in zip(long, cut, strict=True):
            tokenised[place] = row
    return tokenised, len(long)


def token_counts(rows: Sequence[Row], model: nn.Module, tokenizer: Any) -> list[int]:
    """The number of tokens of each row, after truncation."""
    if tokenizer is None:
        raise DataError("Rows of text require a tokenizer.")
    tokenised, _ = _tokenise(rows, tokenizer, longest_input(model, tokenizer))
    return [len(row["input_ids"]) for row in tokenised]


def longest_input(model: nn.Module, tokenizer: Any) -> int:
    """The largest number of tokens that the model and the tokenizer accept."""
    return min(longest_sentence(model), int(tokenizer.model_max_length))


def longest_sentence(model: nn.Module) -> int:
    """The largest number of tokens that the model accepts."""
    found = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    positions: Any = next(found, None)
    if positions is None:  # positions are rotations, or the embeddings have another name
        config: Any = model.config
        return int(config.max_position_embeddings)
    # RoBERTa's positions start after that of the padding token
    start = 0 if positions.padding_idx is None else positions.padding_idx + 1
    return int(positions.num_embeddings) - start


def fingerprint(rows: Sequence[Row], tokenised: Sequence[Mapping[str, Sequence[int]]]) -> str:
    """A short hash of the texts, labels and tokens in their order."""
    return hashlib.sha256(json.dumps([rows, tokenised]).encode()).hexdigest()[:16]
