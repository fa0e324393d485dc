"""How much a model has to compute: multiplications are counted, and times measured on random tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from greedy_gnorm.data.encoding import longest_sentence
from greedy_gnorm.model.families import image_tokens
from greedy_gnorm.model.modes import evaluating
from greedy_gnorm.model.sites import features, find_sites
from greedy_gnorm.tasks.task import task_of

Inputs = dict[str, Tensor]
Runner = Callable[[Inputs], object]
"""Runs a model over one batch."""

SHAPES = ((1, 32), (8, 128))
"""Rows and tokens of the batches that are timed by default."""


def possible(model: nn.Module, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[tuple[int, int]]:
    """The shapes whose sentences are not too long for the model; images have a fixed number of tokens."""
    config: Any = model.config
    fixed = image_tokens(config)
    if fixed is not None:
        return list(dict.fromkeys((rows, fixed) for rows, _ in shapes))
    return [(rows, tokens) for rows, tokens in shapes if tokens <= longest_sentence(model)]


def torch_runner(model: nn.Module) -> Runner:
    """A model as a function of a batch."""

    def run(inputs: Inputs) -> object:
        first: Tensor = model(**inputs)[0]
        return float(first.flatten()[0])  # waits for a GPU to finish

    return run


def random_inputs(model: nn.Module, rows: int, tokens: int, choices: int = 1) -> Inputs:
    """A batch without padding, the same each time, as the model's task takes it."""
    inputs = task_of(model).random_inputs(rows, tokens, torch.Generator().manual_seed(0), choices)
    device = next(model.parameters()).device
    return {name: each.to(device) for name, each in inputs.items()}


def in_turn(
    runners: Sequence[Runner], inputs: Inputs, *, seconds: float, least: int = 5, most: int = 50
) -> list[list[float]]:
    """Milliseconds of each runner on one batch, taken in turn after a warm-up, for about these seconds."""
    for runner in runners:
        runner(inputs)
    rounds: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() < end):
        rounds.append([_milliseconds(runner, inputs) for runner in runners])
    return [list(times) for times in zip(*rounds, strict=True)]


def _milliseconds(runner: Runner, inputs: Inputs) -> float:
    start = time.perf_counter()
    runner(inputs)
    return 1000 * (time.perf_counter() - start)


def quartiles(times: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median, and the quartiles around it."""
    low, median, high = statistics.quantiles(times, n=4)
    return median, (low, high)


def multiplications(model: nn.Module, tokens: int) -> int:
    """Multiplications for one sentence of so many tokens: in linear maps, and between queries, keys and values."""
    counted = 0

    def count(module: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        nonlocal counted
        inputs = module.weight[0].numel() if isinstance(module, nn.Conv2d) else features(module)[0]
        counted += output.numel() * inputs

    with ExitStack() as stack, evaluating(model), torch.inference_mode():
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D | nn.Conv2d):
                stack.callback(module.register_forward_hook(count).remove)
        model(**random_inputs(model, 1, tokens))
    products = sum(
        site.applications * len(site.survivors) * site.products_per_unit(tokens, tokens * tokens)
        for site in find_sites(model, "heads")
    )
    return counted + round(products)
