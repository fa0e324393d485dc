"""Gates: a factor per head on the input of the output projection. A gate at 0 is a head switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from greedy_gnorm.sites import AttentionSite, Sites


@contextmanager
def gates(sites: Sites, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Multiply the surviving heads of each named site by its values, (survivors,) or (rows, survivors), for a while."""
    with ExitStack() as stack:
        for index, gate in values.items():
            site = sites[index]
            stack.callback(site.output.register_forward_pre_hook(_multiply(site, gate)).remove)
            stack.callback(setattr, site, "gate", site.gate)
            site.gate = tuple(gate.flatten().tolist())
        yield


def _multiply(site: AttentionSite, gate: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Tensor]]:
    if gate.shape[-1] != len(site.survivors):
        raise ValueError(f"{site} has {len(site.survivors)} heads left, not {gate.shape[-1]}")

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
        context: Tensor = arguments[0]  # (B, T, heads * head_size)
        factors = gate.to(context).repeat_interleave(site.head_size, dim=-1)
        return (context * (factors if factors.ndim == 1 else factors[:, None, :]),)

    return hook
