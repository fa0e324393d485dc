"""Gradients for each row and unit, from one backward pass per batch: of Q, K and V weights, gates and attention maps.

A linear map with input X (T, d) and output gradient g (T, D) has the weight gradient X^T g. The squared norm of the
columns of unit h is `sum over t and over d in h of g * (X X^T g)`, the Gram form, which needs no weight gradient. If a
row is long compared with the width, it is cheaper to form X^T g row by row; both ways are exact.

In float32 the Gram form squares |X| before terms cancel: if all tokens are similar and their gradients sum to zero, as
those of keys always do, its error grows with |mean|^2 / |deviation|^2. X is therefore centred first, which changes
nothing in exact arithmetic: with the mean m as one more token, whose gradient is the sum s of all gradients,

    X^T g  =  [m; X - m]^T [s; g]

and the error grows only with |mean| / |deviation|, as it does when X^T g is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.model.gates import gates
from greedy_gnorm.model.modes import frozen
from greedy_gnorm.model.sites import Site, Sites, weight_of
from greedy_gnorm.passes.layers import CONTEXT, RESULT, Trace, backward, site_gradients
from greedy_gnorm.passes.maps import attention_maps
from greedy_gnorm.passes.means import row_means
from greedy_gnorm.passes.processes import gather_rows
from greedy_gnorm.phases import counted
from greedy_gnorm.tasks.objectives import Objective
from greedy_gnorm.units import ATTENTION, FFN, Matrix, Unit, Vector

PROJECTIONS = ("q", "k", "v")
"""The parts of a head whose gradients the paper uses."""
NORMS = {ATTENTION: PROJECTIONS, FFN: ("row", "column")}
"""The weights of a unit whose gradients are used; for a neuron, its row of the first map and column of the second.

