"""Removing units: the only place where weights are cut."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor, nn

from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.families import GROUP_QUERIES, recorded_group_queries
from greedy_gnorm.model.groups import choose_group_queries, set_group_queries
from greedy_gnorm.model.modeling_pruned import (
    RECORDS,
    auto_class_of,
    keep_units,
    kept_channels,
    pruned_class,
    set_units,
    unit_width,
)
from greedy_gnorm.model.sites import Site, Sites, find_sites
from greedy_gnorm.units import UNIT_WORDS, Unit, by_site


def remove_heads(model: nn.Module, heads: Mapping[int, Collection[int]], *, group_queries: str | None = None) -> None:
    """Remove heads from a model in place, {layer: [head, ...]} in original numbering.

    Where query heads share a key/value head, a head is such a group ("whole", the default), or one query head of each
    group of the layer ("each").
    """
    mode = choose_group_queries(model.config, group_queries)
    if mode != recorded_group_queries(model.config):
        set_group_queries(_own_config(model), mode)
    sites = find_sites(model, "heads")
    numbers = {site.number: site.index for site in sites}
    for layer in heads:
        if int(layer) not in numbers:
            raise GnormError(f"There is no layer {layer}: this model has layers 0 to {len(numbers) - 1}.")
    remove(sites, [Unit(numbers[int(layer)], int(index)) for layer, indices in heads.items() for index in indices])


def remove(sites: Sites, units: Iterable[Unit]) -> None:
    """Remove units from the linear maps of their sites, all or none of them; the output bias is kept."""
    units = list(units)
    if not units:
        return
    check_removable(sites, units)
    config = _own_config(sites.model)
    for index, gone in by_site(units).items():
        _cut(sites[index], set(gone))
    record_removed(sites, config)
    _use_pruned_class(sites.model)


def record_removed(sites: Sites, config: Any) -> None:
    """Record in a configuration which units were removed, and the layout of the sites."""
    gone = by_site(sites.removed())
    for kind in {site.kind for site in sites}:
        numbers = {site.number: gone[site.index] for site in sites if site.kind == kind and site.index in gone}
        setattr(config, RECORDS[kind], numbers)
    config.pruned_layout = [row.layout(config) for row in sites.family.rows(config)]


def _use_pruned_class(model: nn.Module) -> None:
    """Change a model's class to its pruned version, which saves a checkpoint that can be loaded again."""
    plain: Any = type(model)
    if plain.__module__.startswith("transformers.models.") and auto_class_of(plain) is not None:
        model.__class__ = pruned_class(plain)


def dense(model: Any) -> Any:
    """A copy of a pruned model with its original shapes, in which removed units have zero weights."""
    whole = copy.deepcopy(model)
    sites = find_sites(whole)
    for site in sites:
        set_units(site.module, site.layout, range(site.total), _pad_with_zeros(site))
    _use_plain_class(whole)
    return whole.eval()


def as_plain(model: Any) -> Any:
    """A copy of a pruned model as an ordinary one of its class with narrower layers; None if the class has no such.

    All feed-forwards must have the same number of neurons, and all layers the same number of key/value heads, or of
    query heads in a group; where the size of a head is not in the configuration, none may be removed.
    """
    narrow = copy.deepcopy(model)
    sites = find_sites(narrow)
    changes: dict[str, int] = {}
    for row in sites.family.rows(narrow.config):
        counts = {len(site.survivors) for site in sites if site.kind == row.kind}
        if counts == {row.units(narrow.config)}:
            continue
        if row.plain is None or len(counts) > 1 or 0 in counts:
            return None
        changes |= row.plain(narrow.config, counts.pop())
    _use_plain_class(narrow)
    for name, value in changes.items():
        setattr(narrow.config, name, value)
    try:
        type(narrow.config).from_dict(narrow.config.to_dict())
    except StrictDataclassClassValidationError:
        return None  # Llama's hidden size must be a multiple of the number of heads
    return narrow.eval()


