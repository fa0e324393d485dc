"""Scenarios of two processes. The package is imported once, and every process is a fork, so a scenario costs little.

python tests/passes/ranks.py FOLDER: FOLDER has `model` and `rows.jsonl`. Prints a JSON object: for each scenario and
rank the exit code, the returned value, what was printed, and the seconds from the first event that matters to the end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

import greedy_gnorm as gg  # noqa: E402
import greedy_gnorm.cli.commands  # noqa: E402 (whatever a run needs, before it is forked)
from greedy_gnorm.cli.app import main as gnorm  # noqa: E402
from greedy_gnorm.cli.interrupts import Interrupts  # noqa: E402
from greedy_gnorm.comparison import experiment  # noqa: E402
from greedy_gnorm.errors import GnormError, NonFiniteScore  # noqa: E402
from greedy_gnorm.passes import processes  # noqa: E402
from greedy_gnorm.passes.processes import (  # noqa: E402
    broadcast,
    gather,
    gather_rows,
    gather_tensors,
    on_all_ranks,
    process_group,
    rank,
    single_process,
    world_size,
)
from greedy_gnorm.pruning import loop  # noqa: E402
from greedy_gnorm.recovery import distillation  # noqa: E402

LIMIT = 90
"""Seconds after which a scenario counts as hanging."""

MEBIBYTE = 2**20


def exchange(folder: Path) -> Any:
    with process_group(print):
        number = rank()

        def fails_on_the_second() -> None:
            if number == 1:
                raise GnormError("no such thing")

        try:
            on_all_ranks(fails_on_the_second)
            message = None
        except GnormError as error:
            message = str(error)
        tensors = gather_tensors(torch.arange(2.0 * (1 + number), dtype=torch.float64).view(2, -1))
        rows = [[torch.tensor([[1.0], [4.0]])], [torch.tensor([[0.0]]), torch.tensor([[2.0], [3.0]])]][number]
        with single_process():
            by_itself = [rank(), world_size(), gather(number)]
        return {
            "rank": [number, world_size()],
            "gather": gather({"é": [number, None, 0.1], "more": "x" * number}),
            "tensors": [tensor.tolist() for tensor in tensors],
            "rows": gather_rows([each.double() for each in rows], [[[1, 4]], [[0], [2, 3]]][number]).flatten().tolist(),
            "nothing": gather_rows([torch.ones(1, 1).double()] * (1 - number), [[0]] * (1 - number)).tolist(),
            "broadcast": broadcast(lambda: number + 10),
            "single": by_itself,
            "failure": message,
        }


def large(folder: Path) -> Any:
    """How much memory gathering takes, as a multiple of the object's size."""
    value = "x" * (32 * MEBIBYTE)
    with process_group(print):
        gather(None)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        before = memory("VmRSS")
        found = gather(value)
        return {"lengths": [len(each) for each in found], "times": (memory("VmHWM") - before) / len(value)}


