"""A family and a task that no real model has, so that nothing may be taken for granted.

Two attention modules a layer, one with 4 units and one with 6. A unit of the first is a key/value head with two query
heads, and queries, keys and values have different widths. The second keeps queries, keys and values of each head
together in one Conv1D. The model gives a logit for every token of a vocabulary at every position, and its quality is a
perplexity: above 1, and lower is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from greedy_gnorm.data.columns import LabelColumn
from greedy_gnorm.model.families import FAMILIES, Family, LinearMap, SiteRow
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import TASKS, Task
from greedy_gnorm.units import Measure

HIDDEN, LAYERS, VOCABULARY = 20, 3, 11
GROUPS, PER_GROUP, KEY, VALUE = 4, 2, 3, 5
HEADS, SIZE = 6, 2


class MadeUpConfig(PreTrainedConfig):
    model_type = "made-up"


class Grouped(nn.Module):
    """Four key/value heads, each with two query heads; keys of 3 channels, values of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = GROUPS
        self.joint_width = GROUPS * PER_GROUP * KEY
        self.q = nn.Linear(HIDDEN, GROUPS * PER_GROUP * KEY)
        self.k = nn.Linear(HIDDEN, GROUPS * KEY, bias=False)
        self.v = nn.Linear(HIDDEN, GROUPS * VALUE)
        self.o = nn.Linear(GROUPS * PER_GROUP * VALUE, HIDDEN)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, _ = hidden.shape
        assert self.joint_width == self.groups * PER_GROUP * KEY
        query = self.q(hidden).view(rows, tokens, self.groups, PER_GROUP, KEY)
        key = self.k(hidden).view(rows, tokens, self.groups, KEY)
        value = self.v(hidden).view(rows, tokens, self.groups, VALUE)
        scores = torch.einsum("btgpc,bsgc->bgpts", query, key) + mask[:, None, None, None, :]
        context = torch.einsum("bgpts,bsgc->btgpc", scores.softmax(-1), value)
        return self.o(context.reshape(rows, tokens, -1))


class Interleaved(nn.Module):
    """Six heads; one Conv1D gives query, key and value of the first head, then those of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = Conv1D(3 * HEADS * SIZE, HIDDEN)
        self.out = Conv1D(HIDDEN, HEADS * SIZE)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if not self.num_heads:  # transformers' Conv1D can't run without inputs
            return self.out.bias.expand_as(hidden)
        rows, tokens, _ = hidden.shape
        query, key, value = self.qkv(hidden).view(rows, tokens, self.num_heads, 3, SIZE).unbind(3)
        scores = torch.einsum("bthc,bshc->bhts", query, key) + mask[:, None, None, :]
        context = torch.einsum("bhts,bshc->bthc", scores.softmax(-1), value)
        return self.out(context.reshape(rows, tokens, -1))


class MadeUpLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Grouped(), Interleaved(), nn.LayerNorm(HIDDEN)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self.first(hidden, mask)
        return self.norm(hidden + self.second(hidden, mask))


MadeUpLayer.__module__ = "transformers.models.made_up"  # a layer that passes may run by itself


class MadeUpForPuzzles(PreTrainedModel):
    config_class = MadeUpConfig

    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(48, HIDDEN)
        self.layers = nn.ModuleList(MadeUpLayer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        hidden = self.embeddings(input_ids) + self.position_embeddings.weight[: input_ids.shape[1]]
        mask = (1 - attention_mask.to(hidden)) * -1e9
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return SimpleNamespace(logits=self.head(hidden))


FAMILY = Family(
    "Made-up",
    (
        SiteRow(
            "attention",
            "layers.*.first",
            (LinearMap("q", ("q",)), LinearMap("k", ("k",)), LinearMap("v", ("v",))),
            LinearMap("o", ("context",)),
            units=lambda config: GROUPS,
            sizes=lambda config: {"q": PER_GROUP * KEY, "k": KEY, "v": VALUE, "context": PER_GROUP * VALUE},
            follow={"groups": "units", "joint_width": "q"},
        ),
        SiteRow(
            "attention",
            "layers.*.second",
            (LinearMap("qkv", ("q", "k", "v"), "interleaved"),),
            LinearMap("out", ("v",)),
            units=lambda config: HEADS,
            sizes=lambda config: dict.fromkeys(("q", "k", "v"), SIZE),
            follow={"num_heads": "units"},
        ),
    ),
    layer="layers.*",
)


class MadeUpTask(Task):
    """Predicts a token at each position; the label of a row is a token for each of its positions."""

    name = "made-up language"
    metrics = (Measure("perplexity", higher_is_better=False),)
    auto_class = pipeline = "none"

    @classmethod
    def fits(cls, model: nn.Module) -> bool:
        return isinstance(model, MadeUpForPuzzles)

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Any]]:
        raise NotImplementedError

    def has_right_shape(self, logits: Tensor) -> bool:
        return logits.ndim == 3

    def row_norms(self, outputs: Tensor, batch: Any) -> Tensor:
        return torch.linalg.vector_norm(outputs[:, :2], dim=(1, 2))

    def row_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        tokens = nn.functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return tokens.sum(1) / (labels != -100).sum(1)

    def predicted_labels(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.argmax(-1)

    def drawn_labels(self, outputs: Tensor, batch: Any, chance: torch.Generator) -> Tensor:
        drawn = torch.multinomial(outputs.flatten(0, 1).softmax(-1), 1, generator=chance)
        return drawn.view(outputs.shape[:-1])

    def row_statistics(self, outputs: Tensor, labels: Tensor, batch: Any) -> Tensor:
        counts = (labels != -100).sum(1).double()
        return torch.stack([self.row_losses(outputs, labels) * counts, counts], dim=1)

    def measures(self, statistics: Any) -> Mapping[str, float]:
        total, tokens = statistics.sum(0)
        return {"perplexity": float(np.exp(total / tokens)), "tokens": float(tokens)}


@contextmanager
def registered() -> Iterator[None]:
    """The family and the task in their registries, for a while."""
    FAMILIES.add("made-up", FAMILY)
    TASKS.add(MadeUpTask.name, MadeUpTask)
    try:
        yield
    finally:
        del FAMILIES._items["made-up"]
        del TASKS._items[MadeUpTask.name]


def made_up_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> MadeUpForPuzzles:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MadeUpForPuzzles(MadeUpConfig(vocab_size=VOCABULARY, pad_token_id=0))
        for parameter in model.parameters():
            parameter.data += 0.4 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def made_up_batch(rows: int = 4, seed: int = 0, longest: int = 9) -> dict[str, Tensor]:
    """Padded rows; the labels are the tokens themselves, none at padding."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, longest), generator=chance)
    for row in range(rows):
        ids[row, longest - (row * 2) % (longest - 3) :] = 0
    ids[0] = torch.randint(1, VOCABULARY, (longest,), generator=chance)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
