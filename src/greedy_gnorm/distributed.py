"""Several processes on one run: batches are shared out, results are put together, the first process writes.

Start them with `torchrun --nproc-per-node N -m greedy_gnorm prune ...`. Without them everything here is the identity.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from greedy_gnorm.batches import Batches
from greedy_gnorm.errors import GnormError

Value = TypeVar("Value")

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: longer than any one step."""


@contextmanager
def joined() -> Iterator[None]:
    """Join the group that the launcher's environment describes, for the time of a command."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or distributed.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise GnormError(f"The processes can't find one another: {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        distributed.destroy_process_group()


_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """For a while this process works by itself, on something that is no other's."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def _together() -> bool:
    return distributed.is_initialized() and not _alone


def count() -> int:
    """How many processes work together."""
    return distributed.get_world_size() if _together() else 1


def number() -> int:
    """Which of them this is."""
    return distributed.get_rank() if _together() else 0


def is_first() -> bool:
    """Whether this process writes and speaks."""
    return number() == 0


def own_share(batches: Batches) -> Batches:
    """Every so-many-th batch; together the processes have them all."""
    return batches if count() == 1 else replace(batches, items=batches.items[number() :: count()])


def of_all(value: Value) -> list[Value]:
    """What every process gives, in their order; the same list for each of them."""
    if count() == 1:
        return [value]
    values: list[Value] = [value] * count()
    try:
        distributed.all_gather_object(values, value)
    except RuntimeError as error:
        raise GnormError(
            f"Another process is gone: {str(error).splitlines()[0]:.200} The steps so far are safe: --resume goes on."
        ) from error
    return values


def of_first(make: Callable[[], Value]) -> Value:
    """What the first process makes, and only it."""
    return of_all(make() if is_first() else None)[0]  # type: ignore[return-value]
