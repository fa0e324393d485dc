"""Reading what modules receive and return while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from greedy_gnorm.data.batches import Batch
from greedy_gnorm.model.sites import Site, Sites, Sum
from greedy_gnorm.passes.layers import layer_output
from greedy_gnorm.tasks.task import task_of


class Stop(Exception):
    """Ends a pass where the rest of the model is not needed."""


def received(sites: Sites, module: nn.Module, batch: Batch) -> Tensor:
    """What a module receives first when the model runs over a batch; nothing after it runs."""
    result: list[Tensor] = []
    with first_received(module, result), suppress(Stop):
        task_of(sites.model).outputs(sites.model, batch)
    return result[0]


def first_received(module: nn.Module, result: list[Tensor]) -> AbstractContextManager[None]:
    """Record what a module receives first, and stop there."""
    return before(module, _stopping(result))


def first_returned(module: nn.Module, result: list[Tensor]) -> AbstractContextManager[None]:
    """Record what a module returns first, and stop there."""
    return after(module, _stopping(result))


def _stopping(result: list[Tensor]) -> Callable[[Tensor], None]:
    def stop(found: Tensor) -> None:
        result.append(found)
        raise Stop

    return stop


def sum_of(site: Site) -> Sum:
    """Where the output of a site is added to its residual, which must be known."""
    assert site.sum is not None
    return site.sum


def at_sum(site: Site, record: Callable[[Tensor], None]) -> AbstractContextManager[None]:
    """Record every sum of a site's output and the residual."""
    place = sum_of(site)
    return after(place.module, record) if place.returned else before(place.module, record)


@contextmanager
def before(module: nn.Module, record: Callable[[Tensor], None]) -> Iterator[None]:
    """Record the first argument of every call of a module."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        record(arguments[0])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def after(module: nn.Module, record: Callable[[Tensor], None]) -> Iterator[None]:
    """Record the result of every call of a linear map or a layer."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        record(layer_output(result))

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def real_rows(batch: Batch, applications: Sequence[Tensor]) -> Tensor:
    """The real tokens, applications stacked, (N, ...)."""
    real = batch.real_tokens(applications[0].shape[1]).bool()
    rows = [tensor[real] for tensor in applications]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def read_rows(batch: Batch, tensor: Tensor) -> Tensor:
    """What a classifier reads or returns, (N, ...) in float32 at least: a vector for each row or each real token."""
    exact = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return real_rows(batch, [exact]) if exact.dim() == 3 else exact
