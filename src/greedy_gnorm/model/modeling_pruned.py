"""A transformers model without some of its units, built with the shapes that are left.

This file is saved with the weights of a pruned model and requires only torch and transformers:

    AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)

or with the auto class of another task. config.json says which heads were removed (`pruned_heads`, {layer: [heads]}) and
where this kind of model keeps its units (`pruned_layout`). The class is called `Pruned` plus the name of the class in
transformers.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

RECORDS = {"attention": "pruned_heads", "ffn": "pruned_neurons"}
"""The attribute of a configuration that records removed units, by kind of site: {site: [units]}."""

AUTO_CLASSES = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMultipleChoice": "AutoModelForMultipleChoice",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "Model": "AutoModel",
}
"""The auto class that loads a class of transformers, by the end of its name."""


def plain(units: int, sizes: Sequence[int]) -> list[list[range]]:
    """One part: the channels of the first unit, then those of the second, and so on."""
    return fused(units, sizes)


def fused(units: int, sizes: Sequence[int]) -> list[list[range]]:
    """Several parts one after another, each with the channels of all units."""
    starts = [units * sum(sizes[:part]) for part in range(len(sizes))]
    return [
        [range(start + unit * size, start + (unit + 1) * size) for unit in range(units)]
        for start, size in zip(starts, sizes, strict=True)
    ]


def interleaved(units: int, sizes: Sequence[int]) -> list[list[range]]:
    """All parts of the first unit, then all parts of the second, and so on."""
    block = sum(sizes)
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        [range(unit * block + start, unit * block + start + size) for unit in range(units)]
        for start, size in zip(starts, sizes, strict=True)
    ]


LAYOUTS: dict[str, Callable[[int, Sequence[int]], list[list[range]]]] = {
    layout.__name__: layout for layout in (plain, fused, interleaved)
}
"""How units are arranged among the channels of a linear map: for each part, the channels of each unit.

Grouped key/value heads need no layout of their own. If the unit is a key/value head, its query part is wider. If it has
one query head of each group, a fused map names the part once for each group.
"""


def unit_channels(linear_map: dict[str, Any], units: int, sizes: dict[str, int]) -> dict[str, list[list[int]]]:
    """The channels of each unit, for each part of a linear map."""
    parts = linear_map["parts"]
    channels: dict[str, list[list[int]]] = {part: [[] for _ in range(units)] for part in parts}
    for part, found in zip(parts, LAYOUTS[linear_map["layout"]](units, [sizes[part] for part in parts]), strict=True):
        for own, more in zip(channels[part], found, strict=True):
            own += more
    return channels


def unit_width(linear_map: dict[str, Any], sizes: dict[str, int]) -> int:
    """The channels of a unit in all parts of a linear map."""
    return sum(sizes[part] for part in linear_map["parts"])


Change = Callable[[nn.Module, str, int, dict[str, Any]], Tensor]
"""Takes a linear map, the name of a parameter, the dimension of the units and the map's layout; returns new values."""


def set_units(site: nn.Module, layout: dict[str, Any], units: Sequence[int], change: Change) -> None:
    """Set the units of a site: `change` makes the new parameters, and dependent attributes and classes are updated."""
    count = len(units)
    maps = [*((each, "out") for each in layout["inputs"]), (layout["output"], "in")]
    for linear_map, side in maps:
        linear = site.get_submodule(linear_map["path"])
        transposed = isinstance(linear, Conv1D)
        along = {"weight": int((side == "in") != transposed)} | ({"bias": 0} if side == "out" else {})
        width = count * unit_width(linear_map, layout["sizes"])
        attribute = {"out": ("out_features", "nf"), "in": ("in_features", "nx")}[side][transposed]
        if getattr(linear, attribute) == width:
            continue
        for name, dim in along.items():
            parameter = getattr(linear, name)
            if parameter is not None:
                new = change(linear, name, dim, linear_map)
                setattr(linear, name, nn.Parameter(new, requires_grad=parameter.requires_grad))
        setattr(linear, attribute, width)
        if transposed and side == "in":
            _change_class(linear, Conv1D if width else OnlyBias)
    for path, what in layout["follow"].items():
        owner, _, name = path.rpartition(".")
        setattr(site.get_submodule(owner), name, count * (1 if what == "units" else layout["sizes"][what]))
    for path, name in layout.get("variants", {}).items():
        left = None if count == layout["units"] else {"units": list(units), "output_path": layout["output"]["path"]}
        _use_variant(site.get_submodule(path), name, left)


