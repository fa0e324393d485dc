"""Per-sentence, per-head gradient norms of the Q, K and V weights, from one backward pass per batch.

A projection with input X (T, d) and output gradient g (T, D) has the weight gradient X^T g. The squared norm of the
columns of head h is `sum over t and over d in h of g * (X X^T g)`: the Gram form needs no weight gradient. Where a
sentence is long against the width, forming X^T g sentence by sentence is cheaper; both are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from greedy_gnorm.batches import Batch, Batches
from greedy_gnorm.errors import NonFiniteScore
from greedy_gnorm.heads import Matrix
from greedy_gnorm.modes import frozen
from greedy_gnorm.objectives import ObjectiveFunction
from greedy_gnorm.sites import AttentionSite, Sites

PROJECTIONS = ("q", "k", "v")


@dataclass
class Trace:
    """What one site saw in a forward pass: an entry per application (ALBERT has several)."""

    site: AttentionSite
    inputs: list[Tensor] = field(default_factory=list)  # (B, T, d)
    outputs: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in PROJECTIONS})  # (B, T, D)


def gradient_norms(sites: Sites, batches: Batches, objective: ObjectiveFunction) -> dict[str, Matrix]:
    """Mean over sentences of the norm of each head's weight gradient, {"q", "k", "v"}: (sites, heads)."""
    sums = [np.zeros((len(PROJECTIONS), len(site.survivors))) for site in sites]
    with frozen(sites.model):
        for number, batch in enumerate(batches):
            for site, norms in zip(sites, sentence_norms(sites, batch, objective), strict=True):
                if not torch.isfinite(norms).all():
                    raise NonFiniteScore(
                        f"A gradient norm at {site} is NaN or infinite in batch {number} (rows {_some(batch.rows)} of "
                        f"the scoring data). Look for NaN in the model's weights, or score with --dtype float32."
                    )
                sums[site.index] += norms.sum(1).cpu().numpy()
    return {
        name: sites.expand([total[place] / batches.rows for total in sums]) for place, name in enumerate(PROJECTIONS)
    }


def sentence_norms(sites: Sites, batch: Batch, objective: ObjectiveFunction) -> list[Tensor]:
    """The norms for each sentence of one batch, a (3, B, survivors) float64 tensor per site."""
    with torch.inference_mode(False), torch.enable_grad(), traced(sites) as traces:
        values = objective(sites.model, batch)
        if values.shape != (len(batch),):
            raise ValueError(f"an objective gives one number per row, not {tuple(values.shape)}")
        outputs = [output for trace in traces for name in PROJECTIONS for output in trace.outputs[name]]
        gradients = iter(torch.autograd.grad(values.sum(), outputs) if outputs else ())
    norms = {trace.site.index: _site_norms(trace, gradients) for trace in traces}
    empty = torch.zeros(len(PROJECTIONS), len(batch), 0, dtype=torch.float64)
    return [norms.get(site.index, empty) for site in sites]


@contextmanager
def traced(sites: Sites) -> Iterator[list[Trace]]:
    """Record the inputs and outputs of the q, k, v projections of every site that has heads, while the model runs.

    The outputs are where the graph begins: no gradient flows to weights or embeddings.
    """
    traces = [Trace(site) for site in sites if site.survivors]
    with ExitStack() as stack:
        for trace in traces:
            for name, linear in trace.site.projections.items():
                stack.callback(linear.register_forward_hook(_record(trace, name)).remove)
        yield traces


def _record(trace: Trace, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if name == PROJECTIONS[0]:  # the three share their input
            trace.inputs.append(arguments[0].detach())
        trace.outputs[name].append(output.requires_grad_())

    return hook


def _site_norms(trace: Trace, gradients: Iterator[Tensor]) -> Tensor:
    """The norms at one site, (3, B, survivors); takes the site's gradients off the iterator."""
    # The weight gradient is a sum over applications, so they are stacked along time: (B, applications * T, d)
    inputs = torch.cat(trace.inputs, dim=1)
    exact = torch.promote_types(inputs.dtype, torch.float32)
    inputs = inputs.to(exact)
    width, length = trace.site.head_size * len(trace.site.survivors), inputs.shape[1]
    gram = inputs @ inputs.mT if gram_is_cheaper(length, inputs.shape[2], width) else None
    norms = []
    for name in PROJECTIONS:
        stacked = torch.cat([next(gradients) for _ in trace.outputs[name]], dim=1).to(exact)
        norms.append(head_norms(inputs, stacked, gram, trace.site.head_size))
    return torch.stack(norms)


def gram_is_cheaper(length: int, inputs: int, outputs: int) -> bool:
    """Whether X X^T once and its product with three g cost fewer multiplications than three X^T g."""
    return length * (inputs + 3 * outputs) < 3 * inputs * outputs


def head_norms(inputs: Tensor, gradient: Tensor, gram: Tensor | None, head_size: int) -> Tensor:
    """Norms of the head blocks of X^T g for each sentence, (B, heads) in float64; by the Gram form if it is given."""
    rows, length, width = gradient.shape
    heads = gradient.view(rows, length, width // head_size, head_size)  # (B, T, H, d_h)
    # Squares of vanishing gradients leave float32's range: a power of two per head takes them out and back, exactly
    largest = heads.abs().amax((1, 3), keepdim=True)  # (B, 1, H, 1)
    scale = torch.exp2(torch.frexp(largest).exponent.to(heads.dtype))
    scaled = (heads / scale).flatten(2)  # (B, T, D)
    # (B, T, D) or (B, d, D)
    terms = (inputs.mT @ scaled).square() if gram is None else scaled * (gram @ scaled)
    squares: Tensor = terms.view(rows, -1, width // head_size, head_size).sum((1, 3), dtype=torch.float64)
    return squares.clamp_min(0).sqrt() * scale[:, 0, :, 0].double()


def _some(rows: tuple[int, ...], most: int = 5) -> str:
    return ", ".join(map(str, rows[:most])) + (", ..." if len(rows) > most else "")
