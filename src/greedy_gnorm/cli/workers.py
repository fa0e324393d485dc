"""Several processes for one command, started by the command itself: `--workers 2`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from greedy_gnorm.cli.interrupts import Interrupts
from greedy_gnorm.cli.terminal import say
from greedy_gnorm.passes.peers import LAUNCHER, launched

THREADS = "OMP_NUM_THREADS"


@contextmanager
def workers(count: int, arguments: Sequence[str]) -> Iterator[None]:
    """Inside, this process is the first of so many, and the others run the same command.

    Each has its share of the cores, unless OMP_NUM_THREADS says otherwise. If this process fails or is interrupted, the
    others are told to end; if it is killed, they notice. Where a launcher has started several processes already,
    nothing happens here.
    """
    if count == 1 or launched():
        yield
        return
    with _environment(count) as names:
        others = [
            subprocess.Popen(
                [sys.executable, "-m", "greedy_gnorm", *arguments],
                env={**os.environ, **dict.fromkeys(names, str(number))},
                stdin=subprocess.DEVNULL,
            )
            for number in range(1, count)
        ]
        from greedy_gnorm.passes.processes import process_group  # loads torch, which reads the number of threads

        try:
            with Interrupts(), process_group(say, started_others=True):
                yield
        except BaseException:
            for other in others:
                other.terminate()
            raise
        finally:
            for other in others:
                other.wait()


@contextmanager
def _environment(count: int) -> Iterator[Sequence[str]]:
    """Set what a launcher sets for the first process; the names of the variables that are each process's own number."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    numbers, size = ("RANK", "LOCAL_RANK"), {"WORLD_SIZE": str(count)}
    own = {**dict.fromkeys(numbers, "0"), **size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert set(LAUNCHER) <= set(own)
    before = {name: os.environ.get(name) for name in (*own, THREADS)}
    os.environ |= own
    os.environ.setdefault(THREADS, str(max(_cores() // count, 1)))
    try:
        yield numbers
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