class Variant(nn.Module):
    """A mixin for a module whose own code can't do with fewer units.

    `units` are those that are left, `output_path` is the output map of the site.
    """

    units: list[int]
    output_path: str
    variant: str
    plain_class: Any

    def __reduce__(self) -> Any:
        """Copies and pickles make the class again, because no module has it under its name."""
        return _new_variant, (self.variant, self.plain_class), vars(self)


class SlicedBias(Variant):
    """Attention that is given a bias with a slice for each head of the unpruned model, the same for all layers."""

    def forward(self, *arguments: Any, position_bias: Tensor | None = None, **options: Any) -> Any:
        if position_bias is not None:
            heads = torch.tensor(self.units, dtype=torch.long, device=position_bias.device)
            position_bias = position_bias.index_select(1, heads)
        return super().forward(*arguments, position_bias=position_bias, **options)


class MayBeEmpty(Variant):
    """Attention that divides by its number of heads: without any, its output has no channels, and there is no map."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        if self.units:
            return super().forward(hidden_states, *arguments, **options)
        rows, tokens = hidden_states.shape[:2]
        return hidden_states[..., :0], hidden_states.new_zeros(rows, 0, tokens, tokens)


class Cached(Variant):
    """Attention of a decoder, which stores keys and values for generation.

    Without heads it returns the bias of its output map. The cache then gets a zero for each token, because transformers
    reads there how many tokens it has seen.
    """

    layer_idx: int

    def forward(self, hidden_states: Tensor, *arguments: Any, past_key_values: Any = None, **options: Any) -> Any:
        if self.units:
            return super().forward(hidden_states, *arguments, past_key_values=past_key_values, **options)
        rows, tokens, _ = hidden_states.shape
        if past_key_values is not None:
            zeros = hidden_states.new_zeros(rows, 1, tokens, 1)
            past_key_values.update(zeros, zeros, self.layer_idx)
        no_maps = hidden_states.new_zeros(rows, 0, tokens, tokens)
        return self.get_submodule(self.output_path)(hidden_states[..., :0]), no_maps


VARIANTS: dict[str, type[Variant]] = {"sliced bias": SlicedBias, "may be empty": MayBeEmpty, "cached": Cached}
"""What modules turn into when they lose units, where their own code is not enough."""


@functools.cache
def variant_class(name: str, plain_class: Any) -> Any:
    """A variant of a class of transformers."""
    names = {"__module__": __name__, "variant": name, "plain_class": plain_class}
    return type(f"{VARIANTS[name].__name__}{plain_class.__name__}", (VARIANTS[name], plain_class), names)


def _new_variant(name: str, plain_class: Any) -> Any:
    return nn.Module.__new__(variant_class(name, plain_class))


def _use_variant(module: nn.Module, name: str, left: dict[str, Any] | None) -> None:
    """Change a module's class to the variant for what is left; None stands for all units, which need no variant."""
    plain_class: Any = getattr(module, "plain_class", type(module))
    _change_class(module, plain_class if left is None else variant_class(name, plain_class))
    for attribute in ("units", "output_path"):
        vars(module).pop(attribute, None)
    vars(module).update(left or {})


class OnlyBias(Conv1D):
    """A Conv1D without inputs, which transformers' own can't run."""

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor = self.bias
        return bias.expand(*x.shape[:-1], -1)


def _change_class(module: Any, new_class: Any) -> None:
    """Change the class of a module, even if accelerate has wrapped its forward function."""
    if type(module) is new_class:
        return
    module.__class__ = new_class
    if "_old_forward" in vars(module):
        module._old_forward = new_class.forward.__get__(module)


