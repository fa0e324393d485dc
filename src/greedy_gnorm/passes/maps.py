"""Attention maps: an eager pass in which every map can be looked at, and replaced, on its way."""

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

See = Callable[[Site, Tensor], Tensor]
"""Gets a site and its map, (B, heads, T, T), at each application; gives the map to go on with.

The map is in float32, or float64 if the model is: half precision would round what a score looks at.
"""


@dataclass
class _Watcher:
    """Who looks at the maps of a model for the time being."""

    site: Site
    see: See


_watchers: dict[int, _Watcher] = {}
"""By the identity of the module that computes the attention; empty between passes, so that no model is kept alive."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    weights = query @ key.mT * scaling  # (B, H, T, T)
    if attention_mask is not None:
        weights = weights + attention_mask
    exact = torch.promote_types(weights.dtype, torch.float32)
    watcher = _watchers[id(module)]
    weights = watcher.see(watcher.site, torch.softmax(weights, dim=-1, dtype=exact))
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def attention_maps(sites: Sites, see: See) -> Iterator[None]:
    """Compute attention eagerly through `see` for a while; the model's own setting comes back afterwards."""
    watchers = {id(site.owner): _Watcher(site, see) for site in sites if site.kind == ATTENTION}
    config: Any = sites.model.config
    own = config._attn_implementation
    try:
        _watchers.update(watchers)
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = own
        for owner in watchers:
            del _watchers[owner]
