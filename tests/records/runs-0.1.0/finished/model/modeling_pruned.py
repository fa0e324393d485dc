"""A transformers model without some of its attention heads, built with the shapes that are left.

This file lies beside the weights of a pruned model and needs nothing but torch and transformers:

    AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)

config.json says which heads are gone (`pruned_heads`, {layer: [heads]}) and where this kind of model keeps its
attention (`pruned_layout`). The name of the class is `Pruned` before the name of transformers' own.
"""

import functools
import re
from typing import Any

import transformers
from torch import nn


class Pruned(nn.Module):
    """Comes before a transformers class and cuts what that class has built, before the weights are read."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        shrink(self, config)


def shrink(model: Any, config: Any) -> None:
    """Give the projections of every pruned attention module the width of the heads it has left."""
    layout, gone_by_site = config.pruned_layout, config.pruned_heads
    pattern = re.compile(re.escape(layout["attention"]).replace(r"\*", r"\d+"))
    sites = [module for name, module in model.base_model.named_modules() if pattern.fullmatch(name)]
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    for site, gone in gone_by_site.items():
        if not (0 <= int(site) < len(sites) and len(set(gone)) == len(gone) and set(gone) <= set(range(heads))):
            raise ValueError(f"pruned_heads in config.json: {site!r}: {gone!r:.200} does not fit {heads} heads a layer")
        module, width = sites[int(site)], (heads - len(gone)) * size
        for name in layout["inputs"]:
            _resize(module.get_submodule(name), "out_features", width)
        _resize(module.get_submodule(layout["output"]), "in_features", width)
        owner = module.get_submodule(layout["owner"])
        setattr(owner, layout["head_count"], heads - len(gone))
        setattr(owner, layout["width"], width)


def _resize(linear: nn.Linear, side: str, width: int) -> None:
    """Fewer inputs or outputs; the values come from the checkpoint."""
    if getattr(linear, side) == width:  # transformers 4 cuts by itself
        return
    setattr(linear, side, width)
    linear.weight = nn.Parameter(linear.weight.detach()[: linear.out_features, : linear.in_features].clone())
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach()[: linear.out_features].clone())


@functools.cache
def pruned_class(plain: Any) -> Any:
    """The pruned form of a class of transformers."""
    # transformers then saves this file, and its name in config.json, with every model of the class
    classifier = "AutoModelForSequenceClassification" if plain.__name__.endswith("ForSequenceClassification") else None
    return type(f"Pruned{plain.__name__}", (Pruned, plain), {"__module__": __name__, "_auto_class": classifier})


def __getattr__(name: str) -> Any:
    """`PrunedBertForSequenceClassification` and all others, made when they are asked for."""
    plain = getattr(transformers, name.removeprefix("Pruned"), None) if name.startswith("Pruned") else None
    if plain is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pruned_class(plain)
