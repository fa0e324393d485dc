"""Attention maps: an eager pass in which every map can be read and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

With grouped key/value heads there is a map for each query head, those of one unit after another: see `by_unit`.
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


def by_unit(site: Site, values: Tensor) -> Tensor:
    """Values of all query heads of a site, (B, heads), by unit: (B, survivors, query heads of a unit)."""
    units = len(site.survivors)
    return values.view(len(values), units, values.shape[1] // units if units else 1)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def attention_maps(sites: Sites, visitor: MapVisitor) -> Iterator[None]:
    """Compute attention eagerly and pass every map to `visitor`; the model's own setting is restored afterwards."""
    visits = {id(site.owner): _Visit(site, visitor) for site in sites if site.kind == ATTENTION}
    config: Any = sites.model.config
    own = config._attn_implementation
    try:
        _visits.update(visits)
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = own
        for owner in visits:
            del _visits[owner]
