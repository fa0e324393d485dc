"""The supported model families: each row says where a family keeps its units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from greedy_gnorm.registry import Registry
from greedy_gnorm.units import ATTENTION, FFN

Position = tuple[int, ...]
"""The numbers that replace the `*` in a path, such as (layer,) or (group, inner layer)."""


@dataclass(frozen=True)
class LinearMap:
    """A Linear or Conv1D at a path inside the site's module, and the parts of units that its channels hold.

    `layout` says how they are arranged: `plain` (one part, unit by unit), `fused` (all of q, then all of k, then all of
    v) or `interleaved` (q, k and v of the first unit, then those of the second, and so on).
    """

    path: str
    parts: tuple[str, ...]
    layout: str = "plain"


RETURNED = "returned"
"""In place of a path: the layer itself returns the sum, as pre-norm models do after their feed-forward."""


def once(config: Any, position: Position) -> int:
    """The module is applied once: every layer has its own weights."""
    return 1


def always(config: Any) -> bool:
    """Whatever the configuration says."""
    return True


def never(config: Any) -> bool:
    """Whatever the configuration says."""
    return False


@dataclass(frozen=True)
class SiteRow:
    """A kind of module that units can be removed from.

    `inputs` are the linear maps whose outputs belong to units, `output` is the one whose inputs do. `units` and `sizes`
    read from the configuration how many units the unpruned site has and how many channels a unit has in each part. With
    grouped key/value heads, a unit is a key/value head, and its query part is as wide as all query heads of its group.
    `follow` maps the attributes to update after a cut to what they hold: `units`, or the part whose total width it is.
    `cached` says that the module stores keys and values in a cache for generation.
    `sum_at` is the path, from the base model, of the module that receives the output plus the residual, or RETURNED.
    `plain` gives the attributes of an ordinary configuration with so many units in every layer, if there is one.
    """

    kind: str
    path: str
    inputs: tuple[LinearMap, ...]
    output: LinearMap
    units: Callable[[Any], int]
    sizes: Callable[[Any], Mapping[str, int]]
    follow: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False
    sum_at: str | None = None
    plain: Callable[[Any, int], Mapping[str, int]] | None = None
    applications: Callable[[Any, Position], int] = once

    def layout(self, config: Any) -> dict[str, Any]:
        """The row for one configuration as plain values, which `modeling_pruned` uses to cut."""
        maps = [
            {"path": each.path, "parts": list(each.parts), "layout": each.layout}
            for each in (*self.inputs, self.output)
        ]
        return {
            "kind": self.kind,
            "path": self.path,
            "inputs": maps[:-1],
            "output": maps[-1],
            "units": self.units(config),
            "sizes": dict(self.sizes(config)),
            "follow": dict(self.follow),
            "cached": self.cached,
        }


@dataclass(frozen=True)
class Family:
    """A model type and its sites, in the order they run in a layer; paths are relative to the base model.

    `layer` is the path of the layer that contains the sites, if every layer has its own weights and takes the output of
    the one before. `after_attention` is the module in it from which on tokens no longer interact, if it can be given
    some of the tokens alone. `first_token` says whether transformers' classifier reads only the first token.
    `title` is what the paper calls the base model in its parameter tables.
    """

    title: str
    sites: tuple[SiteRow, ...]
    layer: str | None = None
    after_attention: str | None = None
    first_token: Callable[[Any], bool] = always


FAMILIES: Registry[Family] = Registry("model family")


def heads(config: Any) -> int:
    """The number of attention heads of a layer."""
    return int(config.num_attention_heads)


def head_sizes(config: Any) -> dict[str, int]:
    """The channels of a head in its query, key and value; in these families heads divide the hidden size evenly."""
    return dict.fromkeys(("q", "k", "v"), config.hidden_size // config.num_attention_heads)


def attention(
    path: str, inputs: tuple[str, str, str], output: str, *, counts: str, width: str, **options: Any
) -> SiteRow:
    """Attention with three plain projections; `counts` holds the number of heads, `width` their total width."""
    maps = tuple(LinearMap(each, (part,)) for each, part in zip(inputs, ("q", "k", "v"), strict=True))
    follow = {counts: "units", width: "q"}
    return SiteRow(ATTENTION, path, maps, LinearMap(output, ("v",)), heads, head_sizes, follow, **options)


NEURON = "neuron"
"""The only part of a neuron: one channel between the two maps of the feed-forward."""


def feed_forward(path: str, inner: str, outer: str, *, width: str, **options: Any) -> SiteRow:
    """A feed-forward of two linear maps; the attribute `width` of the configuration is its number of neurons."""
    return gated_feed_forward(path, (LinearMap(inner, (NEURON,)),), outer, width=width, **options)


def gated_feed_forward(path: str, inputs: tuple[LinearMap, ...], outer: str, *, width: str, **options: Any) -> SiteRow:
    """A feed-forward whose neurons have a channel in each part of the `inputs`, such as a gate and what it scales."""

    def neurons(config: Any) -> int:
        return int(getattr(config, width))

    def plain(config: Any, count: int) -> dict[str, int]:
        return {width: count}

    sizes = {part: 1 for each in inputs for part in each.parts} | {NEURON: 1}
    options = {"units": neurons, "plain": plain, **options}
    return SiteRow(FFN, path, inputs, LinearMap(outer, (NEURON,)), sizes=lambda config: sizes, **options)


def head_size(config: Any) -> int:
    """The channels of a head, which a configuration may state."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def groups(config: Any) -> int:
    """The number of key/value heads of a layer."""
    return int(config.num_key_value_heads)