The query of a unit is that of all its query heads, and the row of a gated neuron is that of all its input maps. A unit
with a query head of each group has no key and no value of its own.
"""


def norms_of(site: Site) -> list[str]:
    """The names of the norms that the units of a site have."""
    return [name for name in NORMS[site.kind] if site.kind == FFN or name in site.parts]


def gradient_norms(sites: Sites, batches: Batches, objective: Objective) -> dict[str, list[Vector]]:
    """The mean over rows of the norm of each unit's weight gradient: by name ("q", "k", "v"), a vector per site.

    Sites whose units have no such weights have NaN.
    """
    with frozen(sites.model):
        means = row_means(sites, batches, lambda batch: row_norms(sites, batch, objective))
    by_name = [dict(zip(norms_of(site), mean, strict=True)) for site, mean in zip(sites, means, strict=True)]
    return {
        name: sites.expand(
            [found.get(name, np.full(len(site.survivors), np.nan)) for site, found in zip(sites, by_name, strict=True)]
        )
        for name in dict.fromkeys(name for found in by_name for name in found)
    }


def row_norms(sites: Sites, batch: Batch, objective: Objective) -> list[Tensor]:
    """The norms for each row of a batch, by site: (norms, B, survivors) in float64, as `norms_of` names them."""
    norms = {
        trace.site.index: NORMS_AT[trace.site.kind](trace, gradients, _mask(trace, batch), sites.savings.gram)
        for trace, gradients in site_gradients(sites, batch, objective, _differentiated)
    }
    return [
        norms.get(site.index, torch.zeros(len(norms_of(site)), len(batch), 0, dtype=torch.float64)) for site in sites
    ]


def _mask(trace: Trace, batch: Batch) -> Tensor:
    """Which tokens are real; how many an image has is seen in the trace."""
    path = next(iter(trace.site.inputs))
    return batch.joined(batch.real_tokens(trace.inputs[path][0].shape[1]))


def _differentiated(site: Site) -> list[str]:
    """The outputs whose gradients the norms are made of."""
    if site.kind == FFN:
        return [*site.inputs, RESULT]
    return list(dict.fromkeys(site.parts[name] for name in norms_of(site)))  # one map may hold several parts


def _neuron_norms(trace: Trace, gradients: Sequence[Tensor], mask: Tensor, gram_allowed: bool) -> Tensor:
    """The norms at a feed-forward, (2, B, survivors).

    A neuron's column of the second map has the gradient a^T g, with a the neuron's output and g the gradient of the
    map's result: the same form as its row, X^T g, with the two factors exchanged.
    """

    def norms(inputs: Inputs, gradient: Tensor) -> Tensor:
        _, length, width = inputs.rows.shape
        gram = gram_allowed and gram_is_cheaper(length, width, gradient.shape[-1], 1)
        return unit_norms(inputs, gradient.to(inputs.rows.dtype), 1, gram=gram)

    site = trace.site
    by_path, results = _gradients_by_path(trace, gradients)
    shared = _SharedInputs(mask)
    rows = [
        norms(shared.of(trace.inputs[path]), site.part(name, concat_along_time(by_path[path])))
        for name, path in site.parts.items()
    ]
    row = rows[0] if len(rows) == 1 else torch.linalg.vector_norm(torch.stack(rows), dim=0)
    column = norms(Inputs(results, mask), concat_along_time(trace.outputs[CONTEXT]).detach())
    return torch.stack([row, column])


def _head_norms(trace: Trace, gradients: Sequence[Tensor], mask: Tensor, gram_allowed: bool) -> Tensor:
    """The norms at one site of heads, (norms, B, survivors), from the gradients of the outputs of its input maps."""
    site = trace.site
    by_path, _ = _gradients_by_path(trace, gradients)
    inputs_of = trace.inputs | _compared_positions(trace, by_path)
    shared = _SharedInputs(mask)
    norms = []
    for name in norms_of(site):
        path, size = site.parts[name], site.sizes[name]
        inputs = shared.of(inputs_of[path])
        gradient = site.part(name, concat_along_time(by_path[path]).to(inputs.rows.dtype))
        width = size * len(site.survivors)
        gram = gram_allowed and gram_is_cheaper(inputs.rows.shape[1], inputs.rows.shape[2], width)
        norms.append(unit_norms(inputs, gradient, size, gram=gram))
    return torch.stack(norms)


def _gradients_by_path(trace: Trace, gradients: Sequence[Tensor]) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """The gradients of the outputs of each input map, and those that follow them."""
    remaining = iter(gradients)
    by_path = {
        path: [next(remaining) for _ in trace.outputs[path]] for path in _differentiated(trace.site) if path != RESULT
    }
    return by_path, list(remaining)


def _compared_positions(trace: Trace, by_path: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """The inputs of maps that read relative positions, without those that no token is compared with.

    They have no gradient, and are also taken out of `by_path`; in short rows they are most positions.
    """
    paths = trace.site.positions.shared
    if not paths:
        return {}
    compared = torch.stack([by_path[path][-1].abs().amax((0, 2)) for path in paths]).any(0).nonzero()[:, 0]
    positions = trace.inputs[paths[0]][-1].index_select(1, compared)
    for path in paths:
        by_path[path][-1] = by_path[path][-1].index_select(1, compared)
    return {path: [*trace.inputs[path][:-1], positions] for path in paths}


NORMS_AT = {ATTENTION: _head_norms, FFN: _neuron_norms}
"""How the norms at a site are computed, by its kind."""


def concat_along_time(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate applications along time, (B, applications * T, d): the weight gradient is a sum over them."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


class Inputs:
    """The inputs of a linear map in one pass, (B, T, d), and their centred Gram form, computed when needed.

    `mask` is 1 for a token and 0 for padding, (B, T). Each application is centred separately; one to anything but these
    tokens, such as relative positions, has no padding.
    """

    def __init__(self, applications: Sequence[Tensor], mask: Tensor) -> None:
        exact = torch.promote_types(applications[0].dtype, torch.float32)
        self.rows = concat_along_time(applications).to(exact)
        self._lengths = [each.shape[1] for each in applications]
        self._mask = mask
        self._gram: CentredGram | None = None

    def gram(self) -> CentredGram:
        """Computed once, for all maps that share these inputs."""
        if self._gram is None:
            rows, tokens = self._mask.shape
            masks = [self._mask if length == tokens else self._mask.new_ones(rows, length) for length in self._lengths]
            self._gram = CentredGram(self.rows, [mask.to(self.rows.dtype) for mask in masks])
        return self._gram


class _SharedInputs:
    """The inputs of several linear maps: those with the same inputs share their Gram matrix."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask
        self._known: dict[tuple[int, ...], Inputs] = {}

    def of(self, applications: Sequence[Tensor]) -> Inputs:
        places = tuple(each.data_ptr() for each in applications)
        return self._known.setdefault(places, Inputs(applications, self._mask))


