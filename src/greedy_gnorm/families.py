"""Where each model family keeps its attention: a table. A new family is a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from greedy_gnorm.registry import Registry

Position = tuple[int, ...]
"""The numbers that stand for the `*` of a family's `attention` pattern, such as (layer,) or (group, inner layer)."""


def once(config: Any, position: Position) -> int:
    """Every layer has weights of its own."""
    return 1


def albert_applications(config: Any, position: Position) -> int:
    """How many of ALBERT's layers run through the parameter group at this position."""
    layers_per_group = config.num_hidden_layers / config.num_hidden_groups
    return sum(int(layer / layers_per_group) == position[0] for layer in range(config.num_hidden_layers))


@dataclass(frozen=True)
class Family:
    """One model type: paths of its attention modules in the base model, and of the projections in each.

    `head_count` and `width` name the attributes that count heads and their joint width; they lie beside the query.
    `layer` is the path of the layer around an attention module, where every layer has weights of its own and gets the
    output of the one before; `after_attention` is the module in it behind which no token looks at another.
    `title` is the paper's name for the row of the base model in its parameter tables.
    """

    title: str
    attention: str
    query: str
    key: str
    value: str
    output: str
    head_count: str = "num_attention_heads"
    width: str = "all_head_size"
    applications: Callable[[Any, Position], int] = once
    layer: str | None = None
    after_attention: str | None = None

    @property
    def owner(self) -> str:
        """The path of the module that counts the heads, in the attention module."""
        return self.query.rpartition(".")[0]

    def layout(self) -> dict[str, Any]:
        """What a pruned model's configuration says of where to cut: `modeling_pruned` reads it."""
        return {
            "attention": self.attention,
            "inputs": [self.query, self.key, self.value],
            "output": self.output,
            "owner": self.owner,
            "head_count": self.head_count,
            "width": self.width,
        }


FAMILIES: Registry[Family] = Registry("model family")


def _bert_like(title: str) -> Family:
    return Family(
        title,
        "encoder.layer.*.attention",
        "self.query",
        "self.key",
        "self.value",
        "output.dense",
        layer="encoder.layer.*",
        after_attention="attention.output",
    )


FAMILIES.add("bert", _bert_like("BERT"))
FAMILIES.add("roberta", _bert_like("RoBERTa"))
FAMILIES.add("xlm-roberta", _bert_like("RoBERTa"))
FAMILIES.add("camembert", _bert_like("RoBERTa"))
FAMILIES.add("electra", _bert_like("ELECTRA"))
FAMILIES.add(
    "albert",
    Family(
        "ALBERT",
        "encoder.albert_layer_groups.*.albert_layers.*.attention",
        "query",
        "key",
        "value",
        "dense",
        applications=albert_applications,
    ),
)
FAMILIES.add(
    "distilbert",
    Family(
        "DistilBERT",
        "transformer.layer.*.attention",
        "q_lin",
        "k_lin",
        "v_lin",
        "out_lin",
        head_count="n_heads",
        width="dim",
        layer="transformer.layer.*",
        after_attention="sa_layer_norm",
    ),
)
