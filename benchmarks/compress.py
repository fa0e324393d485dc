"""What a round of a compression costs, in plain forward passes: `make bench-compress` writes to docs/performance.md.

MiniLM's shape, 256 rows to score on, 2,048 to calibrate on, 20 rounds to a quarter of the multiplications. All figures
are ratios within one run.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pages import write
from rivals import plain_forward
from speed import bert, seconds, sentences

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.model.sites import Sites, features, find_sites
from greedy_gnorm.model.sizes import MEGABYTE
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.calibration import Calibration
from greedy_gnorm.passes.equations import NormalEquations
from greedy_gnorm.pruning.budget import Budget, Target, even_schedule, part_of, pick_round
from greedy_gnorm.pruning.costs import Costs, shape_for
from greedy_gnorm.pruning.methods import JOINT, METHODS
from greedy_gnorm.pruning.prepare import savings_for
from greedy_gnorm.recovery.least_squares import SOLVERS, Recovery
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.scores import SCORES
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.objectives import OBJECTIVES

PAGE = "performance.md"
MINILM: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12,
}  # fmt: skip
LENGTHS = (10, 40)


class Timer:
    """Adds up the seconds of a function."""

    def __init__(self, function: Any) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.function(*arguments)
        finally:
            self.seconds += time.perf_counter() - start


def models() -> tuple[Sites, Sites]:
    """The unpruned model, and a copy to prune."""
    sites = bert(**MINILM)
    return find_sites(sites.model), find_sites(copy.deepcopy(sites.model))


def products(sites: Sites, calibration: Batches) -> float:
    """Seconds of the bare products X'X and X'Y of all fits, with as many rows at once as a batch has.

    A site has two: of its output map, and of the hidden states that its input maps read.
    """
    tokens, total = sum(calibration.lengths()) // len(calibration), 0.0
    for site in sites:
        inputs, outputs = features(site.output)
        for width in (inputs, outputs):
            x, y = torch.rand(tokens, width), torch.rand(tokens, outputs)
            total += min(seconds(lambda x=x, y=y: (x.mT @ x, x.mT @ y)) for _ in range(3))
    return total * len(calibration)


def rounds(scoring: Batches, calibration: Batches, count: int, share: float = 0.25) -> list[list[str]]:
    """Seconds of all rounds, by what they are spent on, over what they may take."""
    original, sites = models()
    plain_forward(original.model, scoring)
    scored = calibrated = 0.0  # seconds of plain forward passes, one in each round: the machine may be slower in some
    costs = Costs(sites, 4, shape_for(None, calibration))
    start_cost = costs.of(sites)
    target = Target("share", "multiplications", share * part_of(start_cost, "multiplications"))
    budget = Budget((target,), start_cost, even_schedule(count))
    score = Timer(lambda: SCORES[METHODS[JOINT].score](sites, scoring, OBJECTIVES["loss"]))
    stored = Calibration(original, calibration)
    store = Timer(lambda: [stored.weights(original[0], number) for number in range(len(calibration))])
    recovery = Timer(Recovery("least-squares", SOLVERS["least-squares"], stored))
    own, timer = NormalEquations.add, Timer(NormalEquations.add)
    needed = 0.0
    store()
    try:
        for number in range(1, count + 1):
            scores = score()
            remove(sites, pick_round(scores, sites, scores.order(), budget, costs, number))
            NormalEquations.add = lambda self, *rows: timer(self, *rows)  # type: ignore[method-assign]
            recovery(sites)
            NormalEquations.add = own  # type: ignore[method-assign]
            scored += seconds(lambda: plain_forward(original.model, scoring))
            calibrated += seconds(lambda: plain_forward(original.model, calibration))
            needed += seconds(lambda: plain_forward(sites.model, calibration)) + products(sites, calibration)
            print(f"round {number}: {recovery.seconds:.0f} s", flush=True)
    finally:
        NormalEquations.add = own  # type: ignore[method-assign]
    gram, fitted = timer.seconds, recovery.seconds - timer.seconds
    allowed, spent = 4 * scored + calibrated + gram, score.seconds + recovery.seconds + store.seconds
    of_scoring, of_calibration = (f"plain forwards of the {rows} rows per round" for rows in ("scoring", "calibration"))
    whole = "time / (4 scoring forwards, 1 calibration forward and the products per round)"
    return [
        ["storing what the unpruned model has, once", "plain forwards of the calibration rows", "",
         f"{store.seconds * count / calibrated:.2f}"],
        ["scoring", of_scoring, "<= 4", f"{score.seconds / scored:.2f}"],
        ["fitting, without products", of_calibration, "<= 1", f"{fitted / calibrated:.2f}"],
        ["products X'X and X'Y", of_calibration, "", f"{gram / calibrated:.2f}"],
        ["fitting", "time / (a forward of the pruned model and the bare products)", "<= 1.2",
         f"{recovery.seconds / needed:.2f}"],
        ["all rounds", whole, "<= 1", f"{spent / allowed:.2f}"],
    ]  # fmt: skip


def peak(what: str, tokens: int) -> int:
    """The largest memory of a process that runs the model, that fits it, or that also scores it, in bytes."""
    here = [sys.executable, str(Path(__file__).resolve()), "--memory", what, "--tokens", str(tokens)]
    return int(subprocess.run(here, capture_output=True, text=True, check=True).stdout.split()[-1])


def _memory_here(what: str, tokens: int) -> None:
    calibration = sentences(tokens // 25, *LENGTHS)
    original, sites = models()
    plain_forward(original.model, calibration)
    if what == "round":
        SCORES[METHODS[JOINT].score](
            sites.use(savings_for(Settings(method=JOINT))), sentences(256, *LENGTHS), OBJECTIVES["loss"]
        )
    if what != "forward":
        remove(sites, [unit for unit in sites.survivors() if unit.index % 2])
        Recovery("least-squares", SOLVERS["least-squares"], Calibration(original, calibration))(sites)
    # Not ru_maxrss, which a process inherits from the one that started it
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print(1024 * int(status.partition("VmHWM:")[2].split()[0]))


def memory() -> list[list[str]]:
    """Memory that fitting, and a whole round, need beyond running the model, by the number of calibration tokens."""
    cells = []
    for tokens in (8_192, 65_536):
        least = peak("forward", tokens)
        extra = [peak(what, tokens) - least for what in ("fitting", "round")]
        cells.append([f"{tokens:,}", *(f"{each / MEGABYTE:.0f}" for each in extra)])
    return cells


def write_memory() -> None:
    header = ["calibration tokens", "MB beyond running the model: fitting", "scoring and fitting"]
    write(PAGE, "compress-memory", as_markdown(header, memory()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("memory",), help="measure only the memory")
    parser.add_argument("--memory", choices=("forward", "fitting", "round"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=65_536, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        _memory_here(given.memory, given.tokens)
        return
    if given.only == "memory":
        write_memory()
        return
    cells = rounds(sentences(256, *LENGTHS), sentences(2048, *LENGTHS), given.rounds)
    threads = f"{torch.get_num_threads()} threads, {given.rounds} rounds."
    write(PAGE, "compress", threads + "\n\n" + as_markdown(["work", "measure", "to reach", "measured"], cells))
    write_memory()


if __name__ == "__main__":
    main()