def group_sizes(config: Any) -> dict[str, int]:
    """The channels of a key/value head with its query heads; what they give has the width of the queries."""
    size = head_size(config)
    queries = size * (config.num_attention_heads // config.num_key_value_heads)
    return {"q": queries, "k": size, "v": size, "context": queries}


def plain_groups(config: Any, count: int) -> dict[str, int]:
    """The configuration with so many key/value heads, each with as many query heads as before."""
    queries = config.num_attention_heads // config.num_key_value_heads
    return {"head_dim": head_size(config), "num_key_value_heads": count, "num_attention_heads": count * queries}


def albert_applications(config: Any, position: Position) -> int:
    """How many of ALBERT's layers use the parameter group at this position."""
    layers_per_group = config.num_hidden_layers / config.num_hidden_groups
    return sum(int(layer / layers_per_group) == position[0] for layer in range(config.num_hidden_layers))


def _bert_like(title: str) -> Family:
    layer = "encoder.layer.*"
    rows = (
        attention(
            f"{layer}.attention",
            ("self.query", "self.key", "self.value"),
            "output.dense",
            counts="self.num_attention_heads",
            width="self.all_head_size",
            sum_at=f"{layer}.attention.output.LayerNorm",
        ),
        feed_forward(
            layer, "intermediate.dense", "output.dense", width="intermediate_size", sum_at=f"{layer}.output.LayerNorm"
        ),
    )
    return Family(title, rows, layer=layer, after_attention="attention.output")


def _albert() -> Family:
    layer = "encoder.albert_layer_groups.*.albert_layers.*"
    rows = (
        attention(
            f"{layer}.attention",
            ("query", "key", "value"),
            "dense",
            counts="num_attention_heads",
            width="all_head_size",
            sum_at=f"{layer}.attention.LayerNorm",
            applications=albert_applications,
        ),
        feed_forward(
            layer,
            "ffn",
            "ffn_output",
            width="intermediate_size",
            sum_at=f"{layer}.full_layer_layer_norm",
            applications=albert_applications,
        ),
    )
    return Family("ALBERT", rows)


def _distilbert() -> Family:
    layer = "transformer.layer.*"
    rows = (
        attention(
            f"{layer}.attention",
            ("q_lin", "k_lin", "v_lin"),
            "out_lin",
            counts="n_heads",
            width="dim",
            sum_at=f"{layer}.sa_layer_norm",
        ),
        feed_forward(f"{layer}.ffn", "lin1", "lin2", width="hidden_dim", sum_at=f"{layer}.output_layer_norm"),
    )
    return Family("DistilBERT", rows, layer=layer, after_attention="sa_layer_norm")


def _llama_like(title: str) -> Family:
    layer = "layers.*"
    rows = (
        SiteRow(
            ATTENTION,
            f"{layer}.self_attn",
            (LinearMap("q_proj", ("q",)), LinearMap("k_proj", ("k",)), LinearMap("v_proj", ("v",))),
            LinearMap("o_proj", ("context",)),
            groups,
            group_sizes,
            cached=True,
            sum_at=f"{layer}.post_attention_layernorm",
            plain=plain_groups,
        ),
        gated_feed_forward(
            f"{layer}.mlp",
            (LinearMap("gate_proj", ("gate",)), LinearMap("up_proj", ("up",))),
            "down_proj",
            width="intermediate_size",
            follow={"intermediate_size": "units"},
            sum_at=RETURNED,
        ),
    )
    return Family(title, rows, layer=layer, first_token=never)


def _gpt2() -> Family:
    layer = "h.*"
    rows = (
        SiteRow(
            ATTENTION,
            f"{layer}.attn",
            (LinearMap("c_attn", ("q", "k", "v"), "fused"),),
            LinearMap("c_proj", ("v",)),
            heads,
            head_sizes,
            {"num_heads": "units", "split_size": "q"},
            cached=True,
            sum_at=f"{layer}.ln_2",
        ),
        feed_forward(
            f"{layer}.mlp",
            "c_fc",
            "c_proj",
            width="n_inner",
            units=lambda config: int(config.n_inner or 4 * config.hidden_size),
            sum_at=RETURNED,
        ),
    )
    return Family("GPT-2", rows, layer=layer, first_token=never)


def _modernbert() -> Family:
    layer = "layers.*"
    rows = (
        SiteRow(
            ATTENTION,
            f"{layer}.attn",
            (LinearMap("Wqkv", ("q", "k", "v"), "fused"),),
            LinearMap("Wo", ("v",)),
            heads,
            head_sizes,
            sum_at=f"{layer}.mlp_norm",
        ),
        gated_feed_forward(
            f"{layer}.mlp",
            (LinearMap("Wi", ("input", "gate"), "fused"),),
            "Wo",
            width="intermediate_size",
            sum_at=RETURNED,
        ),
    )
    return Family("ModernBERT", rows, layer=layer, first_token=lambda config: config.classifier_pooling == "cls")


FAMILIES.add("bert", _bert_like("BERT"))
FAMILIES.add("roberta", _bert_like("RoBERTa"))
FAMILIES.add("xlm-roberta", _bert_like("RoBERTa"))
FAMILIES.add("camembert", _bert_like("RoBERTa"))
FAMILIES.add("electra", _bert_like("ELECTRA"))
FAMILIES.add("albert", _albert())
FAMILIES.add("distilbert", _distilbert())
FAMILIES.add("modernbert", _modernbert())
FAMILIES.add("gpt2", _gpt2())
FAMILIES.add("llama", _llama_like("Llama"))
FAMILIES.add("mistral", _llama_like("Mistral"))
FAMILIES.add("qwen2", _llama_like("Qwen2"))
FAMILIES.add("qwen3", _llama_like("Qwen3"))
