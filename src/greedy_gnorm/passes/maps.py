"""Attention maps: an eager pass in which every map can be read and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from greedy_gnorm.model.sites import Site, Sites
from greedy_gnorm.units import ATTENTION

NAME = "greedy_gnorm_maps"

MapVisitor = Callable[[Site, Tensor], Tensor]
"""Called with a site and its map, (B, heads, T, T), at each application; returns the map to use in its place.

With grouped key/value heads there is a map for each query head: see `Site.by_unit`.
The map is in float32, or in float64 if the model is, because half precision would round what a score reads.
"""


@dataclass
class _Visit:
    """The site of an attention module, and the visitor of its maps."""

    site: Site
    visitor: MapVisitor


_visits: dict[int, _Visit] = {}
"""By the id of the module that computes the attention; empty between passes, so that no model is kept alive."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    if key.shape[1] != query.shape[1]:  # every key/value head serves a group of query heads
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    weights = query @ key.mT * scaling  # (B, H, T, T)
    if attention_mask is not None:
        weights = weights + attention_mask
    exact = torch.promote_types(weights.dtype, torch.float32)
    visit = _visits[id(module)]
    weights = visit.visitor(visit.site, torch.softmax(weights, dim=-1, dtype=exact))
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def attention_maps(sites: Sites, visitor: MapVisitor) -> Iterator[None]:
    """Compute attention eagerly and pass every map to `visitor`; the model's own setting is restored afterwards."""
    heads = [site for site in sites if site.kind == ATTENTION]
    visits = {id(site.owner): _Visit(site, visitor) for site in heads if site.map_at is None}
    config: Any = sites.model.config
    own = config._attn_implementation
    with ExitStack() as stack:
        for site in heads:
            if site.map_at is not None:
                stack.callback(site.map_at.register_forward_pre_hook(_at_dropout(site, visitor)).remove)
        try:
            _visits.update(visits)
            config._attn_implementation = NAME
            yield
        finally:
            config._attn_implementation = own
            for owner in visits:
                del _visits[owner]


def _at_dropout(site: Site, visitor: MapVisitor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Tensor]]:
    """Visits the map where a family's own attention code passes it to a module: its dropout, which comes last."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
        weights: Tensor = arguments[0]  # (B, H, T, T)
        return (visitor(site, weights.to(torch.promote_types(weights.dtype, torch.float32))).to(weights.dtype),)

    return hook
