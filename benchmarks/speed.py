"""What scoring and whole trajectories cost, in plain forward passes: `make bench` writes docs/performance.md.

All figures are ratios within one run. `--quick` measures the main ones and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.metrics  # noqa: F401 (the first evaluation would load it, within the time of a walk)
import torch
from matplotlib import pyplot
from pages import DOCS, write
from rivals import backward_per_sentence, in_order, papers_procedure, per_sample_gradients, plain_forward
from scipy.stats import kendalltau
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AlbertConfig, AutoModelForSequenceClassification, BertConfig

import greedy_gnorm as gg
from greedy_gnorm.data.batches import Batch, Batches, bucketed, padded
from greedy_gnorm.demo import prepare
from greedy_gnorm.model.sites import Sites, find_sites
from greedy_gnorm.passes.gradients import gradient_norms
from greedy_gnorm.pruning.costs import Costs
from greedy_gnorm.pruning.loop import Plan, Protection, prune_steps
from greedy_gnorm.pruning.methods import METHODS
from greedy_gnorm.pruning.prepare import situation_of
from greedy_gnorm.pruning.rules import parse_rules
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.scores import SCORES
from greedy_gnorm.settings import Savings
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import Step, removed_by

LOGIT_NORM = OBJECTIVES["logit-norm"]
PAGE = "performance.md"
KEPT = 4096 * 2**20
DEVICE = torch.device("cpu")

Work = Callable[[], Any]


def sentences(count: int, shortest: int, longest: int, tokens_per_batch: int = 2048) -> Batches:
    """Random token rows of unequal length with random labels, in the batches the package makes."""
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=chance).tolist()
    rows = [torch.randint(5, 30000, (length,), generator=chance).tolist() for length in lengths]
    labels = torch.randint(0, 3, (count,), generator=chance)
    tokenised = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    fill = {"input_ids": 0, "attention_mask": 0}
    items = [
        Batch(padded([tokenised[place] for place in group], fill), labels[group], tuple(group))
        for group in bucketed(lengths, tokens_per_batch)
    ]
    return Batches(tuple(items), f"{count} sentences of {shortest} to {longest} tokens").to(DEVICE)


def bert(**changes: Any) -> Sites:
    """A random classifier of BERT-base's shape, or of another."""
    return _random(BertConfig(num_labels=3, **changes))


def albert() -> Sites:
    """A random classifier of ALBERT-base's shape."""
    shape = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 12}
    return _random(AlbertConfig(num_labels=3, **shape))


def _random(config: Any) -> Sites:
    torch.manual_seed(0)
    return find_sites(AutoModelForSequenceClassification.from_config(config).eval().to(DEVICE), "heads")


def score(sites: Sites, batches: Batches) -> Any:
    return gradient_norms(sites, batches, LOGIT_NORM)


def seconds(work: Work) -> float:
    """The time of some work; a GPU has finished it."""
    start = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def paired_times(sites: Sites, batches: Batches, repeats: int = 5) -> list[tuple[float, float]]:
    """Seconds of one exact scoring pass and of a plain forward pass of the same batches, taken in turn.

    What slows the machine for a while slows both.
    """
    score(sites, batches), plain_forward(sites.model, batches)
    return [
        (seconds(lambda: score(sites, batches)), seconds(lambda: plain_forward(sites.model, batches)))
        for _ in range(repeats)
    ]


def pass_times(sites: Sites, batches: Batches, repeats: int = 5) -> tuple[float, float]:
    """The best of several times of a scoring pass, and of a plain forward pass: none is luckier."""
    ours, theirs = zip(*paired_times(sites, batches, repeats), strict=True)
    return min(ours), min(theirs)


def pass_ratio(sites: Sites, batches: Batches, repeats: int = 5) -> float:
    """One exact scoring pass in plain forward passes of the same batches."""
    ours, theirs = pass_times(sites, batches, repeats)
    return ours / theirs


def trajectory(sites: Sites, batches: Batches, steps: int | None = None) -> tuple[float, list[float], list[int]]:
    """Steps of a greedy walk, scoring and accuracy on the same rows, in plain forwards of the unpruned model.

    The total over the steps' number, the cost of each step, and the layer that each removes a head from.
    """
    plain_forward(sites.model, batches)
    unit = min(seconds(lambda: plain_forward(sites.model, batches)) for _ in range(5))
    start = time.perf_counter()
    walked = steps_of_a_walk(sites, batches, "all" if steps is None else f"heads={steps}")
    total = time.perf_counter() - start
    costs_of_steps = [sum(step.seconds.values()) / unit for step in walked[1:]]
    layers = [sites[step.removed[0].site].layer for step in walked[1:]]
    return total / (len(walked) - 1) / unit, costs_of_steps, layers


