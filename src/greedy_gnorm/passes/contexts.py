"""What the units of a site return: a forward pass in which the inputs of the output maps are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from greedy_gnorm.model.sites import Site, Sites

ContextVisitor = Callable[[Site, Tensor], None]
"""Called with a site and the input of its output map, (B, T, units * size), at each application."""


@contextmanager
def contexts(sites: Sites, visitor: ContextVisitor) -> Iterator[None]:
    """Pass what the units of each site return to `visitor` while the model runs; sites without units are left out."""
    with ExitStack() as stack:
        for site in sites:
            if site.survivors:
                stack.callback(site.output.register_forward_pre_hook(_visit(site, visitor)).remove)
        yield


def _visit(site: Site, visitor: ContextVisitor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        visitor(site, arguments[0])

    return hook
