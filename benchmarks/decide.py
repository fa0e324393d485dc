"""How many scoring rows decide a step of Greedy-Gnorm: python benchmarks/decide.py MODEL DATA writes to the docs.

Scoring could stop as soon as the head with the lowest score is certain. For steps of the exact walk, rows are taken in
random orders, 32 at a time. After each group a test asks whether all rows would pick the same head, with a chance of
0.001 to err: paired differences of log scores between that head and every other, by the delta method, with the standard
error of a sample without replacement and Student's t, the error shared equally among all pairs and looks (Bonferroni).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pages import write
from scipy.stats import t as student

from greedy_gnorm.model.modes import frozen
from greedy_gnorm.model.sites import Sites
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.gradients import row_norms
from greedy_gnorm.pruning.prepare import prepare_run
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.settings import Settings

GROUP, ERROR, ORDERS = 32, 0.001, 10

Norms = NDArray[np.float64]
"""The norms of the gradients of each head for each row, (3, rows, heads)."""


def certain(norms: Norms, population: int) -> bool:
    """Whether the head with the lowest score on these rows, a sample of the population, has the lowest on all."""
    means, rows = norms.mean(1), norms.shape[1]
    influences = (norms / means[:, None]).sum(0)  # (rows, heads): what a row adds to the logarithm of the product
    scores = np.log(means).sum(0)
    lowest = int(scores.argmin())
    others = np.arange(len(scores)) != lowest
    spread = (influences[:, others] - influences[:, [lowest]]).std(axis=0, ddof=1)
    looks = -(-population // GROUP) - 1
    bound = student.isf(ERROR / looks / others.sum(), rows - 1)
    errors = spread * np.sqrt((1 - rows / population) / rows)
    return bool((scores[others] - scores[lowest] > bound * errors).all())


def rows_needed(norms: Norms, seed: int) -> int:
    """The rows until a step is certain, in a random order."""
    population = norms.shape[1]
    order = np.random.default_rng(seed).permutation(population)
    looks = range(GROUP, population, GROUP)
    return next((seen for seen in looks if certain(norms[:, order[:seen]], population)), population)


def norms_of(sites: Sites, plan: Any) -> Norms:
    with frozen(sites.model):
        found = [row_norms(sites, batch, plan.objective) for batch in plan.scoring]
    return np.concatenate([torch.cat(parts, dim=1).double().numpy() for parts in zip(*found, strict=True)], axis=2)


def measured(model: str, data: str, samples: int, steps: int) -> list[str]:
    """For some steps of the exact walk: the share of the rows that is needed, and how many steps can stop early."""
    prepared = prepare_run(model, None, data, None, Settings(samples=samples, eval_samples=64))
    sites, plan = prepared.sites, prepared.plan
    needed = []
    for _ in range(steps):
        norms = norms_of(sites, plan)
        needed.append([rows_needed(norms, seed) for seed in range(ORDERS)])
        lowest = int(np.log(norms.mean(1)).sum(0).argmin())
        remove(sites, [sites.survivors()[lowest]])
        print(samples, len(needed), f"{np.mean(needed) / samples:.3f}", flush=True)
    early = np.array(needed) < samples
    return [
        f"{samples}", f"{np.mean(needed) / samples:.1%}", f"{early.any(axis=1).sum()} of {steps}",
        f"{early.sum()} of {early.size}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--samples", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    cells = [measured(given.model, given.data, samples, given.steps) for samples in given.samples]
    header = ["scoring rows", "rows needed on average", "steps that any order stops early", "steps x orders that stop"]
    write("performance.md", "decide", as_markdown(header, cells))


if __name__ == "__main__":
    main()
