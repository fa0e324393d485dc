"""Several processes on one run: batches are shared out, results are put together, the first process writes.

Start them with `torchrun --nproc-per-node N -m greedy_gnorm prune ...`. Without them everything here is the identity.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.errors import GnormError, ProcessGone

Value = TypeVar("Value")

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: longer than any one step."""


@contextmanager
def joined() -> Iterator[None]:
    """Join the group that the launcher's environment describes, for the time of a command."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal():
        raise GnormError(f"WORLD_SIZE is {size!r}, not a number of processes.")
    if int(size) < 2 or distributed.is_initialized():
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


def shard(batches: Batches) -> Batches:
    """Every so-many-th batch; together the processes have them all."""
    return batches if count() == 1 else replace(batches, items=batches.items[number() :: count()])


def gather(value: Any) -> list[Any]:
    """What every process gives, in their order: plain JSON values, so that nothing which comes over a network runs."""
    if count() == 1:
        return [value]
    words = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(each.numpy().tobytes()) for each in _gather_flat(words)]


def gather_tensors(tensor: Tensor) -> list[Tensor]:
    """The float64 tensors of all processes, in their order; their shapes may differ."""
    if count() == 1:
        return [tensor]
    shapes = gather(list(tensor.shape))
    return [flat.view(shape) for flat, shape in zip(_gather_flat(tensor.flatten()), shapes, strict=True)]


def gather_rows(tables: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """Tables of some rows each, (rows, S), and the numbers of these rows: one table of the rows of all processes."""
    own = torch.cat(list(tables)) if tables else torch.zeros(0, 0, dtype=torch.float64)
    numbers = torch.tensor([number for some in rows for number in some], dtype=torch.float64)
    found = [table for table in gather_tensors(own) if len(table)]
    order = torch.cat(gather_tensors(numbers)).argsort()
    return torch.cat(found)[order]


def _gather_flat(values: Tensor) -> list[Tensor]:
    """One-dimensional tensors of one type and any length, from every process."""
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    try:
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count())]
        distributed.all_gather(lengths, torch.tensor([len(values)], device=device))
        longest = int(torch.cat(lengths).max())
        found = [torch.zeros(longest, dtype=values.dtype, device=device) for _ in range(count())]
        distributed.all_gather(found, torch.nn.functional.pad(values, (0, longest - len(values))).to(device))
    except RuntimeError as error:
        raise ProcessGone(
            "Another process of this run is gone. Steps that were made are safe: --resume goes on."
        ) from error
    return [each[: int(length)].cpu() for each, length in zip(found, lengths, strict=True)]


def together(make: Callable[[], Value]) -> Value:
    """Make something in every process; if one can't, none goes on, and all know why. Nothing is shared meanwhile."""
    fault: GnormError | None = None
    try:
        value = make()
    except GnormError as error:
        fault = error
    for place, reason in enumerate(gather(None if fault is None else str(fault))):
        if reason is not None and fault is None:
            raise GnormError(reason if place == 0 else f"Process {place}: {reason}")
    if fault is not None:
        raise fault
    return value


def from_first(make: Callable[[], Any]) -> Any:
    """What the first process makes, and only it: plain JSON values."""
    return gather(together(lambda: make() if is_first() else None))[0]
