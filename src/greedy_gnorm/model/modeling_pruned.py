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

Grouped key/value heads need no layout of their own: the unit is a key/value head, and its query part is wider.
"""


def unit_channels(linear_map: dict[str, Any], units: int, sizes: dict[str, int]) -> dict[str, list[range]]:
    """The channels of each unit, for each part of a linear map."""
    parts = linear_map["parts"]
    channels = LAYOUTS[linear_map["layout"]](units, [sizes[part] for part in parts])
    return dict(zip(parts, channels, strict=True))


Change = Callable[[nn.Module, str, int, dict[str, Any]], Tensor]
"""Takes a linear map, the name of a parameter, the dimension of the units and the map's layout; returns new values."""


def set_units(site: nn.Module, layout: dict[str, Any], count: int, change: Change) -> None:
    """Set the number of units of a site: `change` makes the new parameters, and dependent attributes are updated."""
    maps = [*((each, "out") for each in layout["inputs"]), (layout["output"], "in")]
    for linear_map, side in maps:
        linear = site.get_submodule(linear_map["path"])
        transposed = isinstance(linear, Conv1D)
        along = {"weight": int((side == "in") != transposed)} | ({"bias": 0} if side == "out" else {})
        width = count * sum(layout["sizes"][part] for part in linear_map["parts"])
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
    if layout.get("cached"):
        # by name, because a model that transformers loaded has the classes of the file beside its weights
        own = next(each for each in type(site).__mro__ if not each.__name__.startswith("Headless"))
        _change_class(site, own if count else headless_class(own, layout["output"]["path"]))
    for path, what in layout["follow"].items():
        owner, _, name = path.rpartition(".")
        setattr(site.get_submodule(owner), name, count * (1 if what == "units" else layout["sizes"][what]))


class OnlyBias(Conv1D):
    """A Conv1D without inputs, which transformers' own can't run."""

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor = self.bias
        return bias.expand(*x.shape[:-1], -1)


class Headless(nn.Module):
    """A mixin for the attention of a decoder without heads: it returns the bias of its output map.

    The cache for generation gets a zero for each token: transformers reads there how many tokens it has seen.
    """

    output_path: str
    layer_idx: int

    def forward(
        self, hidden_states: Tensor, *arguments: Any, past_key_values: Any = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        rows, tokens, _ = hidden_states.shape
        if past_key_values is not None:
            zeros = hidden_states.new_zeros(rows, 1, tokens, 1)
            past_key_values.update(zeros, zeros, self.layer_idx)
        no_maps = hidden_states.new_zeros(rows, 0, tokens, tokens)
        return self.get_submodule(self.output_path)(hidden_states[..., :0]), no_maps


@functools.cache
def headless_class(plain_class: Any, output_path: str) -> Any:
    """The version without heads of an attention class of transformers."""
    names = {"__module__": __name__, "output_path": output_path}
    return type(f"Headless{plain_class.__name__}", (Headless, plain_class), names)


def _change_class(module: Any, new_class: Any) -> None:
    """Change the class of a module, even if accelerate has wrapped its forward function."""
    if type(module) is new_class:
        return
    module.__class__ = new_class
    if "_old_forward" in vars(module):
        module._old_forward = new_class.forward.__get__(module)


def keep_units(
    site: nn.Module, layout: dict[str, Any], count: int, places: Sequence[int], take: Change | None = None
) -> None:
    """Keep the units at these places among the `count` that the site has."""

    def change(linear: nn.Module, name: str, dim: int, linear_map: dict[str, Any]) -> Tensor:
        parameter: Tensor = getattr(linear, name)
        channels = kept_channels(linear_map, layout, count, places)
        return parameter.detach().index_select(dim, torch.tensor(channels, dtype=torch.long, device=parameter.device))

    set_units(site, layout, len(places), take or change)


def kept_channels(linear_map: dict[str, Any], layout: dict[str, Any], count: int, places: Sequence[int]) -> list[int]:
    """The channels of the units at these places; sorted, they have the same layout with fewer units."""
    channels = unit_channels(linear_map, count, layout["sizes"])
    return sorted(channel for units in channels.values() for place in places for channel in units[place])


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
            keep_units(module, layout, len(units), [unit for unit in units if unit not in set(gone)])


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
