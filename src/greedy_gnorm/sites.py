"""find_sites: the attention modules of a model, and the heads that are left in each."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from torch import Tensor, nn

from greedy_gnorm.errors import UnsupportedModel
from greedy_gnorm.families import FAMILIES, Family
from greedy_gnorm.heads import Head, Matrix, by_site
from greedy_gnorm.savings import Kept, Savings


@dataclass(eq=False)
class AttentionSite:
    """One attention module: its projections, its heads (in original numbering), how often the model applies it."""

    index: int
    name: str
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    owner: nn.Module
    family: Family
    head_size: int
    total: int
    survivors: list[int]
    applications: int
    gate: tuple[float, ...] | None = None  # factors on the survivors, while gates are set

    @property
    def state(self) -> Hashable:
        """What the module computes with, besides its weights: two passes in equal states give equal outputs."""
        return tuple(self.survivors), self.gate

    @property
    def projections(self) -> dict[str, nn.Linear]:
        """The three whose gradients the paper scores."""
        return {"q": self.query, "k": self.key, "v": self.value}

    def parameters_per_head(self) -> int:
        """What removing one head saves: its q, k, v rows with their biases and its o columns."""
        rows = sum(linear.in_features + (linear.bias is not None) for linear in self.projections.values())
        return self.head_size * (rows + self.output.out_features)

    def __str__(self) -> str:
        return f"site {self.index} ({self.name})"


class Sites(Sequence[AttentionSite]):
    """All attention sites of one model, in the order they run.

    `layers` are the modules around them, one each, where every layer runs once and hands its output to the next.
    """

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite], layers: Sequence[nn.Module] = ()) -> None:
        self.model = model
        self.layers = list(layers)
        self._sites = list(sites)
        self.use(Savings())

    def use(self, savings: Savings) -> Sites:
        """Choose how passes over this model save work; what an earlier choice kept is dropped."""
        self.savings = savings
        self.kept = Kept(savings.kept_bytes)
        return self

    @overload
    def __getitem__(self, index: int) -> AttentionSite: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttentionSite]: ...
    def __getitem__(self, index: int | slice) -> AttentionSite | list[AttentionSite]:
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[AttentionSite]:
        return iter(self._sites)

    @property
    def shape(self) -> tuple[int, int]:
        """Sites x heads of the unpruned model."""
        return len(self), max(site.total for site in self)

    def survivors(self) -> list[Head]:
        """The heads that are left, by (site, head)."""
        return [Head(site.index, index) for site in self for index in site.survivors]

    def removed(self) -> list[Head]:
        """The heads that are gone, by (site, head)."""
        gone = {Head(site.index, index) for site in self for index in range(site.total)}
        return sorted(gone - set(self.survivors()))

    def expand(self, rows: Sequence[Sequence[float] | Matrix]) -> Matrix:
        """A value per surviving head, site by site, as the full (sites, heads) matrix with NaN for the rest."""
        matrix = np.full(self.shape, np.nan)
        for site, row in zip(self, rows, strict=True):
            matrix[site.index, site.survivors] = row
        return matrix


def find_sites(model: nn.Module) -> Sites:
    """The attention sites of a supported model, pruned or not; UnsupportedModel for any other."""
    config: Any = getattr(model, "config", None)
    model_type = str(getattr(config, "model_type", ""))
    if model_type not in FAMILIES:
        found = f"model type {model_type!r}" if model_type else f"{type(model).__name__} without a model_type"
        raise UnsupportedModel(f"Found {found}; supported model types are: {', '.join(FAMILIES)}.")
    family = FAMILIES[model_type]
    base = getattr(model, "base_model", model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    pattern = re.compile(re.escape(family.attention).replace(r"\*", r"(\d+)"))
    matches = [(match, module) for name, module in base.named_modules() if (match := pattern.fullmatch(name))]
    if not matches:
        raise UnsupportedModel(f"No attention module matches {family.attention!r} in this {model_type} model.")
    pruned = pruned_heads(config)
    unknown = sorted(set(pruned) - set(range(len(matches))))
    if unknown:
        raise UnsupportedModel(f"pruned_heads in the configuration names site {unknown[0]} of {len(matches)}.")
    sites = [
        _site(index, prefix + match.group(), module, family, config, tuple(map(int, match.groups())), pruned)
        for index, (match, module) in enumerate(matches)
    ]
    return Sites(model, sites, _layers(base, family, sites))


def _layers(base: nn.Module, family: Family, sites: Sequence[AttentionSite]) -> list[nn.Module]:
    """The stack of layers around the sites; none where layers are shared or come from elsewhere than transformers."""
    if family.layer is None:
        return []
    layers = [base.get_submodule(family.layer.replace("*", str(site.index))) for site in sites]
    return layers if all(type(layer).__module__.startswith("transformers.models.") for layer in layers) else []


def pruned_heads(config: Any) -> dict[int, list[int]]:
    """The removed heads by site that a configuration records (transformers 4's `pruned_heads`), checked."""
    recorded = getattr(config, "pruned_heads", None) or {}
    problem = f"pruned_heads in the configuration must map sites to lists of head numbers, not {recorded!r:.200}"
    if not isinstance(recorded, Mapping):
        raise UnsupportedModel(problem)
    heads = []
    for site, indices in recorded.items():
        if not str(site).isdecimal() or not isinstance(indices, list | tuple):
            raise UnsupportedModel(problem)
        if not all(type(index) is int and 0 <= index < config.num_attention_heads for index in indices):
            raise UnsupportedModel(f"{problem} (the model has heads 0 to {config.num_attention_heads - 1})")
        heads += [Head(int(site), index) for index in indices]
    if len(set(heads)) < len(heads):
        raise UnsupportedModel(f"pruned_heads in the configuration names a head twice: {recorded!r:.200}")
    return by_site(heads)


def _site(
    index: int,
    name: str,
    module: nn.Module,
    family: Family,
    config: Any,
    position: tuple[int, ...],
    pruned: Mapping[int, Sequence[int]],
) -> AttentionSite:
    """One site, with its projections found by the family's row and its shapes checked against the configuration."""
    paths = (family.query, family.key, family.value, family.output)
    query, key, value, output = (_linear(module.get_submodule(path), name) for path in paths)
    owner = module.get_submodule(family.owner)
    total = config.num_attention_heads
    survivors = [head for head in range(total) if head not in set(pruned.get(index, ()))]
    head_size = config.hidden_size // total
    widths = {query.out_features, key.out_features, value.out_features, output.in_features}
    if widths != {len(survivors) * head_size}:
        raise UnsupportedModel(
            f"{name} has projections of width {sorted(widths)}, but its configuration says {len(survivors)} heads "
            f"of {head_size}. Was it pruned by another tool?"
        )
    return AttentionSite(
        index, name, query, key, value, output, owner, family, head_size, total, survivors,
        family.applications(config, position),
    )  # fmt: skip


def _linear(module: nn.Module, name: str) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise UnsupportedModel(f"{name} has a {type(module).__name__} where a torch.nn.Linear is needed.")
    return module


def weight_of(linear: nn.Linear) -> Tensor:
    """A layer's weight, also where accelerate holds it elsewhere (offloaded)."""
    held: Any = getattr(getattr(linear, "_hf_hook", None), "weights_map", None)
    return held["weight"] if linear.weight.is_meta and held is not None else linear.weight
