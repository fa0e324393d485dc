"""Several processes on one run: batches are sharded, results are gathered, the first process writes.

Start them with `torchrun --nproc-per-node N -m greedy_gnorm prune ...`. In a single process everything here is the
identity.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.errors import INTERRUPTED, GnormError, Interrupted, ProcessGone, ShownElsewhere
from greedy_gnorm.passes.peers import LAUNCHER, RESUME, Coordinator, Peers, launched

Value = TypeVar("Value")

TIMEOUT = timedelta(minutes=10)
"""For the processes to find one another, and for one exchange once all have arrived; waiting has no limit."""

NOTICE = 10.0
"""Seconds after which a process says what it is waiting for, if the others have not come."""


@contextmanager
def process_group(say: Callable[[str], None], *, started_others: bool = False) -> Iterator[None]:
    """Join the processes that the launcher started, if there are any; they leave or fail together.

    Where the first process started the others itself, their end does not end it, so they need not wait for it.
    """
    if not launched() or distributed.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    address, size = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", os.environ["WORLD_SIZE"]
    waiting = f"Waiting for {size} processes at {address}. For a single process, unset {', '.join(LAUNCHER)}."
    notice = threading.Timer(NOTICE, say, [waiting])
    notice.daemon = True
    notice.start()
    try:
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise GnormError(f"The {size} processes did not meet at {address}: {reason}") from error
    finally:
        notice.cancel()
    try:
        peers = _peers()
        peers.interrupt_on_failure()
        try:
            yield
        except BaseException as error:
            try:
                final = _reported(error, peers)
            except KeyboardInterrupt:
                # Another process failed just when this one did, and interrupts it; or the first one, which shows the
                # error, ends the others
                final = _reported(error, peers) if is_first() else ShownElsewhere(str(error))
            if started_others:
                peers.leave()
            if final is error:
                raise
            raise final from error
        peers.leave()
    finally:
        distributed.destroy_process_group()


def _reported(error: BaseException, peers: Peers) -> BaseException:
    """What a process ends with, after the others were told: one of them shows an error, the first if it can."""
    code = error.code if isinstance(error, SystemExit) else None
    interrupted = code == INTERRUPTED or isinstance(error, KeyboardInterrupt | Interrupted)
    succeeded = isinstance(error, SystemExit) and not code
    if succeeded or (interrupted and peers.failure is None):
        peers.leave()
        return error
    if interrupted:  # by the failure of another process, or by the launcher because of it
        error = ProcessGone(peers.failure)
    shown = peers.report(str(error) if isinstance(error, GnormError) else f"{type(error).__name__}: {error}")
    return ShownElsewhere(str(error)) if shown and isinstance(error, GnormError) else error


_single = False


@contextmanager
def single_process() -> Iterator[None]:
    """Inside, this process works by itself: it is the first of one, shards nothing and gathers nothing."""
    global _single
    before, _single = _single, True
    try:
        yield
    finally:
        _single = before


def _is_distributed() -> bool:
    return distributed.is_initialized() and not _single


def world_size() -> int:
    """The number of processes that work on this run."""
    return distributed.get_world_size() if _is_distributed() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if _is_distributed() else 0


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return rank() == 0


def shard(batches: Batches) -> Batches:
    """The batches of this process: every `world_size`-th one."""
    return batches if world_size() == 1 else replace(batches, items=batches.items[rank() :: world_size()])


def gather(value: Any) -> list[Any]:
    """The values of all processes by rank; plain JSON values, since unpickling what a network sends runs code.

    It waits for the other processes as long as they live.
    """
    if world_size() == 1:
        return [value]
    _peers().wait()
    return _gather_json(value)


def gather_tensors(tensor: Tensor) -> list[Tensor]:
    """The float64 tensors of all processes by rank; their shapes may differ."""
    if world_size() == 1:
        return [tensor]
    shapes = gather(list(tensor.shape))
    return [flat.view(shape) for flat, shape in zip(_gather_flat(tensor.flatten()), shapes, strict=True)]


def add_up(tensor: Tensor) -> Tensor:
    """The sum of the tensors of all processes, which have one shape; every process gets the same bits."""
    if world_size() == 1:
        return tensor
    _peers().wait()
    total = tensor.detach().to("cuda" if distributed.get_backend() == "nccl" else "cpu", copy=True)
    try:
        distributed.all_reduce(total)
    except RuntimeError as error:
        raise _gone() from error
    return total.to(tensor.device)


def shard_rows(batch: Batch) -> Batch:
    """The rows of a batch that are this process's: every `world_size`-th one, or none where there are too few."""
    if world_size() == 1:
        return batch
    places = range(rank(), len(batch), world_size())

    def own(value: Any) -> Any:
        return value[rank() :: world_size()] if isinstance(value, Tensor) and len(value) == len(batch) else value

    return replace(
        batch,
        rows=tuple(batch.rows[place] for place in places),
        notes=tuple(batch.notes[place] for place in places) if batch.notes else (),
        inputs={name: own(tensor) for name, tensor in batch.inputs.items()},
        **{name: own(value) for name, value in vars(batch).items() if isinstance(value, Tensor)},
    )


