"""remove: the only place that cuts weights."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from greedy_gnorm.errors import GnormError
from greedy_gnorm.heads import Head, by_site
from greedy_gnorm.modeling_pruned import pruned_class
from greedy_gnorm.sites import AttentionSite, Sites, find_sites


def remove_heads(model: nn.Module, heads: Mapping[int, Collection[int]]) -> None:
    """Remove heads from a model in place, {site: [head, ...]} in original numbering."""
    remove(find_sites(model), [Head(int(site), int(index)) for site, indices in heads.items() for index in indices])


def remove(sites: Sites, heads: Iterable[Head]) -> None:
    """Cut these heads out of the q, k, v rows and the o columns; the output bias stays. All or nothing."""
    heads = list(heads)
    check_removable(sites, heads)
    if not sites.removed():
        _own_config(sites.model)
    for index, gone in by_site(heads).items():
        _cut(sites[index], set(gone))
    config: Any = sites.model.config
    config.pruned_heads = by_site(sites.removed())
    config.pruned_layout = sites[0].family.layout()
    _call_pruned(sites.model)


def _call_pruned(model: nn.Module) -> None:
    """Make transformers' own classifier one of its pruned class, whose `save_pretrained` writes what loads again."""
    plain: Any = type(model)
    if plain.__module__.startswith("transformers.models.") and plain.__name__.endswith("ForSequenceClassification"):
        model.__class__ = pruned_class(plain)


def dense(model: Any) -> Any:
    """The pruned model in the shapes it had: removed heads are there again with zero weights, and do nothing."""
    sites, config = find_sites(model), copy.deepcopy(model.config)
    for name in ("pruned_heads", "pruned_layout", "auto_map"):
        if hasattr(config, name):
            delattr(config, name)
    plain = next(each for each in type(model).__mro__ if each.__module__.startswith("transformers.models."))
    whole: Any = plain(config)
    weights = dict(model.state_dict())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for site in sites:
        places = torch.tensor(site.survivors, dtype=torch.long)[:, None] * site.head_size
        channels = (places + torch.arange(site.head_size)).flatten()
        width = site.total * site.head_size
        for linear in site.projections.values():
            for parameter in (linear.weight, linear.bias):
                if parameter is not None:
                    weights[names[id(parameter)]] = _spread(parameter, 0, channels, width)
        weights[names[id(site.output.weight)]] = _spread(site.output.weight, 1, channels, width)
    whole.load_state_dict(weights)
    return whole.to(next(model.parameters()).dtype).eval()


def fill_empty_sites(model: nn.Module) -> None:
    """Give every site without heads one of zero weights, which changes nothing: for runtimes without empty tensors."""
    for site in find_sites(model):
        if not site.survivors:
            for linear in site.projections.values():
                linear.weight = nn.Parameter(linear.weight.new_zeros(site.head_size, linear.in_features))
                if linear.bias is not None:
                    linear.bias = nn.Parameter(linear.bias.new_zeros(site.head_size))
                linear.out_features = site.head_size
            site.output.weight = nn.Parameter(site.output.weight.new_zeros(site.output.out_features, site.head_size))
            site.output.in_features = site.head_size
            setattr(site.owner, site.family.head_count, 1)
            setattr(site.owner, site.family.width, site.head_size)


def _spread(parameter: Tensor, dim: int, channels: Tensor, width: int) -> Tensor:
    """The channels in their old places, zeros between them."""
    shape = list(parameter.shape)
    shape[dim] = width
    return torch.zeros(shape, dtype=parameter.dtype).index_copy(dim, channels, parameter.detach().cpu())


def check_removable(sites: Sites, heads: list[Head]) -> None:
    """Refuse a head that does not exist, is gone already or is named twice."""
    for head in heads:
        if not 0 <= head.site < len(sites):
            raise GnormError(f"There is no site {head.site}: this model has sites 0 to {len(sites) - 1}.")
        site = sites[head.site]
        if not 0 <= head.index < site.total:
            raise GnormError(f"There is no head {head.index} at {site}: it has heads 0 to {site.total - 1}.")
        if head.index not in site.survivors:
            raise GnormError(f"Head {head.index} of {site} was removed before.")
    if len(set(heads)) < len(heads):
        twice = next(head for head in heads if heads.count(head) > 1)
        raise GnormError(f"Head {twice.index} of {sites[twice.site]} is named twice.")


def _own_config(model: nn.Module) -> None:
    """Give the model its own configuration: other models may share the object, and they keep their heads."""
    shared = model.config
    own: Any = copy.deepcopy(shared)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


@torch.no_grad()
def _cut(site: AttentionSite, gone: set[int]) -> None:
    kept_places = [place for place, head in enumerate(site.survivors) if head not in gone]
    starts = torch.tensor(kept_places, dtype=torch.long) * site.head_size
    channels = (starts[:, None] + torch.arange(site.head_size)).flatten()  # (kept * head_size,)
    for linear in site.projections.values():
        for name in ("weight", "bias"):
            _slice(linear, name, 0, channels)
        linear.out_features = len(channels)
    _slice(site.output, "weight", 1, channels)
    site.output.in_features = len(channels)
    site.survivors = [head for head in site.survivors if head not in gone]
    setattr(site.owner, site.family.head_count, len(site.survivors))
    setattr(site.owner, site.family.width, len(channels))


def _slice(linear: nn.Linear, name: str, dim: int, channels: Tensor) -> None:
    """Keep these channels of a parameter, also where accelerate holds its values elsewhere (offloaded)."""
    parameter: Tensor | None = getattr(linear, name)
    if parameter is None:
        return
    held: Any = getattr(getattr(linear, "_hf_hook", None), "weights_map", None)
    if parameter.is_meta and held is not None:
        # What accelerate reads a weight from looks into this dict first, then on the disk
        held.dataset.state_dict[held.prefix + name] = held[name].index_select(dim, channels)
    kept = parameter.index_select(dim, channels.to(parameter.device))
    setattr(linear, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))