def memory(name: str) -> int:
    return int(re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def slow(folder: Path) -> Any:
    """One process works for longer than any timeout."""
    processes.TIMEOUT = timedelta(seconds=2)
    with process_group(print):
        time.sleep(5 * rank())
        return gather(rank())


def killed_while_the_first_waits(folder: Path) -> Any:
    return said_by_the_survivor(victim=1, work=lambda: gather(None))


def killed_while_the_first_works(folder: Path) -> Any:
    return said_by_the_survivor(victim=1, work=lambda: time.sleep(60))


def first_killed(folder: Path) -> Any:
    return said_by_the_survivor(victim=0, work=lambda: gather(None))


def said_by_the_survivor(victim: int, work: Callable[[], object]) -> Any:
    start = time.monotonic()
    try:
        with Interrupts(), process_group(print):  # as the command does: a parent may have switched Ctrl-C off
            gather(None)
            if rank() == victim:
                time.sleep(1)  # until the other one has what was gathered and is at work
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            work()
    except GnormError as error:
        return {"message": str(error), "seconds": time.monotonic() - start}


def error_in_a_score(folder: Path) -> Any:
    fail_on_the_second(NonFiniteScore("row 7 is infinite"))
    return gnorm(["prune", *inputs(folder), "--out", str(folder / "failed"), "--stop", "all", "--no-latency"])


def error_in_a_walk(folder: Path) -> Any:
    """The first process has walks of its own, for minutes."""
    fail_on_the_second(NonFiniteScore("row 7 is infinite"), pause=0.3)
    return gnorm(["compare", *inputs(folder), "--out", str(folder / "walked"), "--methods", "ae,random", "--runs", "2"])


def unexpected_error(folder: Path) -> Any:
    fail_on_the_second(KeyError("surprise"))
    return gnorm(["prune", *inputs(folder), "--out", str(folder / "unexpected"), "--stop", "all", "--no-latency"])


def interrupted(folder: Path) -> Any:
    """Ctrl-C reaches all processes."""
    fail_on_the_second(KeyboardInterrupt(), ranks=(0, 1))
    return gnorm(["prune", *inputs(folder), "--out", str(folder / "interrupted"), "--stop", "all", "--no-latency"])


def fail_on_the_second(error: BaseException, pause: float = 0, ranks: tuple[int, ...] = (1,)) -> None:
    """Let the third evaluation fail in these processes, and the others take their time."""
    judge, count = loop.judge, 0

    def changed(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if int(os.environ["RANK"]) not in ranks:
            time.sleep(pause)
        elif count == 3:
            raise error
        return judge(*arguments)

    loop.judge = changed


def compared(folder: Path) -> Any:
    """Which heads were gone when each process evaluated: by itself, or for both of them."""
    masks: list[list[list[int]]] = []
    judge = loop.judge

    def counted(sites: Any, batches: Any, measure: str) -> Any:
        masks.append([list(unit) for unit in sites.removed()])
        return judge(sites, batches, measure)

    loop.judge = experiment.judge = counted
    with process_group(print):
        walked = gg.compare(str(folder / "model"), str(folder / "rows.jsonl"), out=folder / "two", **COMPARISON)
    return {"masks": masks, "curves": {name: len(walks) for name, walks in walked.curves.items()}}


def compressed(folder: Path) -> Any:
    """Normal equations are sums over both processes."""
    with process_group(print):
        run = gg.compress(str(folder / "model"), str(folder / "rows.jsonl"), out=folder / "compressed", **COMPRESSION)
    return [[list(unit) for unit in step.removed] for step in run.steps]


def swapped(folder: Path) -> Any:
    """Derivatives of the rows of both processes are compared, and removals are tried on them."""
    with process_group(print):
        inputs = str(folder / "model"), str(folder / "rows.jsonl")
        runs = gg.compress(*inputs, **SWAPS), gg.prune(*inputs, **TRIALS)
    return [[[list(unit) for unit in step.removed] for step in run.steps] for run in runs]


def distilled(folder: Path) -> Any:
    """Gradients are sums over both processes; the second one has no row of the smallest batches."""
    with process_group(print):
        run = gg.compress(str(folder / "model"), str(folder / "rows.jsonl"), out=folder / "distilled", **DISTILLATION)
    return run.summary()["distilled"]


def distilled_further(folder: Path) -> Any:
    """The first process has a checkpoint, the other one no such file: both go on from it."""
    save, loss = distillation.SAVED_EVERY, distillation.Targets.loss
    given = {"out": folder / "further", **DISTILLATION}

    def interrupted(self: Any, sites: Any, number: int) -> Any:
        interrupted.calls += 1
        if interrupted.calls == 4:
            raise NonFiniteScore("enough")
        return loss(self, sites, number)

    interrupted.calls, distillation.SAVED_EVERY, distillation.Targets.loss = 0, 2, interrupted
    with process_group(print):
        try:
            gg.compress(str(folder / "model"), str(folder / "rows.jsonl"), **given)
        except NonFiniteScore:
            distillation.SAVED_EVERY, distillation.Targets.loss = save, loss
        run = gg.compress(str(folder / "model"), str(folder / "rows.jsonl"), resume=True, **given)
    return [interrupted.calls, *run.summary()["distilled"]["quality"]["loss"]]


COMPRESSION = {
    "macs": 0.5, "rounds": 3, "samples": 12, "calibration_tokens": 300, "tokens_per_batch": 64, "measure_speed": False
}  # fmt: skip

SWAPS = {**COMPRESSION, "method": "joint-swap", "recover": "none"}
TRIALS = {"look_ahead": 3, "stop": "heads=3", "samples": 12, "tokens_per_batch": 64}

DISTILLATION = {**COMPRESSION, "recover": "distill", "recover_steps": 6}

COMPARISON = {
    "methods": "greedy-gnorm,ae,random", "runs": 2, "trajectories": 3, "samples": 12, "protect": [(0, 1), (0, 2)]
}  # fmt: skip


def inputs(folder: Path) -> list[str]:
    return [str(folder / "model"), "--data", str(folder / "rows.jsonl")]


SCENARIOS = (
    exchange, large, slow, killed_while_the_first_waits, killed_while_the_first_works, first_killed, error_in_a_score,
    error_in_a_walk, unexpected_error, interrupted, compared, compressed, swapped, distilled, distilled_further,
)  # fmt: skip


def run(scenario: Callable[[Path], Any], folder: Path) -> list[dict[str, Any]]:
    """Both processes of a scenario, each a fork with the environment that a launcher sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    places = [folder / f"{scenario.__name__}-{number}" for number in range(2)]
    children = [fork(scenario, folder, place, number) for number, place in enumerate(places)]
    end, codes = time.monotonic() + LIMIT, dict[int, int | str]()
    while len(codes) < 2:
        for number, child in enumerate(children):
            if number in codes:
                continue
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[number] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[number] = "hangs"
        time.sleep(0.01)
    return [
        {
            "code": codes[number],
            "value": json.loads(value.read_text()) if (value := place / "value").exists() else None,
            **{name: (place / name).read_text() for name in ("out", "err")},
        }
        for number, place in enumerate(places)
    ]


def fork(scenario: Callable[[Path], Any], folder: Path, place: Path, number: int) -> int:
    place.mkdir()
    child = os.fork()
    if child:
        return child
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ["RANK"] = str(number)
    try:
        (place / "value").write_text(json.dumps(scenario(folder)))
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(folder: Path) -> None:
    sys.stdout.flush()
    print(json.dumps({scenario.__name__: run(scenario, folder) for scenario in SCENARIOS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
