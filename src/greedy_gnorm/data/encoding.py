"""Turning rows into batches of tokens, or of images."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from greedy_gnorm.data.batches import HALF, Batch, Batches, bucketed, padded, padded_lists
from greedy_gnorm.data.rows import IGNORED, Encoded, Row
from greedy_gnorm.errors import DataError
from greedy_gnorm.model.families import image_tokens
from greedy_gnorm.settings import Settings

log = logging.getLogger("greedy_gnorm")


class EncodingTask(Protocol):
    """The part of a task that encoding uses."""

    def encode(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> tuple[list[Encoded], int]:
        """The rows as the model takes them, of at most `limit` tokens each, and how many rows were truncated."""
        ...

    def token_counts(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> list[int]:
        """The number of tokens of each row, after truncation."""
        ...

    def padding(self, items: Sequence[Encoded], model: nn.Module, tokenizer: Any) -> dict[str, int]:
        """The model's inputs, and what fills up each of them in rows that are shorter than others."""
        ...


def encode(
    rows: Sequence[Row], model: nn.Module, tokenizer: Any, task: EncodingTask, settings: Settings, what: str = "scoring"
) -> Batches:
    """Tokenise rows, truncate those that are too long (and log it), and group rows of similar length."""
    limit = longest_input(model, tokenizer)
    items, truncated = task.encode(rows, tokenizer, limit, settings)
    if truncated:
        text = "%d of %d %s rows are longer than the model's %d tokens and were truncated"
        log.info(text, truncated, len(rows), what, limit)
    padding = task.padding(items, model, tokenizer)
    labelled = all(item.label is not None for item in items)
    batches = []
    for group in _groups(items, settings.tokens_per_batch):
        some = [items[place] for place in group]
        marked = [item.positions for item in some if item.positions is not None]
        batches.append(
            Batch(
                padded([item.inputs for item in some], padding),
                _labels([item.label for item in some]) if labelled else None,
                tuple(group),
                positions=padded_lists(marked, 0) if marked else None,
                notes=tuple(item.note for item in some) if some[0].note is not None else (),
                threshold=settings.threshold or HALF,
                tokens=some[0].tokens,
            )
        )
    texts = tuple(rows[item.row].words for item in items)
    return Batches(tuple(batches), fingerprint(rows, items), settings.seed, truncated, texts=texts, given=len(rows))


def _groups(items: Sequence[Encoded], tokens_per_batch: int) -> list[list[int]]:
    """The places of the rows of each batch; all rows of a batch have as many choices."""
    places: dict[int | None, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(item.choices, []).append(place)
    return [
        [own[place] for place in group]
        for own in places.values()
        for group in bucketed([len(items[place]) for place in own], tokens_per_batch)
    ]


def _sequences(ids: list[Any]) -> list[list[int]]:
    """The sequences of a row: one for each choice, or one."""
    return ids if isinstance(ids[0], list) else [ids]


def _labels(labels: list[Any]) -> Tensor:
    """One label a row, or one for every token, with IGNORED at padding."""
    return padded_lists(labels, IGNORED) if isinstance(labels[0], list) else torch.tensor(labels)


def tokenised(rows: Sequence[Row], tokenizer: Any, limit: int) -> tuple[list[Encoded], int]:
    """Texts and pairs of texts with one label each, and how many were truncated."""

    def call(some: Sequence[Row], **options: Any) -> list[dict[str, list[int]]]:
        pairs = None if some[0].pair is None else [row.pair for row in some]
        columns = tokenizer([row.text for row in some], pairs, return_attention_mask=True, verbose=False, **options)
        return [{name: columns[name][place] for name in columns} for place in range(len(some))]

    inputs = call(rows)
    long = [place for place, row in enumerate(inputs) if len(row["input_ids"]) > limit]
    if long:
        cut = call([rows[place] for place in long], truncation=True, max_length=limit)
        for place, row in zip(long, cut, strict=True):
            inputs[place] = row
    return [
        Encoded(given, row.label, number) for number, (given, row) in enumerate(zip(inputs, rows, strict=True))
    ], len(long)


def token_padding(items: Sequence[Encoded], model: nn.Module, tokenizer: Any) -> dict[str, int]:
    """The inputs that tokenised rows have and the model takes, with what fills up each; tokens must be the model's."""
    fill = {
        "input_ids": padding_token(tokenizer, items),
        "token_type_ids": tokenizer.pad_token_type_id,
        "attention_mask": 0,
    }
    accepted = set(inspect.signature(model.forward).parameters)
    if getattr(model.config, "type_vocab_size", 2) < 2:
        accepted -= {"token_type_ids"}
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    largest = max(max(ids) for item in items for ids in _sequences(item.inputs["input_ids"]))
    if largest >= embeddings.num_embeddings:
        raise DataError(
            f"The tokenizer gives token {largest}, but the model has {embeddings.num_embeddings} embeddings: use the "
            f"model's own tokenizer."
        )
    return {name: value for name, value in fill.items() if name in items[0].inputs and name in accepted}


def longest_input(model: nn.Module, tokenizer: Any) -> int:
    """The largest number of tokens that the model and the tokenizer accept."""
    fixed = image_tokens(model.config)
    if tokenizer is None:
        raise DataError(f"Rows of {'text require a tokenizer' if fixed is None else 'images require a processor'}.")
    return min(longest_sentence(model), int(tokenizer.model_max_length)) if fixed is None else fixed


def longest_sentence(model: nn.Module) -> int:
    """The largest number of tokens that the model accepts; that of every row where rows are images."""
    fixed = image_tokens(model.config)
    if fixed is not None:
        return fixed
    found = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    positions: Any = next(found, None)
    if positions is None:  # positions are rotations, or the embeddings have another name
        config: Any = model.config
        return int(config.max_position_embeddings)
    # RoBERTa's positions start after that of the padding token
    start = 0 if positions.padding_idx is None else positions.padding_idx + 1
    return int(positions.num_embeddings) - start


def padding_token(tokenizer: Any, items: Sequence[Encoded]) -> int:
    """The token that fills rows up; models never look at it."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if len({len(item) for item in items}) > 1:
        raise DataError("The tokenizer has no padding token, and no end-of-text token to use for it.")
    return 0  # rows of equal length are not filled up


def fingerprint(rows: Sequence[Row], items: Sequence[Encoded]) -> str:
    """A short hash of the texts, labels and tokens in their order: that of two lists in JSON, a piece at a time."""
    digest = hashlib.sha256(b"[[")
    for place, row in enumerate(rows):
        digest.update((", " * (place > 0) + json.dumps(row.hashed, default=_digest)).encode())
    digest.update(b"], [")
    for place, item in enumerate(items):
        digest.update((", " * (place > 0) + json.dumps(item.inputs, default=_digest)).encode())
    digest.update(b"]]")
    return digest.hexdigest()[:16]


def _digest(image: Tensor) -> str:
    return hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()
