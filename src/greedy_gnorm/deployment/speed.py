"""How fast a model runs: times before and after, measured in turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from greedy_gnorm.model.modes import evaluating
from greedy_gnorm.passes.speed import (
    SHAPES,
    Inputs,
    Runner,
    in_turn,
    multiplications,
    possible,
    quartiles,
    random_inputs,
    torch_runner,
)
from greedy_gnorm.units import Latency


def torch_latencies(
    before: nn.Module, after: nn.Module, shapes: Sequence[tuple[int, int]] = SHAPES, *, seconds: float = 2.0
) -> list[Latency]:
    """Both models timed by torch, without gradients, on random tokens of each shape that fits."""
    with evaluating(before), evaluating(after), torch.inference_mode():
        return [
            timed(
                "torch",
                torch_runner(before),
                torch_runner(after),
                random_inputs(before, *shape),
                shape,
                seconds=seconds,
                promised=multiplications(before, shape[1]) / multiplications(after, shape[1]),
            )
            for shape in possible(before, shapes)
        ]


def timed(
    runtime: str,
    before: Runner,
    after: Runner,
    inputs: Inputs,
    shape: tuple[int, int],
    *,
    seconds: float = 2.0,
    promised: float | None = None,
) -> Latency:
    """Two runners on one batch of a shape, in turn, after a warm-up: 5 to 50 times, for about these seconds."""
    first, second = in_turn([before, after], inputs, seconds=seconds)
    return Latency(
        runtime, *shape, torch.get_num_threads(), len(first), *quartiles(first), *quartiles(second), promised
    )
