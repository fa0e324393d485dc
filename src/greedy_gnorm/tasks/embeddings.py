"""Sentence embeddings: a vector for each text, whose angles to others say how similar two texts are.

Texts need no labels: a pruned encoder is judged by whether it finds the same texts similar as the unpruned one. Where
rows are pairs of texts with a score of their similarity, it is judged by these scores too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.data.columns import PAIRS, TEXTS, Columns, Format, LabelColumn, read_labels
from greedy_gnorm.data.rows import Encoded, Label, Row, Text
from greedy_gnorm.errors import DataError, UnsupportedModel
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.classification import squared_distances
from greedy_gnorm.tasks.ranks import spearman
from greedy_gnorm.tasks.task import Task, register_task
from greedy_gnorm.units import Matrix, Measure, Vector

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from greedy_gnorm.data.batches import Batch, Batches

SIMILARITY, SPEARMAN, COSINE, NEIGHBOURS = (
    Measure(name, largest=1.0) for name in ("similarity", "spearman", "cosine", "neighbours")
)
SCORES = ("score", "similarity_score", "similarity")
"""Names of a column of scores; a column `label` may hold classes instead, and is used if the user names it."""
PARTNERS = 16
"""The other texts that each text is compared with, drawn at random."""
NEAREST, AMONG = 10, 1000
"""How many neighbours a text has, and the most texts that they are sought among."""


@register_task
class Embeddings(Task):
    """A vector for each text, made from the outputs for its tokens."""

    name = "sentence_embeddings"
    metrics = (SIMILARITY, SPEARMAN, COSINE, NEIGHBOURS)
    auto_class = "AutoModel"
    pipeline = "feature-extraction"
    output_names = ("last_hidden_state",)
    library = "sentence-transformers"
    format = Format(PAIRS, TEXTS, SCORES)
    labelled = False
    own_labels = True
    gives_chances = False

    @property
    def encoder(self) -> dict[str, Any]:
        """How texts become vectors."""
        from greedy_gnorm.model.sentences import DEFAULT, ENTRY

        settings: dict[str, Any] = getattr(self.config, ENTRY, DEFAULT)
        return settings

    def is_agreement(self, measure: str) -> bool:
        return measure in (SIMILARITY.name, COSINE.name, NEIGHBOURS.name)

    def offered_metrics(self, rows: Batches | None = None) -> Sequence[Measure]:
        """Scores lead where the rows have them."""
        if rows is not None and any(score is not None for batch in rows for _, score in batch.notes):
            return SPEARMAN, SIMILARITY, COSINE, NEIGHBOURS
        return SIMILARITY, COSINE, NEIGHBOURS

    def read_texts(
        self, table: Any, columns: Columns, tokenizer: Any, settings: Settings
    ) -> list[tuple[Text, Text | None]]:
        if columns.pair is not None and columns.label is not None:
            _scores(read_labels(table, columns.label, "scores").values, columns.label)
        elif settings.label is not None:
            raise DataError(
                f"Column {settings.label!r} (--label) has scores of pairs, but rows have one text each: name the "
                f"second one with --text-pair."
            )
        return super().read_texts(table, columns, tokenizer, settings)

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        return [_scores(column.values, "score") if column.used else [] for column in columns]

    def check_labels(self, labels: Sequence[Any]) -> None:
        """Rows need none."""

    def encode(self, rows: Sequence[Row], tokenizer: Any, limit: int, settings: Settings) -> tuple[list[Encoded], int]:
        """Each text alone, those of a pair one after the other; notes are the number of the row and its score."""
        from greedy_gnorm.data.encoding import tokenised
        from greedy_gnorm.model.sentences import default_prompt

        transformer, prompt = self.encoder["transformer"], default_prompt(self.encoder)
        texts, owners = [], []
        for number, row in enumerate(rows):
            for text in (row.text, row.pair):
                if text is not None:
                    words = prompt + str(text)
                    texts.append(Row(words.lower() if transformer.get("do_lower_case") else words, None, None))
                    owners.append(number)
        items, truncated = tokenised(texts, tokenizer, min(limit, transformer.get("max_seq_length") or limit))
        scored = len({row.label for row in rows}) > 1
        scores = [row.label if scored and row.pair is not None else None for row in rows]
        return [
            Encoded(item.inputs, None, owner, note=(owner, scores[owner]))
            for item, owner in zip(items, owners, strict=True)
        ], truncated

    def outputs(self, model: Any, batch: Batch) -> Tensor:
        """The vector of each text, (B, d), not normalised."""
        import torch

        from greedy_gnorm.model.sentences import pooling_modes

        hidden: Any = getattr(model(**batch.inputs), self.output_names[0], None)
        if not isinstance(hidden, torch.Tensor) or not self.has_right_shape(hidden):
            raise UnsupportedModel(f"{type(model).__name__} returns no vector for every token.")
        real = batch.real_tokens().to(hidden)
        return torch.cat([POOLED[mode](hidden, real) for mode in pooling_modes(self.encoder)], dim=-1)

    def has_right_shape(self, logits: Tensor) -> bool:
        return logits.ndim == 3

    def row_norms(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch

        norms: Tensor = torch.linalg.vector_norm(outputs, dim=-1)
        return norms

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The squared distance of the direction from the one to reach, which is the sum of the parts of the label."""
        wanted: Tensor = labels.to(outputs).view(len(outputs), -1, outputs.shape[-1]).sum(1)
        return (_directions(outputs) - wanted).square().mean(-1)

    def row_divergences(self, outputs: Tensor, reference: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
        return squared_distances(outputs, reference)

    def predicted_labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return _directions(outputs.double())

    def drawn_labels(self, outputs: Tensor, batch: Batch, chance: Generator) -> Tensor:
        """The direction, and noise of unit variance in another part, for losses: without it, all gradients are zero."""
        import torch

        noise = torch.randn(outputs.shape, generator=chance, dtype=torch.float64)
        return torch.cat([self.predicted_labels(outputs, batch), noise.to(outputs.device)], dim=-1)

    def row_statistics(self, outputs: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        """The directions before and after, the number of the row, its score and whether it has one."""
        import torch

        notes = batch.notes or [(row, None) for row in batch.rows]
        others = [
            [float(row), 0.0 if score is None else float(score), float(score is not None)] for row, score in notes
        ]
        before, after = labels[:, : outputs.shape[-1]].double(), _directions(outputs.double())
        return torch.cat([before, after, torch.tensor(others, dtype=torch.float64, device=outputs.device)], dim=1)

    def combined(self, statistics: Matrix) -> Matrix:
        """For each row, what its texts are similar to before and after, and the similarity of a pair.

        The columns are similarities to other texts before, as many after, the cosine between a text's own vectors, the
        share of neighbours that stay, the similarity of the pair, its score, and whether there is one.
        """
        vectors, (numbers, scores, scored) = statistics[:, :-3], statistics[:, -3:].T
        count = len(vectors)
        if count < 3:
            raise DataError(f"Similarities are measured between texts, but there are only {count}: give more rows.")
        before, after = np.split(vectors, 2, axis=1)
        sides = [_similarities(side, _partners(count)) for side in (before, after)]
        own = np.einsum("nd,nd->n", before, after)
        parts = 2 if numbers[0] == numbers[1] else 1
        pairs = np.einsum("nd,nd->n", after[::parts], after[parts - 1 :: parts])
        by_text = (own, _shared_neighbours(before, after))
        return np.column_stack(
            [
                *(side.reshape(count // parts, -1) for side in sides),
                *(values.reshape(-1, parts).mean(axis=1) for values in by_text),
                pairs,
                scores[::parts],
                scored[::parts],
            ]
        )

    def measures(self, statistics: Matrix) -> Mapping[str, float]:
        once = np.ones((1, len(statistics)), dtype=np.int64)
        return {name: float(values[0]) for name, values in self.resampled(statistics, once).items()}

    def resampled(self, statistics: Matrix, weights: NDArray[np.int64]) -> Mapping[str, Vector]:
        similarities, (own, shared, pairs, scores, scored) = statistics[:, :-5], statistics[:, -5:].T
        before, after = np.split(similarities, 2, axis=1)
        entries = np.repeat(weights, before.shape[1], axis=1)
        samples, rows = weights.astype(np.float64), weights.sum(axis=1)
        found = {
            "similarity": spearman(before.ravel(), after.ravel(), entries),
            "cosine": samples @ own / rows,
            "neighbours": samples @ shared / rows,
        }
        return {"spearman": spearman(pairs, scores, weights), **found} if scored.all() else found


def _cls(hidden: Tensor, real: Tensor) -> Tensor:
    return hidden[:, 0]


def _max(hidden: Tensor, real: Tensor) -> Tensor:
    return hidden.masked_fill(real[..., None] == 0, float("-inf")).amax(1)


def _mean(hidden: Tensor, real: Tensor) -> Tensor:
    return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)


def _mean_of_root(hidden: Tensor, real: Tensor) -> Tensor:
    return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True).sqrt()


def _weighted_mean(hidden: Tensor, real: Tensor) -> Tensor:
    """Later tokens count more: the weight of a token is its number."""
    return _mean(hidden, real * real.cumsum(1))


def _last(hidden: Tensor, real: Tensor) -> Tensor:
    import torch

    return hidden[torch.arange(len(hidden), device=hidden.device), real.sum(1).long() - 1]


POOLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_of_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""The vector of a text from those of its tokens, (B, T, d), with 1 for real ones, (B, T); padding is on the right."""


def _directions(vectors: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.normalize(vectors, dim=-1)


def _partners(count: int) -> NDArray[np.int64]:
    """The texts that each text is compared with, (texts, partners); no two pairs are the same. Seeded."""
    steps = np.random.default_rng(0).permutation(np.arange(1, (count - 1) // 2 + 1))[:PARTNERS]
    partners: NDArray[np.int64] = (np.arange(count)[:, None] + steps) % count
    return partners


def _similarities(vectors: Matrix, partners: NDArray[np.int64]) -> Matrix:
    """The cosine of each text with its partners, one column of partners at a time."""
    return np.column_stack([np.einsum("nd,nd->n", vectors, vectors[column]) for column in partners.T])


def _shared_neighbours(before: Matrix, after: Matrix) -> Vector:
    """The share of each text's nearest texts that stay among its nearest ones."""
    among = np.sort(np.random.default_rng(0).permutation(len(before))[:AMONG])
    nearest = max(1, min(NEAREST, (len(among) - 1) // 2))
    sides = []
    for vectors in (before, after):
        cosines = vectors @ vectors[among].T
        cosines[among, np.arange(len(among))] = -np.inf  # not itself
        close = np.zeros(cosines.shape, dtype=bool)
        np.put_along_axis(close, np.argpartition(-cosines, nearest, axis=1)[:, :nearest], True, axis=1)
        sides.append(close)
    shared: Vector = (sides[0] & sides[1]).sum(axis=1) / nearest
    return shared


def _scores(values: Sequence[Any], column: str) -> list[Label]:
    """Scores as numbers; anything else is refused."""
    try:
        scores = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise DataError(f"Column {column!r} must hold a score of similarity for each pair: {error}.") from error
    if not np.isfinite(scores).all():
        raise DataError(f"Column {column!r} must hold finite scores of similarity, but one is NaN or infinite.")
    return list(scores)
