"""The supported model families: each row says where a family keeps its units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from greedy_gnorm.errors import UnsupportedModel
from greedy_gnorm.registry import Registry
from greedy_gnorm.units import ATTENTION, FFN

if TYPE_CHECKING:
    from torch import Tensor

Position = tuple[int, ...]
"""The numbers that replace the `*` in a path, such as (layer,) or (group, inner layer)."""


@dataclass(frozen=True)
class LinearMap:
    """A Linear or Conv1D at a path inside the site's module, and the parts of units that its channels hold.

    `layout` says how they are arranged: `plain` (one part, unit by unit), `fused` (all of q, then all of k, then all of
    v) or `interleaved` (q, k and v of the first unit, then those of the second, and so on). In a fused map a part may
    be named several times, if a unit has channels in several places: the queries of a unit with a head in each group.
    """

    path: str
    parts: tuple[str, ...]
    layout: str = "plain"


RETURNED = "returned"
"""In place of a path: the layer itself returns the sum, as pre-norm models do after their feed-forward."""


@dataclass(frozen=True)
class Positions:
    """Relative positions that an attention compares tokens with: `count` vectors, the same for all rows.

    Linear maps read them as they read tokens: those at the paths `shared` with the tokens, and the maps `own` for
    nothing else. `products` is how often every token is compared with every position.
    """

    count: int
    shared: tuple[str, ...] = ()
    own: tuple[LinearMap, ...] = ()
    products: int = 0


NO_POSITIONS = Positions(0)


def no_positions(config: Any) -> Positions:
    """The attention compares tokens only with one another."""
    return NO_POSITIONS


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
    grouped key/value heads, a unit is a key/value head, and its query part is as wide as all query heads of its group;
    or it has one query head of each group, and keys and values belong to no unit.
    `follow` maps the attributes to update after a cut to what they hold: `units`, or the part whose total width it is.
    `sum_at` is the path, from the base model, of the module that receives the output plus the residual, or RETURNED.
    `plain` gives the attributes of an ordinary configuration with so many units in every layer, if there is one.
    `variants` maps the modules that can't do with fewer units to what they turn into, as `modeling_pruned` names it.
    `map_at` is the module that receives the attention map, where a family does not use transformers' interface for it.
    """

    kind: str
    path: str
    inputs: tuple[LinearMap, ...]
    output: LinearMap
    units: Callable[[Any], int]
    sizes: Callable[[Any], Mapping[str, int]]
    follow: Mapping[str, str] = field(default_factory=dict)
    sum_at: str | None = None
    plain: Callable[[Any, int], Mapping[str, int]] | None = None
    applications: Callable[[Any, Position], int] = once
    variants: Mapping[str, str] = field(default_factory=dict)
    positions: Callable[[Any], Positions] = no_positions
    map_at: str | None = None

    def layout(self, config: Any) -> dict[str, Any]:
        """The row for one configuration as plain values, which `modeling_pruned` uses to cut."""
        maps = [
            {"path": each.path, "parts": list(each.parts), "layout": each.layout}
            for each in (*self.inputs, *self.positions(config).own, self.output)
        ]
        return {
            "kind": self.kind,
            "path": self.path,
            "inputs": maps[:-1],
            "output": maps[-1],
            "units": self.units(config),
            "sizes": dict(self.sizes(config)),
            "follow": dict(self.follow),
            "variants": dict(self.variants),
        }


def itself(output: Tensor) -> Tensor:
    """The layer returns its output alone."""
    return output


@dataclass(frozen=True)
class Family:
    """A model type and its sites, in the order they run in a layer; paths are relative to the base model.

    `layer` is the path of the layer that contains the sites, if every layer has its own weights and takes the output of
    the one before. `after_attention` is the module in it from which on tokens no longer interact, if it can be given
    some of the tokens alone. `first_token` says whether transformers' classifier reads only the first token.
    `returns` turns the output of a layer into what it returns, and `between` says whether the model changes it before
    the next layer. `each_group` is the attention of a configuration with grouped key/value heads whose units have one
    query head of each group.
    `image_tokens` gives the tokens of an image, which the configuration fixes; models without it read text.
    `title` is what the paper calls the base model in its parameter tables.
    """

    title: str
    sites: tuple[SiteRow, ...]
    layer: str | None = None
    after_attention: str | None = None
    first_token: Callable[[Any], bool] = always
    returns: Callable[[Tensor], Any] = itself
    between: Callable[[Any], bool] = never
    image_tokens: Callable[[Any], int] | None = None
    each_group: Callable[[Any], SiteRow] | None = None

    def rows(self, config: Any) -> tuple[SiteRow, ...]:
        """The sites of a model with this configuration, which says what its units are where heads come in groups."""
        mode = recorded_group_queries(config)
        if mode == WHOLE:
            return self.sites
        if mode != EACH or self.each_group is None:
            raise UnsupportedModel(f"{GROUP_QUERIES} in the configuration can't be {mode!r} for this model.")
        attention = self.each_group(config)
        return tuple(attention if row.kind == ATTENTION else row for row in self.sites)


