"""The number of parameters of a model and its modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from greedy_gnorm.model.families import FAMILIES

MEGABYTE = 2**20


def parameter_count(model: nn.Module) -> int:
    """The number of parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


Counts = list[tuple[str, int]]
"""Titles of modules and their parameters; a title may occur under several modules."""


def module_counts(model: nn.Module) -> Counts:
    """Parameters for the rows of the paper's tables: the model, its base model, its classifier and their parts."""
    base = getattr(model, "base_model", model)
    counts = [("Model", parameter_count(model))]
    config: Any = model.config
    if base is not model:
        counts.append((FAMILIES[config.model_type].title, parameter_count(base)))
    counts += _children(base)
    for name, module in model.named_children():
        if base is not model and module is not base and parameter_count(module):
            counts += [(_title(name), parameter_count(module)), *_children(module)]
    return counts


def _children(module: nn.Module) -> Counts:
    """The parameters of a module's children and of its own weight and bias."""
    parts = [(_title(name), parameter_count(child)) for name, child in module.named_children()]
    parts += [(_title(name), parameter.numel()) for name, parameter in module.named_parameters(recurse=False)]
    return [(name, count) for name, count in parts if count]


TITLES = {
    "transformer": "Encoder",
    "embed_tokens": "Embeddings",
    "wte": "Embeddings",
    "wpe": "Positions",
    "h": "Layers",
    "ln_f": "Norm",
    "final_norm": "Norm",
}
"""Names of modules that say little to a reader."""


def _title(name: str) -> str:
    return TITLES.get(name, name.capitalize())