def keep_units(
    site: nn.Module, layout: dict[str, Any], units: Sequence[int], places: Sequence[int], take: Change | None = None
) -> None:
    """Keep the units at these places among those that the site has."""

    def change(linear: nn.Module, name: str, dim: int, linear_map: dict[str, Any]) -> Tensor:
        parameter: Tensor = getattr(linear, name)
        channels = kept_channels(linear_map, layout, len(units), places)
        return parameter.detach().index_select(dim, torch.tensor(channels, dtype=torch.long, device=parameter.device))

    set_units(site, layout, [units[place] for place in places], take or change)


def kept_channels(linear_map: dict[str, Any], layout: dict[str, Any], count: int, places: Sequence[int]) -> list[int]:
    """The channels of the units at these places; sorted, they have the same layout with fewer units."""
    sizes = [layout["sizes"][part] for part in linear_map["parts"]]
    parts = LAYOUTS[linear_map["layout"]](count, sizes)
    return sorted(channel for units in parts for place in places for channel in units[place])


class Pruned(nn.Module):
    """A mixin for a transformers class: it cuts the newly built model before the weights are loaded."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        shrink(self, config)

    def _get_static_cache_init_shape(self) -> None:
        """A static cache takes its shapes from the layers, which differ, not from the configuration."""


def shrink(model: Any, config: Any) -> None:
    """Reduce every pruned site to the units that are left; the values are loaded later."""
    for kind, record in RECORDS.items():
        sites = _sites_of_kind(model, config.pruned_layout, kind)
        for number, gone in (getattr(config, record, None) or {}).items():
            module, layout = sites[int(number)] if 0 <= int(number) < len(sites) else (None, {"units": 0})
            units = range(layout["units"])
            if module is None or len(set(gone)) < len(gone) or not set(gone) <= set(units):
                raise ValueError(f"{record} in config.json: {number!r}: {gone!r:.200} does not fit this model")
            keep_units(module, layout, units, [unit for unit in units if unit not in set(gone)])


def _sites_of_kind(model: Any, layouts: list[dict[str, Any]], kind: str) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The sites of one kind with their layouts, in the order they run."""
    found = []
    for row, layout in enumerate(layouts):
        if layout["kind"] == kind:
            pattern = re.compile(re.escape(layout["path"]).replace(r"\*", r"(\d+)"))
            for name, module in model.base_model.named_modules():
                if match := pattern.fullmatch(name):
                    found.append((tuple(map(int, match.groups())), row, module, layout))
    return [(module, layout) for _, _, module, layout in sorted(found, key=lambda each: each[:2])]


@functools.cache
def pruned_class(plain_class: Any) -> Any:
    """The pruned version of a class of transformers."""
    # With `_auto_class` set, transformers saves this file, and names it in config.json, with every model of the class
    auto_class = auto_class_of(plain_class)
    names = {"__module__": __name__, "_auto_class": auto_class}
    pruned = type(f"Pruned{plain_class.__name__}", (Pruned, plain_class), names)
    if auto_class is not None:
        _register(pruned, getattr(transformers, auto_class))
    return pruned


def auto_class_of(model_class: type) -> str | None:
    """The auto class that loads models of a class, if this file supports it.

    A class that is not one of transformers, nor named like one, is taken for a sequence classifier.
    """
    for each in model_class.__mro__:
        if each.__name__.endswith("PreTrainedModel"):
            break
        for ending, auto_class in AUTO_CLASSES.items():
            if each.__name__.endswith(ending):
                return auto_class
        if "For" in each.__name__ or each.__module__.startswith("transformers.models."):
            return None
    return "AutoModelForSequenceClassification"


def _register(pruned: Any, auto_class: Any) -> None:
    """Make a class known to transformers, whose pipelines complain about models that no auto class knows.

    The key is a configuration class of its own, so that unpruned models still get transformers' own class.
    """
    plain_config = pruned.config_class
    key = type(plain_config.__name__, (plain_config,), {"__module__": __name__})
    auto_class.register(key, pruned, exist_ok=True)


def __getattr__(name: str) -> Any:
    """Create `PrunedBertForSequenceClassification` and the like on demand."""
    plain_class = getattr(transformers, name.removeprefix("Pruned"), None) if name.startswith("Pruned") else None
    if plain_class is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pruned_class(plain_class)