class CentredGram:
    """|X^T g|^2 = |[m; X - m]^T [s; g]|^2 with m the mean of X over tokens and s the sum of g: see above.

    For A applications there are A means and A sums.
    """

    def __init__(self, inputs: Tensor, masks: Sequence[Tensor]) -> None:
        belongs = torch.eye(len(masks), dtype=inputs.dtype, device=inputs.device)  # (A, A)
        lengths = torch.tensor([mask.shape[1] for mask in masks], device=inputs.device)
        ones = belongs.repeat_interleave(lengths, dim=1).expand(len(inputs), -1, -1)  # (B, A, T): whose a token is
        weights = ones * concat_along_time([mask / mask.sum(1, keepdim=True) for mask in masks])[:, None]
        means = weights @ inputs  # (B, A, d)
        centred = inputs - (means if len(masks) == 1 else ones.mT @ means)
        self.deviations = list(_upper_blocks(centred))
        self.means = means @ means.mT  # (B, A, A)
        self.sums = torch.cat([ones, means @ centred.mT], dim=1)  # (B, 2A, T)

    def squares(self, gradient: Tensor) -> list[Tensor]:
        """Terms whose sum over all but the last dimension is the squared norm of each column of X^T g."""
        sums, mixed = (self.sums @ gradient).chunk(2, dim=1)  # (B, A, D): s, and m (X - m)^T g
        terms = [sums * (self.means @ sums + 2 * mixed)]
        for block in self.deviations:
            rest = gradient[:, -block.shape[2] :]
            terms.append(rest[:, :BLOCK] * (block @ rest))
        return terms


BLOCK = 64
"""Rows of X X^T that are computed at once."""


def _upper_blocks(rows: Tensor) -> Iterator[Tensor]:
    """X X^T without what is left of its diagonal blocks, and twice what is right of them: (B, BLOCK, T - start) each.

    X X^T is symmetric, so this gives the same g^T X X^T g with hardly more than half of the multiplications.
    """
    for start in range(0, rows.shape[1], BLOCK):
        block = rows[:, start : start + BLOCK] @ rows[:, start:].mT
        block[:, :, BLOCK:] *= 2
        yield block


def gram_is_cheaper(length: int, inputs: int, outputs: int, gradients: int = 3) -> bool:
    """Whether one X X^T and its products with some gradients take fewer multiplications than forming every X^T g."""
    pairs = sum(min(BLOCK, length - start) * (length - start) for start in range(0, length, BLOCK))
    return pairs * (inputs + gradients * outputs) < gradients * length * inputs * outputs


SAFE = 2.0**-40
"""Gradients between this and its inverse can be squared and summed in float32 without scaling."""


