"""What the output map of each site receives, as a matrix of products over the tokens of all rows.

No activations are kept: products are added batch by batch. Those of wide layers are large, so that several passes over
the rows are made where those of all sites would take too much memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.errors import NonFiniteScore
from greedy_gnorm.model.modes import evaluating, frozen
from greedy_gnorm.model.sites import Site, Sites, features, weight_of
from greedy_gnorm.passes.contexts import contexts
from greedy_gnorm.passes.equations import NormalEquations
from greedy_gnorm.passes.layers import CONTEXT, RESULT, site_gradients
from greedy_gnorm.passes.processes import gather, gather_tensors
from greedy_gnorm.phases import counted
from greedy_gnorm.tasks.objectives import Objective
from greedy_gnorm.tasks.task import task_of

MEMORY = 2**30
"""The bytes that the products of several sites may take at once."""


class System(NamedTuple):
    """The mean products of the inputs of a site's output map, (D, D), and its weights, (D, d), in float64.

    Inputs are in the order of the units that are left, `size` for each. They are centred where the map has a bias.
    """

    gram: Tensor
    weight: Tensor
    size: int


def output_systems(sites: Sites, batches: Batches) -> Iterator[tuple[Site, System]]:
    """The system of every site that has units, over all real tokens."""
    for group in _groups(sites):
        equations = _empty(group)
        with evaluating(sites.model), torch.no_grad():
            for batch in counted(batches.items, "Scoring", "batch"):
                _add_batch(equations, sites, batch)
        for site in group:
            found = equations.pop(site.index).gathered()
            yield site, _system(site, found, found.count, None)


def _add_batch(equations: Mapping[int, NormalEquations], sites: Sites, batch: Batch) -> None:
    """Add the real tokens of a batch, all alike, to the equations of some sites."""

    def add(site: Site, context: Tensor) -> None:
        if site.index in equations:
            real = batch.real_tokens(context.shape[1]).bool()
            _add(equations[site.index], context[real], torch.ones_like(real[real], dtype=torch.float64))

    with contexts(sites, add):
        task_of(sites.model).outputs(sites.model, batch)


def weighted_systems(sites: Sites, batches: Batches, objective: Objective) -> Iterator[tuple[Site, System]]:
    """The system of every site that has units, weighted by the squared gradients g of the objective at its result.

    A token has the weight sum_j g_tj^2, and an output the share sum_t g_tj^2 / sum_tj g_tj^2, by whose root its weights
    are multiplied. Products are sums over tokens and means over rows.
    """
    for group in _groups(sites):
        equations = _empty(group)
        outputs = {site.index: torch.zeros(features(site.output)[1], dtype=torch.float64) for site in group}

        with frozen(sites.model):
            for batch in counted(batches.items, "Scoring", "batch"):
                for trace, gradients in site_gradients(sites, batch, objective, lambda site: [RESULT]):
                    if trace.site.index not in equations:
                        continue
                    for context, gradient in zip(trace.outputs[CONTEXT], gradients, strict=True):
                        squares = gradient.flatten(0, 1).double().square()  # (N, d); a padded token has no gradient
                        outputs[trace.site.index] += squares.sum(0).cpu()
                        _add(equations[trace.site.index], context.detach().flatten(0, 1), squares.sum(1))
        rows = sum(gather(batches.rows))
        for site in group:
            found = equations.pop(site.index).gathered()
            by_output = sum(gather_tensors(outputs[site.index]), torch.zeros((), dtype=torch.float64))
            yield site, _system(site, found, rows, by_output)


def _groups(sites: Sites) -> Iterator[list[Site]]:
    """The sites that have units, as many at once as fit into the memory."""
    group: list[Site] = []
    used = 0
    for site in (site for site in sites if site.survivors):
        size = 8 * (len(site.survivors) * site.output_size) ** 2
        if group and used + size > MEMORY:
            yield group
            group, used = [], 0
        group.append(site)
        used += size
    if group:
        yield group


def _empty(group: Sequence[Site]) -> dict[int, NormalEquations]:
    """Equations without targets for each site."""
    return {
        site.index: NormalEquations(len(site.survivors) * site.output_size, 0, weight_of(site.output).device)
        for site in group
    }


def _add(equations: NormalEquations, inputs: Tensor, weights: Tensor) -> None:
    exact = inputs.to(equations.device, torch.promote_types(inputs.dtype, torch.float32))
    equations.add(exact, exact.new_zeros(len(exact), 0), weights.to(exact.device))


def _system(site: Site, equations: NormalEquations, count: float, by_output: Tensor | None) -> System:
    gram = equations.squares
    if site.output.bias is None:
        gram = gram + equations.count * torch.outer(equations.mean_input, equations.mean_input)
    if not torch.isfinite(gram).all():
        raise NonFiniteScore(f"The activations in {site} are NaN or infinite on scoring rows: check the weights.")
    weight = weight_of(site.output).detach()
    weight = (weight if isinstance(site.output, Conv1D) else weight.mT).to(gram)
    if by_output is not None:
        shares = by_output / by_output.sum().clamp_min(torch.finfo(torch.float64).tiny)
        weight = weight * shares.to(gram).sqrt()
    order = site.by_unit(torch.arange(len(gram), device=gram.device)).flatten()
    return System(gram[order][:, order] / count, weight[order], site.output_size)