def steps_of_a_walk(sites: Sites, batches: Batches, stop: str) -> list[Step]:
    """A greedy walk, scoring and accuracy on the same rows."""
    sites.use(Savings(kept_bytes=KEPT))
    costs, measure = Costs(sites, 4), task_of(sites.model).measure(None, batches)
    plan = Plan(
        batches, batches, METHODS["greedy-gnorm"], SCORES["gnorm"], LOGIT_NORM,
        parse_rules([stop], situation_of(sites, Protection(), costs, measure)), Protection(), costs,
    )  # fmt: skip
    return list(prune_steps(sites, plan))


def multiplications(work: Work) -> int:
    """The floating-point operations of the matrix products in some work; only ratios of them are used."""
    counter = _Counter()
    with counter:
        work()
    return counter.total


class _Counter(TorchDispatchMode):
    """Counts the matrix products of all operations, those of backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: dict[str, Any] | None = None
    ) -> Any:
        count = flop_registry.get(function.overloadpacket)
        if count is None:  # in inference mode, operations come as they are called and not in their parts
            with self:
                result = function.decompose(*arguments, **(options or {}))
            if result is not NotImplemented:
                return result
        result = function(*arguments, **(options or {}))
        if count is not None:
            self.total += count(*arguments, **(options or {}), out_val=result)
        return result


def counts() -> list[list[str]]:
    """Exact work in multiplications of a plain forward: what is left if everything else took no time."""

    def shape() -> Sites:
        sites = bert()
        sites.model.set_attn_implementation("eager")  # whose products are counted
        return sites

    cells = []
    for name, batches in (
        ("one scoring pass, 10 to 32 tokens", sentences(16, 10, 32)),
        ("one scoring pass, 128 tokens", sentences(2, 128, 128)),
        ("one scoring pass, 512 tokens", sentences(1, 512, 512)),
    ):
        sites = shape()
        forward = multiplications(lambda: plain_forward(sites.model, batches))  # noqa: B023
        cells.append([name, f"{multiplications(lambda: score(sites, batches)) / forward:.2f}"])  # noqa: B023
    sites, batches = shape(), sentences(4, 10, 32)
    forward = multiplications(lambda: plain_forward(sites.model, batches))
    walked: list[Step] = []
    total = multiplications(lambda: walked.extend(steps_of_a_walk(sites, batches, "all")))
    cells.append([f"a step of {len(walked) - 1}, score and accuracy", f"{total / (len(walked) - 1) / forward:.2f}"])
    return cells


def memory(what: str) -> float:
    """The peak memory of a fresh process that runs the model once, or scores once, in megabytes."""
    command = [sys.executable, __file__, "--memory", what, "--device", str(DEVICE)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _memory_here(what: str) -> None:
    sites, batches = bert(), sentences(64, 10, 32)
    with torch.no_grad():
        plain_forward(sites.model, batches)
    if what == "scoring":
        score(sites, batches)
    if DEVICE.type == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20)
        return
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print(next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")))


def against_rivals(sites: Sites, batches: Batches, repeats: int) -> dict[str, float]:
    """How many times longer the slow ways take than one exact scoring pass."""
    ours = min(seconds(lambda: score(sites, batches)) for _ in range(2 * repeats + 1))
    as_they_come = in_order(batches)
    rivals: dict[str, tuple[float, Work]] = {
        "a backward per sentence": (1, lambda: backward_per_sentence(sites, batches)),
        "per-sample gradients by torch.func": (1, lambda: per_sample_gradients(sites, batches)),
        # Two layers are timed, and the twelve take six times that
        "the paper's procedure, our batches": (6, lambda: papers_procedure(sites, batches, 2)),
        "the paper's procedure, 32 sentences as they come": (6, lambda: papers_procedure(sites, as_they_come, 2)),
    }
    return {name: times * seconds(rival) / ours for name, (times, rival) in rivals.items()}


def quick() -> dict[str, Any]:
    """The main ratios, in less than two minutes."""
    sites, batches = bert(), sentences(64, 10, 32)
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "scoring pass, 10 to 32 tokens / plain forward": pass_ratio(sites, batches, 3),
        "scoring pass, 128 tokens / plain forward": pass_ratio(sites, sentences(8, 128, 128), 3),
        "a backward per sentence / scoring pass": seconds(lambda: backward_per_sentence(sites, batches))
        / seconds(lambda: score(sites, batches)),
        "10 steps, score and accuracy / 10 plain forwards": trajectory(sites, batches, 10)[0],
    }
    return {name: round(value, 2) for name, value in found.items()}


# Growth: one thing changes at a time, at half of BERT-base's width


Times = list[tuple[float, float]]


def growth() -> dict[str, tuple[Sequence[int], Times]]:
    """Seconds of one scoring pass and of a plain forward pass, by tokens, sentences, layers and heads."""
    small: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1536}
    one = bert(**small)
    lengths, counts = (16, 64, 128, 512), (16, 64, 256)
    layers, heads = (2, 6, 12), (3, 12, 24)
    deep = {count: bert(num_hidden_layers=count, **small) for count in layers}
    wide = {count: bert(num_attention_heads=count, **small) for count in heads}
    return {
        "tokens a sentence": (lengths, [pass_times(one, sentences(8, size, size), 3) for size in lengths]),
        "sentences": (counts, [pass_times(one, sentences(count, 10, 32), 3) for count in counts]),
        "layers": (layers, [pass_times(deep[count], sentences(64, 10, 32), 3) for count in layers]),
        "heads a layer": (heads, [pass_times(wide[count], sentences(64, 10, 32), 3) for count in heads]),
    }


def ratios_of(times: Times) -> list[float]:
    return [ours / theirs for ours, theirs in times]


def exponents(grown: dict[str, tuple[Sequence[int], Times]]) -> list[list[str]]:
    """The slope of time against size on logarithmic scales: 1 is proportional, 0 is constant."""
    cells = []
    for name, (sizes, times) in grown.items():
        slopes = [np.polyfit(np.log(sizes), np.log(seconds), 1)[0] for seconds in zip(*times, strict=True)]
        cells.append([name, *(f"{slope:.2f}" for slope in slopes)])
    return cells


def inexact() -> list[list[str]]:
    """What bfloat16 and several heads a step cost in order and quality, on the demo's trained classifier."""
    assets = prepare()
    settings: dict[str, Any] = {"samples": 128, "eval_samples": 300, "stop": "all"}
    ways = {
        "exact": {},
        "bfloat16": {"dtype": "bfloat16"},
        "2 heads a step": {"heads_per_step": 2},
        "4 heads a step": {"heads_per_step": 4},
        "8 heads a step": {"heads_per_step": 8},
    }
    cells, orders, unit = [], {}, 0.0
    for name, changes in ways.items():
        start = time.perf_counter()
        run = gg.prune(assets.model, str(assets.data), device=str(DEVICE), **{**settings, **changes})
        spent = time.perf_counter() - start
        unit = unit or spent
        order = removed_by(run.steps)
        orders[name] = [order.index(head) for head in sorted(order)]
        tau = kendalltau(orders["exact"], orders[name]).statistic
        gone = np.cumsum([len(step.removed) for step in run.steps])
        curve = np.array([step.quality["accuracy"] for step in run.steps])
        at = [float(np.interp(share * gone[-1], gone, curve)) for share in (0.25, 0.5, 0.75)]
        mean = float(np.trapezoid(curve, gone) / gone[-1])
        cells.append([name, f"{tau:.3f}", *(f"{value:.3f}" for value in at), f"{mean:.3f}", f"{spent / unit:.2f}"])
    return cells


