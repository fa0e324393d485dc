"""Per-sentence gradients of each head, from one backward pass per batch: of the Q, K and V weights, of gates, of maps.

A projection with input X (T, d) and output gradient g (T, D) has the weight gradient X^T g. The squared norm of the
columns of head h is `sum over t and over d in h of g * (X X^T g)`: the Gram form needs no weight gradient. Where a
sentence is long against the width, forming X^T g sentence by sentence is cheaper; both are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from greedy_gnorm.attention import attention_maps
from greedy_gnorm.batches import Batch, Batches
from greedy_gnorm.heads import Matrix
from greedy_gnorm.modes import frozen
from greedy_gnorm.objectives import ObjectiveFunction
from greedy_gnorm.passes import CONTEXT, PROJECTIONS, Trace, backward, gradients_inside
from greedy_gnorm.rows import row_means
from greedy_gnorm.sites import AttentionSite, Sites


def gradient_norms(sites: Sites, batches: Batches, objective: ObjectiveFunction) -> dict[str, Matrix]:
    """Mean over sentences of the norm of each head's weight gradient, {"q", "k", "v"}: (sites, heads)."""
    with frozen(sites.model):
        means = row_means(sites, batches, lambda batch: sentence_norms(sites, batch, objective))
    return {name: sites.expand([mean[place] for mean in means]) for place, name in enumerate(PROJECTIONS)}


def sentence_norms(sites: Sites, batch: Batch, objective: ObjectiveFunction) -> list[Tensor]:
    """The norms for each sentence of one batch, a (3, B, survivors) float64 tensor per site."""
    norms = {
        trace.site.index: _site_norms(trace, gradients, sites.savings.gram)
        for trace, gradients in gradients_inside(sites, batch, objective, PROJECTIONS)
    }
    empty = torch.zeros(len(PROJECTIONS), len(batch), 0, dtype=torch.float64)
    return [norms.get(site.index, empty) for site in sites]


def _site_norms(trace: Trace, gradients: Sequence[Tensor], gram_allowed: bool) -> Tensor:
    """The norms at one site, (3, B, survivors), from the gradients of its q, k and v outputs."""
    # The weight gradient is a sum over applications, so they are stacked along time: (B, applications * T, d)
    inputs = _along_time(trace.inputs)
    exact = torch.promote_types(inputs.dtype, torch.float32)
    inputs = inputs.to(exact)
    width, length = trace.site.head_size * len(trace.site.survivors), inputs.shape[1]
    gram = inputs @ inputs.mT if gram_allowed and gram_is_cheaper(length, inputs.shape[2], width) else None
    times = len(gradients) // len(PROJECTIONS)
    norms = []
    for start in range(0, len(gradients), times):
        stacked = _along_time(gradients[start : start + times]).to(exact)
        norms.append(head_norms(inputs, stacked, gram, trace.site.head_size))
    return torch.stack(norms)


def _along_time(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def gram_is_cheaper(length: int, inputs: int, outputs: int) -> bool:
    """Whether X X^T once and its product with three g cost fewer multiplications than three X^T g."""
    return length * (inputs + 3 * outputs) < 3 * inputs * outputs


SAFE = 2.0**-40
"""Gradients between this and its inverse can be squared and summed in float32 as they are."""


def head_norms(inputs: Tensor, gradient: Tensor, gram: Tensor | None, head_size: int) -> Tensor:
    """Norms of the head blocks of X^T g for each sentence, (B, heads) in float64; by the Gram form if it is given."""
    rows, length, width = gradient.shape
    heads = gradient.view(rows, length, width // head_size, head_size)  # (B, T, H, d_h)
    # Squares of vanishing gradients leave float32's range: a power of two per head takes them out and back, exactly
    largest = torch.linalg.vector_norm(heads, ord=torch.inf, dim=(1, 3))  # (B, H)
    scale = torch.ones_like(largest)
    if ((largest < SAFE) & (largest > 0)).any() or (largest > 1 / SAFE).any():
        scale = torch.exp2(torch.frexp(largest).exponent.to(heads.dtype))
        gradient = (heads / scale[:, None, :, None]).flatten(2)  # (B, T, D)
    # (B, T, D) or (B, d, D)
    terms = (inputs.mT @ gradient).square() if gram is None else gradient * (gram @ gradient)
    squares: Tensor = terms.view(rows, -1, width // head_size, head_size).sum((1, 3), dtype=torch.float64)
    return squares.clamp_min(0).sqrt() * scale.double()


def gate_gradients(sites: Sites, batch: Batch, objective: ObjectiveFunction) -> list[Tensor]:
    """The derivative of each sentence's objective by a gate on each head's output, (B, survivors) float64 per site.

    It is the sum over tokens and channels of the head's output times its gradient; a shared site's applications add.
    """
    derivatives = [torch.zeros(len(batch), len(site.survivors), dtype=torch.float64) for site in sites]
    for trace, gradients in gradients_inside(sites, batch, objective, [CONTEXT]):
        for context, gradient in zip(trace.outputs[CONTEXT], gradients, strict=True):
            products = (context.detach().double() * gradient.double()).sum(1)  # (B, D)
            derivatives[trace.site.index] += products.view(len(batch), -1, trace.site.head_size).sum(-1).cpu()
    return derivatives


def map_gradients(
    sites: Sites, batch: Batch, objective: ObjectiveFunction, change: Callable[[AttentionSite, int, Tensor], Tensor]
) -> list[list[tuple[Tensor, Tensor]]]:
    """For each site and application the attention map, as `change` left it, and its gradient: (B, heads, T, T) both.

    `change` gets the site, the number of the application and the map.
    """
    maps: list[list[Tensor]] = [[] for _ in sites]

    def see(site: AttentionSite, weights: Tensor) -> Tensor:
        seen = maps[site.index]
        weights = change(site, len(seen), weights)
        seen.append(weights if weights.requires_grad else weights.requires_grad_())
        return seen[-1]

    with attention_maps(sites, see):
        gradients = iter(
            backward(sites.model, batch, objective, lambda: [weights for some in maps for weights in some])
        )
    return [[(weights.detach(), next(gradients)) for weights in some] for some in maps]


def mean_query_gradients(sites: Sites, batches: Batches, objective: ObjectiveFunction) -> list[Tensor]:
    """The gradient of the mean objective by each site's whole query weight, (D, d) per site, formed plainly."""
    weights = [site.query.weight for site in sites]
    totals = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    with frozen(sites.model):
        for weight in weights:
            weight.requires_grad_()
        for batch in batches:
            for total, gradient in zip(totals, backward(sites.model, batch, objective, lambda: weights), strict=True):
                total += gradient.double() / batches.rows
    return totals
