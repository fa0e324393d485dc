"""Gates: a factor on each unit's output. A gate of 0 switches the unit off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from greedy_gnorm.model.sites import Site, Sites
from greedy_gnorm.units import Unit


@contextmanager
def gates(sites: Sites, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Multiply the surviving units of some sites by these values, (survivors,) or (rows, survivors)."""
    with ExitStack() as stack:
        for index, gate in values.items():
            site = sites[index]
            stack.callback(site.output.register_forward_pre_hook(_multiply(site, gate)).remove)
            stack.callback(setattr, site, "gate", site.gate)
            site.gate = tuple(gate.flatten().tolist())
        yield


def closed(sites: Sites, units: Collection[Unit]) -> AbstractContextManager[None]:
    """Switch these units off, which gives the outputs of the model without them."""
    values = {
        site.index: torch.tensor([0.0 if Unit(site.index, index) in units else 1.0 for index in site.survivors])
        for site in sites
        if any(unit.site == site.index for unit in units)
    }
    return gates(sites, values)


def _multiply(site: Site, gate: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Tensor]]:
    if gate.shape[-1] != len(site.survivors):
        raise ValueError(f"{site} has {len(site.survivors)} units left, not {gate.shape[-1]}")

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
        context: Tensor = arguments[0]  # (B, T, units * size)
        factors = site.by_channel(gate.to(context))
        return (context * (factors if factors.ndim == 1 else factors[:, None, :]),)

    return hook
