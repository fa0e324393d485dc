"""Causal language models: every token predicts the next one.

The outputs are the last hidden states. Logits of a whole vocabulary are large, so they are computed for some tokens at
a time, and none are stored. torch takes seconds to load, so it is imported where it computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.data.columns import LABELS, PAIRS, Columns, Format, LabelColumn, cells, read_texts
from greedy_gnorm.data.rows import IGNORED, Encoded, Label, Row, Text
from greedy_gnorm.data.sources import LINE
from greedy_gnorm.errors import DataError, UnsupportedModel
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.classification import ACCURACY, LOSS
from greedy_gnorm.tasks.task import Task, register_task
from greedy_gnorm.units import Matrix, Measure, Vector

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from greedy_gnorm.data.batches import Batch

log = logging.getLogger("greedy_gnorm")

PERPLEXITY = Measure("perplexity", higher_is_better=False, grows_fast=True)
DOCUMENTS = ("text", "content", "document", LINE, "story", "article", "body", "sentence", "review", "tweet")
"""The usual names of a column that holds text to model."""
BLOCK = 512
"""The tokens of a row unless the user says otherwise or the model takes fewer."""


@register_task
class LanguageModel(Task):
    """The next token at every position of a block of text.

    Labels are the tokens themselves, as transformers' models take them: the output at a position predicts the label of
    the next one.
    """

    name = "causal_language_modeling"
    metrics = (PERPLEXITY, LOSS, ACCURACY)
    auto_class = "AutoModelForCausalLM"
    pipeline = "text-generation"
    format = Format((*PAIRS, ("question", "context")), DOCUMENTS, (*LABELS, "answers", "ner_tags", "tags"))
    labelled = False
    varies = False
    tokens_alike = True
    output_names = ()

    @property
    def agreement(self) -> str:
        """The share of tokens for which both models predict the same."""
        return ACCURACY.name

    @property
    def head(self) -> nn.Module:
        """The map from hidden states to logits."""
        assert self.model is not None
        head: nn.Module | None = self.model.get_output_embeddings()  # type: ignore[operator]
        if head is None:
            raise UnsupportedModel(f"{type(self.model).__name__} has no map from hidden states to a vocabulary.")
        return head

    def read_texts(
        self, table: Any, columns: Columns, tokenizer: Any, settings: Settings
    ) -> list[tuple[Text, Text | None]]:
        """Blocks of tokens: the lines of a text file are joined as they are, other rows are documents of their own."""
        if columns.label is not None and (settings.text is None or settings.label is not None):
            raise DataError(
                f"These rows have labels ({columns.label!r}), which a language model does not use. Give --text "
                f"{columns.text} (and no --label) to use the text alone, or a classifier to use the labels."
            )
        if columns.pair is not None:
            raise DataError(
                f"A language model takes one text column, not a pair ({columns.text!r} and {columns.pair!r}): give one "
                f"with --text, and leave out --text-pair."
            )
        length = self._block_length(tokenizer, settings)
        texts = ["\n".join(cells(table, LINE))] if columns.text == LINE else read_texts(table, columns.text)
        tokens = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        end = tokenizer.eos_token_id
        if columns.text != LINE and end is not None:
            tokens = [document if document[-1:] == [end] else [*document, end] for document in tokens]
        return [(block, None) for block in blocks([token for document in tokens for token in document], length)]

    def _block_length(self, tokenizer: Any, settings: Settings) -> int:
        from greedy_gnorm.data.encoding import longest_input

        assert self.model is not None
        longest = longest_input(self.model, tokenizer)
        if settings.block_length is not None and settings.block_length > longest:
            raise DataError(f"The model takes at most {longest} tokens: block_length can't be {settings.block_length}.")
        return settings.block_length or min(BLOCK, longest)

    def encode(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> tuple[list[Encoded], int]:
        encoded = []
        for number, row in enumerate(rows):
            tokens: list[Any] = list(row.text)
            encoded.append(Encoded({"input_ids": tokens, "attention_mask": [1] * len(tokens)}, tokens, number))
        return encoded, 0

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        """Tokens are their own labels."""
        return [[] for _ in columns]

    def completed(self, batch: Batch) -> Batch:
        if batch.labels is not None:
            return batch
        return replace(batch, labels=batch.inputs["input_ids"].masked_fill(batch.real_tokens() == 0, IGNORED))

    def check_labels(self, labels: Sequence[Any]) -> None:
        """Any text will do."""

    def doubts(self, labels: Sequence[Any], quality: Mapping[str, float]) -> list[str]:
        found, vocabulary = quality[PERPLEXITY.name], int(self.config.vocab_size)
        if found < vocabulary:
            return []
        return [
            f"The unpruned model's perplexity is {found:,.0f}, not below the {vocabulary:,} of guessing. Check the "
            f"model, its tokenizer and the language of the text."
        ]

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The last hidden states, (B, T, d)."""
        base: Any = model.base_model
        hidden: Tensor = base(**batch.inputs).last_hidden_state
        return hidden

    def has_right_shape(self, logits: Tensor) -> bool:
        return logits.ndim == 3

    def row_norms(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The norm of a row's logits at all positions, over the square root of their number.

        All logits of a position may be shifted alike without a change of the prediction, so they are centred. Their
        squared norm is a quadratic form of the hidden state: no logits are needed.
        """
        from greedy_gnorm.tasks.vocabulary import centred_squares

        counted = self._counted(batch).to(outputs.device)
        squares = centred_squares(self.head, outputs[:, :-1][counted])
        return (_by_row(squares, counted) / counted.sum(1).clamp_min(1)).sqrt()

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean negative log-likelihood of a row's tokens."""
        from greedy_gnorm.tasks.vocabulary import losses

        counted, wanted = _with_labels(labels)
        found = losses(self.head, outputs[:, :-1][counted], wanted[counted])
        return _by_row(found, counted) / counted.sum(1).clamp_min(1)

    def row_divergences(self, outputs: Tensor, reference: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
        """The mean over the positions that predict a token; both models have the same vocabulary."""
        from greedy_gnorm.tasks.vocabulary import divergences

        counted = self._counted(batch).to(outputs.device)
        ours, theirs = (hidden[:, :-1][counted] for hidden in (outputs, reference.to(outputs)))
        return _by_row(divergences(self.head, ours, theirs, temperature), counted) / counted.sum(1).clamp_min(1)

    def predicted_labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._chosen(outputs, batch, lambda logits: logits.argmax(-1))

    def drawn_labels(self, outputs: Tensor, batch: Batch, chance: Generator) -> Tensor:
        import torch

        def draw(logits: Tensor) -> Tensor:
            drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=chance)[:, 0]
            return drawn.to(logits.device)

        return self._chosen(outputs, batch, draw)

    def _chosen(self, outputs: Tensor, batch: Batch, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """The tokens chosen by the logits, each as the label of the position after the one that predicts it."""
        import torch

        from greedy_gnorm.tasks.vocabulary import chunked

        counted = self._counted(batch).to(outputs.device)
        labels = torch.full(outputs.shape[:2], IGNORED, device=outputs.device)
        labels[:, 1:][counted] = chunked(self.head, choose, outputs[:, :-1][counted])
        return labels

    def _counted(self, batch: Batch) -> Tensor:
        """Which positions predict a token of their row, (B, T - 1)."""
        real = batch.real_tokens() > 0
        return real[:, :-1] & real[:, 1:]

    def row_statistics(self, outputs: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        """The negative log-likelihood, the tokens predicted correctly, and all tokens."""
        import torch

        from greedy_gnorm.tasks.vocabulary import judged

        counted, wanted = _with_labels(labels)
        found = judged(self.head, outputs[:, :-1][counted], wanted[counted])
        return torch.stack([*(_by_row(each.double(), counted) for each in found), counted.sum(1).double()], dim=1)

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        return {name: float(values[0]) for name, values in _measures(statistics.sum(0, keepdims=True)).items()}

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        return _measures(weights.astype(np.float64) @ statistics)


def _measures(sums: Matrix) -> dict[str, Vector]:
    """The measures from sums over rows, (R, 3)."""
    loss, right, tokens = sums.T
    with np.errstate(over="ignore"):
        return {"perplexity": np.exp(loss / tokens), "loss": loss / tokens, "accuracy": right / tokens}


def _with_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which positions have a label to predict, and those labels, both (B, T - 1)."""
    return labels[:, 1:] != IGNORED, labels[:, 1:]


def _by_row(values: Tensor, counted: Tensor) -> Tensor:
    """The sums over the positions of each row, (B,), from the values of those that count."""
    table = values.new_zeros(counted.shape)
    return table.masked_scatter(counted, values).sum(1)


def blocks(tokens: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Cut tokens into blocks; a shorter last one is kept only if it is the only one."""
    found = [tuple(tokens[start : start + length]) for start in range(0, len(tokens), length)]
    if len(found) > 1 and len(found[-1]) < length:
        log.info("%d tokens at the end of the text are left out: rows have %d tokens", len(found.pop()), length)
    if not found or len(found[0]) < 2:
        raise DataError(f"The text has {len(tokens)} tokens: a language model needs at least 2.")
    return found