def gather_rows(tables: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """One table with the rows of all processes in order, from tables (rows, S) and the numbers of their rows."""
    own = torch.cat(list(tables)) if tables else torch.zeros(0, 0, dtype=torch.float64)
    numbers = torch.tensor([number for some in rows for number in some], dtype=torch.float64)
    found = [table for table in gather_tensors(own) if len(table)]
    order = torch.cat(gather_tensors(numbers)).argsort()
    return torch.cat(found)[order]


def on_all_ranks(make: Callable[[], Value]) -> Value:
    """Call a function in every process; if it fails in one, all processes raise that error. It must not gather."""
    failure: GnormError | None = None
    try:
        value = make()
    except GnormError as error:
        failure = error
    for place, reason in enumerate(gather(None if failure is None else str(failure))):
        if reason is not None and failure is None:
            raise GnormError(reason if place == 0 else f"Process {place} failed: {reason}")
    if failure is not None:
        raise failure
    return value


def broadcast(make: Callable[[], Any]) -> Any:
    """Call a function in the first process only, and return its result, plain JSON values, in all of them."""
    return gather(on_all_ranks(lambda: make() if is_first() else None))[0]


def _gather_json(value: Any) -> list[Any]:
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(each.numpy().tobytes()) for each in _gather_flat(encoded)]


def _gather_flat(values: Tensor) -> list[Tensor]:
    """One-dimensional tensors of one dtype and any length, from every process; all of them must have arrived."""
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    size = distributed.get_world_size()
    try:
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
        distributed.all_gather(lengths, torch.tensor([len(values)], device=device))
        longest = int(torch.cat(lengths).max())
        found = [torch.zeros(longest, dtype=values.dtype, device=device) for _ in range(size)]
        distributed.all_gather(found, torch.nn.functional.pad(values, (0, longest - len(values))).to(device))
    except RuntimeError as error:
        raise _gone() from error
    return [each[: int(length)].cpu() for each, length in zip(found, lengths, strict=True)]


def _gone() -> ProcessGone:
    """What to raise when an exchange failed: why, as soon as that is known."""
    known = None if _connected is None else _connected[1].failure_within(5)
    return ProcessGone(known or f"Another process is gone. {RESUME}")


_connected: tuple[Any, Peers] | None = None
"""The group of torch that this process is in, and its connection to the others of that group."""


def _peers() -> Peers:
    """The connection to the other processes, made when all of them first ask for it."""
    global _connected
    group: Any = distributed.group.WORLD
    if _connected is None or _connected[0] is not group:
        _connected = None
        own = Coordinator(distributed.get_world_size()) if distributed.get_rank() == 0 else None
        offer = None if own is None else [socket.gethostname(), own.port, own.token]
        host, port, token = _gather_json(offer)[0]
        host = os.environ.get("MASTER_ADDR", host)
        peers = Peers(distributed.get_rank(), (host, port), token)
        _gather_json(None)  # a process that died before it was connected is noticed here
        _connected = group, peers
    return _connected[1]
