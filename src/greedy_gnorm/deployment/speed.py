"""How fast a model runs: multiplications are counted, times before and after are measured in turn."""

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
from greedy_gnorm.model.modes import evaluating
from greedy_gnorm.model.sites import features, find_sites
from greedy_gnorm.units import ATTENTION, Latency

SHAPES = ((1, 32), (8, 128))
"""Rows and tokens of the batches that are timed by default."""

Inputs = dict[str, Tensor]
Runner = Callable[[Inputs], object]
"""Runs a model over one batch."""


def torch_latencies(
    before: nn.Module, after: nn.Module, shapes: Sequence[tuple[int, int]] = SHAPES, *, seconds: float = 2.0
) -> list[Latency]:
    """Both models timed by torch, without gradients, on random tokens of each shape that fits."""
    with evaluating(before), evaluating(after), torch.inference_mode():
        return [
            timed("torch", torch_runner(before), torch_runner(after), random_inputs(before, *shape), seconds=seconds,
                  promised=multiplications(before, shape[1]) / multiplications(after, shape[1]))
            for shape in possible(before, shapes)
        ]  # fmt: skip


def possible(model: nn.Module, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[tuple[int, int]]:
    """The shapes whose sentences are not too long for the model."""
    return [(rows, tokens) for rows, tokens in shapes if tokens <= longest_sentence(model)]


def timed(
    runtime: str, before: Runner, after: Runner, inputs: Inputs, *, seconds: float = 2.0, promised: float | None = None
) -> Latency:
    """Two runners on one batch, in turn, after a warm-up: at least 5 times, at most 50, for about these seconds."""
    for runner in (before, after):
        runner(inputs)
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < 5 or (len(pairs) < 50 and time.perf_counter() < end):
        pairs.append((_milliseconds(before, inputs), _milliseconds(after, inputs)))
    (first, first_spread), (second, second_spread) = (_summary(times) for times in zip(*pairs, strict=True))
    rows, tokens = inputs["input_ids"].shape
    return Latency(
        runtime, rows, tokens, torch.get_num_threads(), len(pairs), first, first_spread, second, second_spread, promised
    )


def _summary(times: Sequence[float]) -> tuple[float, tuple[float, float]]:
    low, median, high = statistics.quantiles(times, n=4)
    return median, (low, high)


def _milliseconds(runner: Runner, inputs: Inputs) -> float:
    start = time.perf_counter()
    runner(inputs)
    return 1000 * (time.perf_counter() - start)


def torch_runner(model: nn.Module) -> Runner:
    """A model as a function of a batch."""

    def run(inputs: Inputs) -> object:
        output = model(**inputs).logits
        return float(output.flatten()[0])  # waits for a GPU to finish

    return run


def random_inputs(model: nn.Module, rows: int, tokens: int) -> Inputs:
    """A batch without padding, with token types where the model has them."""
    config: Any = model.config
    chance = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    lowest = min((config.pad_token_id or 0) + 1, config.vocab_size - 1)
    ids = torch.randint(lowest, config.vocab_size, (rows, tokens), generator=chance).to(device)
    types = {"token_type_ids": torch.zeros_like(ids)} if getattr(config, "type_vocab_size", 0) > 1 else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}


def multiplications(model: nn.Module, tokens: int) -> int:
    """Multiplications for one sentence of so many tokens: in linear maps, and between queries, keys and values."""
    counted = 0

    def count(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        nonlocal counted
        counted += output.numel() * features(module)[0]

    with ExitStack() as stack, evaluating(model), torch.inference_mode():
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                stack.callback(module.register_forward_hook(count).remove)
        model(**random_inputs(model, 1, tokens))
    maps = sum(
        site.applications * len(site.survivors) * (site.sizes["q"] + site.output_size)
        for site in find_sites(model)
        if site.kind == ATTENTION
    )
    return counted + tokens * tokens * maps