def unit_norms(inputs: Inputs, gradient: Tensor, size: int, *, gram: bool) -> Tensor:
    """The norms of the units' blocks of X^T g for each row, (B, units) in float64, with or without the Gram form."""
    rows, length, width = gradient.shape
    units = gradient.view(rows, length, width // size, size)  # (B, T, H, d_h)
    # Squares of tiny gradients underflow in float32: scaling each unit by a power of two is exact and avoids it
    largest = units.abs().amax((1, 3))  # (B, H)
    safe = ((largest >= SAFE) & (largest <= 1 / SAFE)) | (largest == 0)
    scale = torch.exp2(torch.frexp(largest).exponent.to(units.dtype)).where(~safe, torch.ones_like(largest))
    gradient = (units / scale[:, None, :, None]).flatten(2)  # (B, T, D); no question to a GPU whether it is needed
    terms = inputs.gram().squares(gradient) if gram else ((inputs.rows.mT @ gradient).square(),)  # (B, any, D) each
    squares = sum((_by_unit(term, size) for term in terms), torch.zeros_like(largest, dtype=torch.float64))
    return squares.clamp_min(0).sqrt() * scale.double()


def _by_unit(terms: Tensor, size: int) -> Tensor:
    """(B, any, units * size) summed to (B, units) in float64."""
    return terms.view(len(terms), terms.shape[1], -1, size).sum((1, 3), dtype=torch.float64)


def gate_gradients(sites: Sites, batch: Batch, objective: Objective) -> list[Tensor]:
    """The derivative of each row's objective with respect to a gate on each unit, (B, survivors) float64 per site.

    It is the sum over tokens, channels and applications of the unit's output times its gradient.
    """
    found: dict[int, Tensor] = {}
    for site, products in _gate_products(sites, batch, objective):
        _add(found, site, site.by_unit(products.sum(1)).sum(-1))
    return _of_all_sites(found, sites, batch)


def gate_table(sites: Sites, batches: Batches, objective: Objective) -> list[Matrix]:
    """The derivatives of every row by a gate on each unit, (rows, survivors) per site, rows in the order of the data.

    The rows are those of all processes.
    """
    tables: list[Tensor] = []
    with frozen(sites.model):
        for batch in counted(batches.items, "Scoring", "batch"):
            tables.append(torch.cat([each.cpu() for each in gate_gradients(sites, batch, objective)], dim=1))
    table = gather_rows(tables, [batch.rows for batch in batches]).numpy()
    ends = np.cumsum([len(site.survivors) for site in sites])[:-1]
    return np.split(table, ends, axis=1)


def gate_squares(sites: Sites, batch: Batch, objective: Objective, *, each_token: bool) -> list[Tensor]:
    """The squared derivatives of a gate on each unit, (B, survivors) per site, summed over gates.

    There is one at each application of a site, or at each of its tokens.
    """
    found: dict[int, Tensor] = {}
    for site, products in _gate_products(sites, batch, objective):
        effects = products if each_token else products.sum(1, keepdim=True)
        by_gate = site.by_unit(effects.flatten(0, 1)).sum(-1).view(len(batch), -1, len(site.survivors))
        # As a norm, whose squares neither underflow nor overflow in float64
        _add(found, site, torch.linalg.vector_norm(by_gate, dim=1).square())
    return _of_all_sites(found, sites, batch)


def _add(found: dict[int, Tensor], site: Site, values: Tensor) -> None:
    """Add the values of one more application of a site."""
    found[site.index] = found[site.index] + values if site.index in found else values


def _of_all_sites(found: dict[int, Tensor], sites: Sites, batch: Batch) -> list[Tensor]:
    """The values of each site, (B, survivors); a site without units has none."""
    return [found.get(site.index, torch.zeros(len(batch), len(site.survivors), dtype=torch.float64)) for site in sites]


def _gate_products(sites: Sites, batch: Batch, objective: Objective) -> Iterator[tuple[Site, Tensor]]:
    """The outputs of a site's units times their gradients, (B, T, D) float64, at each application."""
    for trace, gradients in site_gradients(sites, batch, objective, lambda site: [CONTEXT]):
        for context, gradient in zip(trace.outputs[CONTEXT], gradients, strict=True):
            yield trace.site, context.detach().double() * gradient.double()


def map_gradients(
    sites: Sites, batch: Batch, objective: Objective, change: Callable[[Site, int, Tensor], Tensor]
) -> list[list[tuple[Tensor, Tensor]]]:
    """The attention map returned by `change` and its gradient, both (B, heads, T, T), by site and application.

    `change` is called with the site, the number of the application and the map.
    """
    maps: list[list[Tensor]] = [[] for _ in sites]

    def record(site: Site, weights: Tensor) -> Tensor:
        own = maps[site.index]
        weights = change(site, len(own), weights)
        own.append(weights if weights.requires_grad else weights.requires_grad_())
        return own[-1]

    with attention_maps(sites, record):
        gradients = iter(backward(sites.model, batch, objective, lambda: [weights for own in maps for weights in own]))
    return [[(weights.detach(), next(gradients)) for weights in own] for own in maps]


def gradient_change(sites: Sites, batches: Batches, objective: Objective, head: Unit) -> list[Matrix]:
    """The change of every site's query gradient when this head is removed, averaged over blocks of the head size.

    A block is as high as all queries of a unit, and about as wide as a head.
    """
    gate = torch.tensor([0.0 if index == head.index else 1.0 for index in sites[head.site].survivors])
    before = _mean_query_gradients(sites, batches, objective)
    with gates(sites, {head.site: gate}):
        after = _mean_query_gradients(sites, batches, objective)
    return [_block_means(site, new - old) for site, new, old in zip(sites, after, before, strict=True)]


def _mean_query_gradients(sites: Sites, batches: Batches, objective: Objective) -> list[Tensor]:
    """The gradient of the mean objective with respect to the weights of each site's queries, (D, d) per site."""
    weights = [weight_of(site.inputs[site.parts["q"]]) for site in sites]
    totals = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    with frozen(sites.model):
        for weight in weights:
            weight.requires_grad_()
        for batch in batches:
            for total, gradient in zip(totals, backward(sites.model, batch, objective, lambda: weights), strict=True):
                total += gradient.double() / batches.rows
    stored = [isinstance(site.inputs[site.parts["q"]], Conv1D) for site in sites]  # as (inputs, outputs)
    by_output = [total if transposed else total.mT for total, transposed in zip(totals, stored, strict=True)]
    return [site.part("q", total).mT for site, total in zip(sites, by_output, strict=True)]


def _block_means(site: Site, matrix: Tensor) -> Matrix:
    width = matrix.shape[1]
    by_unit = matrix.reshape(len(site.survivors), site.sizes["q"], width).mean(1)
    blocks = by_unit.tensor_split(max(width // min(site.layout["sizes"].values()), 1), dim=1)
    pooled: Matrix = torch.stack([block.mean(1) for block in blocks], dim=1).cpu().numpy()
    return pooled