GROUP_QUERIES = "pruned_group_queries"
"""The attribute of a configuration that says how heads in groups are removed; without it, in whole groups."""
WHOLE, EACH = "whole", "each"
"""Whole groups, or one query head from each group."""


def recorded_group_queries(config: Any) -> str:
    """How heads in groups are removed from the model of this configuration: WHOLE or EACH."""
    return str(getattr(config, GROUP_QUERIES, WHOLE))


FAMILIES: Registry[Family] = Registry("model family")


def image_tokens(config: Any) -> int | None:
    """The tokens of an image, all images alike; None where a model reads text."""
    count = FAMILIES[config.model_type].image_tokens if config.model_type in FAMILIES else None
    return None if count is None else count(config)


def sides(size: Any) -> Sequence[int]:
    """Height and width, which may be given as one number."""
    return size if isinstance(size, Sequence) else (size, size)


def heads(config: Any) -> int:
    """The number of attention heads of a layer."""
    return int(config.num_attention_heads)


def head_sizes(config: Any) -> dict[str, int]:
    """The channels of a head in its query, key and value; in these families heads divide the hidden size evenly."""
    return dict.fromkeys(("q", "k", "v"), config.hidden_size // config.num_attention_heads)


def attention(
    path: str, inputs: tuple[str, str, str], output: str, *, counts: str, width: str | None = None, **options: Any
) -> SiteRow:
    """Attention with three plain projections; `counts` holds the number of heads, `width` their total width, if any."""
    maps = tuple(LinearMap(each, (part,)) for each, part in zip(inputs, ("q", "k", "v"), strict=True))
    follow = {counts: "units"} | ({} if width is None else {width: "q"})
    options = {"sizes": head_sizes, "follow": follow, **options}
    return SiteRow(ATTENTION, path, maps, LinearMap(output, ("v",)), heads, **options)


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
    queries = size * query_heads(config)
    return {"q": queries, "k": size, "v": size, "context": queries}


def plain_groups(config: Any, count: int) -> dict[str, int]:
    """The configuration with so many key/value heads, each with as many query heads as before."""
    heads = count * query_heads(config)
    return {"head_dim": head_size(config), "num_key_value_heads": count, "num_attention_heads": heads}


def query_heads(config: Any) -> int:
    """The number of query heads that share a key/value head."""
    return int(config.num_attention_heads // config.num_key_value_heads)


def query_head_sizes(config: Any) -> dict[str, int]:
    """The channels of a query head, and of what it gives."""
    return dict.fromkeys(("q", "context"), head_size(config))


def plain_query_heads(config: Any, count: int) -> dict[str, int]:
    """The configuration with as many key/value heads as before, each with so many query heads."""
    return {"head_dim": head_size(config), "num_attention_heads": count * config.num_key_value_heads}


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
    whole_groups = SiteRow(
        ATTENTION,
        f"{layer}.self_attn",
        (LinearMap("q_proj", ("q",)), LinearMap("k_proj", ("k",)), LinearMap("v_proj", ("v",))),
        LinearMap("o_proj", ("context",)),
        groups,
        group_sizes,
        variants={"": "cached"},
        sum_at=f"{layer}.post_attention_layernorm",
        plain=plain_groups,
    )

    def each_group(config: Any) -> SiteRow:
        return replace(
            whole_groups,
            inputs=(LinearMap("q_proj", ("q",) * groups(config), "fused"),),
            output=LinearMap("o_proj", ("context",) * groups(config), "fused"),
            units=query_heads,
            sizes=query_head_sizes,
            follow={"num_key_value_groups": "units"},
            plain=plain_query_heads,
        )

    rows = (
        whole_groups,
        gated_feed_forward(
            f"{layer}.mlp",
            (LinearMap("gate_proj", ("gate",)), LinearMap("up_proj", ("up",))),
            "down_proj",
            width="intermediate_size",
            follow={"intermediate_size": "units"},
            sum_at=RETURNED,
        ),
    )
    return Family(title, rows, layer=layer, first_token=never, each_group=each_group)


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
            variants={"": "cached"},
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


def deberta_head_sizes(config: Any) -> dict[str, int]:
    """The channels of a head, also in the maps that read nothing but relative positions."""
    return dict.fromkeys(("q", "k", "v", "position q", "position k"), head_sizes(config)["q"])


def deberta_positions(config: Any) -> Positions:
    """Tokens' queries are compared with the keys of positions (c2p), tokens' keys with their queries (p2c)."""
    if not config.relative_attention:
        return NO_POSITIONS
    kinds = config.pos_att_type or ()
    buckets = getattr(config, "position_buckets", -1)
    reach = config.max_relative_positions if config.max_relative_positions > 0 else config.max_position_embeddings
    count = 2 * (buckets if buckets > 0 else reach)
    products = sum(kind in kinds for kind in ("c2p", "p2c"))
    if getattr(config, "share_att_key", False):
        return Positions(count, shared=("self.query_proj", "self.key_proj"), products=products)
    maps = {
        "c2p": LinearMap("self.pos_key_proj", ("position k",)),
        "p2c": LinearMap("self.pos_query_proj", ("position q",)),
    }
    return Positions(count, own=tuple(maps[kind] for kind in maps if kind in kinds), products=products)


def _deberta_v2() -> Family:
    layer = "encoder.layer.*"
    rows = (
        attention(
            f"{layer}.attention",
            ("self.query_proj", "self.key_proj", "self.value_proj"),
            "output.dense",
            counts="self.num_attention_heads",
            width="self.all_head_size",
            sizes=deberta_head_sizes,
            sum_at=f"{layer}.attention.output.LayerNorm",
            variants={"self": "may be empty"},
            positions=deberta_positions,
            map_at="self.dropout",
        ),
        feed_forward(
            layer, "intermediate.dense", "output.dense", width="intermediate_size", sum_at=f"{layer}.output.LayerNorm"
        ),
    )
    return Family(
        "DeBERTa",
        rows,
        layer=layer,
        after_attention="attention.output",
        returns=lambda output: (output, None),
        between=lambda config: getattr(config, "conv_kernel_size", 0) > 0,
    )


def _mpnet() -> Family:
    layer = "encoder.layer.*"
    rows = (
        attention(
            f"{layer}.attention",
            ("attn.q", "attn.k", "attn.v"),
            "attn.o",
            counts="attn.num_attention_heads",
            width="attn.all_head_size",
            sum_at=f"{layer}.attention.LayerNorm",
            variants={"": "sliced bias"},
            map_at="attn.dropout",
        ),
        feed_forward(
            layer, "intermediate.dense", "output.dense", width="intermediate_size", sum_at=f"{layer}.output.LayerNorm"
        ),
    )
    return Family("MPNet", rows, layer=layer, after_attention="attention.LayerNorm", returns=lambda output: (output,))


def _vit() -> Family:
    layer = "layers.*"
    rows = (
        attention(
            f"{layer}.attention",
            ("q_proj", "k_proj", "v_proj"),
            "o_proj",
            counts="num_attention_heads",
            sum_at=f"{layer}.layernorm_after",
        ),
        feed_forward(f"{layer}.mlp", "fc1", "fc2", width="intermediate_size", sum_at=RETURNED),
    )
    return Family("ViT", rows, layer=layer, image_tokens=_patches_and_class)


def _patches_and_class(config: Any) -> int:
    """A token for every patch, and the one that the classifier reads."""
    across, down = (
        image // patch for image, patch in zip(sides(config.image_size), sides(config.patch_size), strict=True)
    )
    return int(across * down) + 1


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
FAMILIES.add("deberta-v2", _deberta_v2())
FAMILIES.add("mpnet", _mpnet())
FAMILIES.add("vit", _vit())