def _use_plain_class(model: Any) -> None:
    """Change a model's class back to that of transformers, and forget which units were removed."""
    model.__class__ = next(each for each in type(model).__mro__ if each.__module__.startswith("transformers.models."))
    config = _own_config(model)
    for name in (*RECORDS.values(), GROUP_QUERIES, "pruned_layout", "auto_map"):
        if hasattr(config, name):
            delattr(config, name)


def _pad_with_zeros(site: Site) -> Any:
    """Copies parameters into tensors of the original size, with zeros for removed units."""

    def change(linear: nn.Module, name: str, dim: int, linear_map: dict[str, Any]) -> Tensor:
        parameter: Tensor = getattr(linear, name)
        places = kept_channels(linear_map, site.layout, site.total, site.survivors)
        shape = list(parameter.shape)
        shape[dim] = site.total * unit_width(linear_map, site.layout["sizes"])
        index = torch.tensor(places, dtype=torch.long, device=parameter.device)
        return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device).index_copy(
            dim, index, parameter.detach()
        )

    return change


def fill_empty_sites(model: nn.Module) -> None:
    """Give every empty site one unit of zero weights, for runtimes without empty tensors; the outputs stay the same."""
    for site in find_sites(model):
        if not site.survivors:

            def zeros(linear: nn.Module, name: str, dim: int, linear_map: dict[str, Any], site: Site = site) -> Tensor:
                parameter: Tensor = getattr(linear, name)
                shape = list(parameter.shape)
                shape[dim] = unit_width(linear_map, site.layout["sizes"])
                return parameter.new_zeros(shape)

            set_units(site.module, site.layout, [0], zeros)


def check_removable(sites: Sites, units: list[Unit]) -> None:
    """Refuse units that do not exist, were already removed or are listed twice."""
    for unit in units:
        if not 0 <= unit.site < len(sites):
            raise GnormError(f"There is no layer {unit.site}: this model has layers 0 to {len(sites) - 1}.")
        site = sites[unit.site]
        word = UNIT_WORDS[site.kind]
        if not 0 <= unit.index < site.total:
            raise GnormError(f"There is no {word} {unit.index} in {site}: it has {word}s 0 to {site.total - 1}.")
        if unit.index not in site.survivors:
            raise GnormError(f"{word.capitalize()} {unit.index} of {site} is already removed.")
    if len(set(units)) < len(units):
        twice = next(unit for unit in units if units.count(unit) > 1)
        site = sites[twice.site]
        raise GnormError(f"{UNIT_WORDS[site.kind].capitalize()} {twice.index} of {site} is listed twice.")


def _own_config(model: nn.Module) -> Any:
    """Give the model its own copy of its configuration, because other models may share the object."""
    shared = model.config
    own: Any = copy.deepcopy(shared)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
    return own


@torch.no_grad()
def _cut(site: Site, gone: set[int]) -> None:
    places = [place for place, unit in enumerate(site.survivors) if unit not in gone]
    count = len(site.survivors)

    def take(linear: nn.Module, name: str, dim: int, linear_map: dict[str, Any]) -> Tensor:
        """Select the channels of a parameter, even if accelerate has offloaded it."""
        parameter: Tensor = getattr(linear, name)
        channels = torch.tensor(kept_channels(linear_map, site.layout, count, places), dtype=torch.long)
        offloaded: Any = getattr(getattr(linear, "_hf_hook", None), "weights_map", None)
        if parameter.is_meta and offloaded is not None:
            # accelerate looks up a weight in this dict before it reads the disk
            offloaded.dataset.state_dict[offloaded.prefix + name] = offloaded[name].index_select(dim, channels)
        return parameter.index_select(dim, channels.to(parameter.device))

    keep_units(site.module, site.layout, site.survivors, places, take)
    site.survivors = [unit for unit in site.survivors if unit not in gone]