def profile_of_a_pass(sites: Sites, batches: Batches) -> list[list[str]]:
    """Where one scoring pass spends its time."""
    score(sites, batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        score(sites, batches)
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return [[event.key[:60], f"{100 * event.self_cpu_time_total / total:.1f} %"] for event in events[:8]]


def full() -> None:
    """Everything, into docs/performance.md and docs/figures/performance.png."""
    sites, batches = bert(), sentences(64, 10, 32)
    rows: list[list[str]] = []

    def add(work: str, measure: str, reach: str, value: float) -> None:
        rows.append([work, measure, reach, f"{value:.2f}"])
        print(rows[-1], flush=True)

    write_passes()
    same = "time / plain forward"
    rivals = against_rivals(sites, batches, 1)
    reach = {"a backward per sentence": ">= 8", "the paper's procedure, our batches": ">= 40"}
    for name, value in rivals.items():
        add(f"{name}", "time / one scoring pass", reach.get(name, ""), value)
    add("ALBERT-base shape, one scoring pass", same, "<= 3", pass_ratio(albert(), batches, 3))
    profile = profile_of_a_pass(sites, batches)
    peak = memory("scoring") / memory("forward")
    add("peak memory of a process that scores", "over one that runs the model", "<= 3", peak)
    walk()
    write_counts()
    write_growth()
    rough = inexact()
    version = torch.__version__.partition("+")[0]
    write(PAGE, "how", f"{torch.get_num_threads()} threads, torch {version}, {platform.machine()}, {DEVICE}, float32.")
    write(PAGE, "ratios", as_markdown(["work", "measure", "to reach", "measured"], rows))
    write(PAGE, "profile", as_markdown(["operation", "share"], profile))
    write(PAGE, "inexact", as_markdown(["way", "tau", "at 25%", "at 50%", "at 75%", "mean", "time"], rough))


def write_passes() -> None:
    """What one scoring pass costs, with the spread of several repeats."""
    sites, cells = bert(), []
    for name, reach, rows in (
        ("64 sentences of 10 to 32 tokens", 2.05, sentences(64, 10, 32)),
        ("16 sentences of 128 tokens", 1.95, sentences(16, 128, 128)),
        ("4 sentences of 512 tokens", 2.2, sentences(4, 512, 512)),
    ):
        pairs = paired_times(sites, rows)
        ours, theirs = (min(times) for times in zip(*pairs, strict=True))
        ratios = sorted(each / unit for each, unit in pairs)
        cells.append([name, f"<= {reach:g}", f"{ours / theirs:.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
    threads = f"{torch.get_num_threads()} threads.\n\n"
    write(PAGE, "passes", threads + as_markdown(["rows", "to reach", "best / best", "five repeats"], cells))


def write_counts() -> None:
    """What exact work takes in multiplications alone."""
    write(PAGE, "counts", as_markdown(["work", "multiplications / those of a plain forward"], counts()))


def write_growth() -> None:
    """How the cost of a pass grows."""
    grown = growth()
    draw(grown)
    tables = [
        as_markdown([name, *map(str, sizes)], [["ratio", *(f"{value:.2f}" for value in ratios_of(times))]])
        for name, (sizes, times) in grown.items()
    ]
    write(PAGE, "growth", "\n".join(tables))
    write(PAGE, "exponents", as_markdown(["time grows with", "scoring pass", "plain forward"], exponents(grown)))


def walk() -> None:
    """All 144 steps, and what each costs."""
    whole, steps, layers = trajectory(bert(), sentences(64, 10, 32))
    header = ["work", "measure", "to reach", "mean", "median step"]
    row = ["all 144 steps, score and accuracy on the same rows", "time / plain forward of the unpruned model", "< 1.0"]
    write(PAGE, "walk", as_markdown(header, [[*row, f"{whole:.2f}", f"{np.median(steps):.2f}"]]))
    dozens = [slice(start, start + 12) for start in range(0, len(steps), 12)]
    cells = [
        ["cost", *(f"{np.mean(steps[dozen]):.2f}" for dozen in dozens)],
        ["layer", *(f"{np.mean(layers[dozen]):.1f}" for dozen in dozens)],
    ]
    write(PAGE, "dozens", as_markdown(["steps", *(f"{each.start + 1} to {each.stop}" for each in dozens)], cells))
    figure, axis = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axis.plot(range(1, len(steps) + 1), steps, color="#D55E00", linewidth=1)
    axis.set(xlabel="step of the walk", ylabel="step / unpruned forward", ylim=(0, 1.1 * max(steps)))
    figure.savefig(DOCS / "figures" / "performance-walk.png", dpi=110)


def draw(grown: dict[str, tuple[Sequence[int], Times]]) -> None:
    figure, axes = pyplot.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
    for axis, (name, (sizes, times)) in zip(axes, grown.items(), strict=True):
        axis.plot(sizes, ratios_of(times), marker="o", color="#0072B2")
        axis.set(xlabel=name, ylim=(0, 3), xscale="log", xticks=sizes, xticklabels=[str(size) for size in sizes])
        axis.minorticks_off()
    axes[0].set_ylabel("scoring pass / plain forward")
    figure.savefig(DOCS / "figures" / "performance.png", dpi=110)


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the main ratios as JSON")
    parser.add_argument("--passes", action="store_true", help="scoring passes alone")
    parser.add_argument("--walk", action="store_true", help="the 144 steps alone")
    parser.add_argument("--growth", action="store_true", help="the growth of a pass alone")
    parser.add_argument("--counts", action="store_true", help="multiplications alone")
    parser.add_argument("--memory", choices=("forward", "scoring"), help=argparse.SUPPRESS)
    parser.add_argument("--device", type=torch.device, default=DEVICE, help="where models run: cpu or cuda")
    given = parser.parse_args()
    DEVICE = given.device
    if given.memory:
        _memory_here(given.memory)
    elif given.passes:
        write_passes()
    elif given.walk:
        walk()
    elif given.counts:
        write_counts()
    elif given.growth:
        write_growth()
    elif given.quick:
        print(json.dumps(quick(), indent=2))
    else:
        full()


if __name__ == "__main__":
    main()
