"""Slow, obvious versions of what the package computes fast."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.model.gates import gates
from greedy_gnorm.model.modes import evaluating
from greedy_gnorm.model.sites import Site, Sites, find_sites
from greedy_gnorm.passes.layers import outputs
from greedy_gnorm.units import as_matrix


def shape(sites: Sites) -> tuple[int, int]:
    """Sites x units, where all sites have the same number of them."""
    (units,) = {site.total for site in sites}
    return len(sites), units


def predictions(sites: Sites, batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (float64) and labels of all rows in the order of the data."""
    with evaluating(sites.model), torch.no_grad():
        found = torch.cat([outputs(sites, batch).double() for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    order = torch.tensor([row for batch in batches for row in batch.rows]).argsort()
    return found[order], labels[order]


def unpadded(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each row alone, without its padding."""
    rows = []
    for place, mask in enumerate(batch["attention_mask"]):
        length = int(mask.sum())
        rows.append(
            {
                name: t[place : place + 1] if name == "labels" else t[place : place + 1, :length]
                for name, t in batch.items()
            }
        )
    return rows


def rows_of(site: Site, name: str, gradient: bool = False) -> list[torch.Tensor]:
    """For each unit that is left, the rows of a part in the weight of its map (or in the weight's gradient)."""
    linear_map = next(each for each in site.layout["inputs"] if name in each["parts"])
    linear = site.inputs[linear_map["path"]]
    weight = linear.weight.grad if gradient else linear.weight.detach()
    weight = weight.mT if isinstance(linear, Conv1D) else weight
    parts, sizes = linear_map["parts"], site.layout["sizes"]
    count, size = len(site.survivors), sizes[name]
    rows: list[list[int]] = [[] for _ in range(count)]
    for place in (place for place, part in enumerate(parts) if part == name):  # several if heads of a unit lie apart
        start = count * sum(sizes[part] for part in parts[:place])  # fused: all units of these parts come first
        for unit in range(count):
            rows[unit] += range(start + unit * size, start + (unit + 1) * size)
    return [weight[own] for own in rows]


def heads_of(site: Site, values: torch.Tensor) -> list[torch.Tensor]:
    """For each unit that is left, the values of its query heads, or of its inputs of the output map."""
    count, groups = len(site.survivors), len(site.layout["output"]["parts"])
    by_group = values.reshape(groups, count, -1, *values.shape[1:]) if count else None
    return [torch.cat([by_group[group, unit] for group in range(groups)]) for unit in range(count)]


def columns_of(site: Site, gradient: bool = False) -> list[torch.Tensor]:
    """For each unit that is left, its columns in the weight of the output map (or in the weight's gradient)."""
    weight = site.output.weight.grad if gradient else site.output.weight.detach()
    weight = weight.mT if isinstance(site.output, Conv1D) else weight
    return [columns.mT for columns in heads_of(site, weight.mT)]


def slow_gradient_norms(
    model: Any, batches: list[dict[str, torch.Tensor]], objective: str = "logit-norm"
) -> np.ndarray:
    """(parts, sites, heads): the mean over sentences of the norm of a weight gradient, with a backward a sentence."""
    model = model.eval()
    sites = find_sites(model, "heads")
    names = [name for name in ("q", "k", "v") if name in sites[0].parts]  # units of several groups have only queries
    sums = np.zeros((len(names), *shape(sites)))
    count = 0
    for batch in batches:
        for row in unpadded(batch):
            model.zero_grad()
            labels = row.pop("labels")
            logits = model(**row).logits
            if objective == "loss":
                value = torch.nn.functional.cross_entropy(logits, labels)
            else:
                value = logits.square().sum().sqrt()
            value.backward()
            for site in sites:
                for place, name in enumerate(names):
                    blocks = rows_of(site, name, gradient=True) if site.survivors else []
                    for head, block in zip(site.survivors, blocks, strict=True):
                        sums[place, site.index, head] += float(block.double().norm())
            count += 1
    model.zero_grad()
    means = sums / count
    for head in sites.removed():
        means[:, head.site, head.index] = np.nan
    return means


def applications(model: Any) -> list[int]:
    """The site that each attention map of `output_attentions` belongs to, in the order they run."""
    config = model.config
    if config.model_type != "albert":
        return list(range(config.num_hidden_layers))
    per_group = config.num_hidden_layers / config.num_hidden_groups
    inner = config.inner_group_num
    return [int(layer / per_group) * inner + part for layer in range(config.num_hidden_layers) for part in range(inner)]


def maps_of(model: Any, row: dict[str, torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """(site, attention map) of every application for one unpadded sentence, from transformers' own eager pass."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        inputs = {name: tensor for name, tensor in row.items() if name != "labels"}
        seen = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation(own)
    return list(zip(applications(model), (weights[0] for weights in seen), strict=True))


def slow_entropy(
    model: Any, batches: list[dict[str, torch.Tensor]], variant: str = "C", eps: float = 1e-7
) -> np.ndarray:
    """(sites, heads): the mean over sentences and query rows of the entropy, element by element."""
    formulas = {
        "A": lambda a: -a * np.log(a) if a > 0 else 0.0,
        "B": lambda a: -a * np.log(a + eps),
        "C": lambda a: -(a + eps) * np.log(a + eps),
    }
    sites = find_sites(model, "heads")
    rows = [row for batch in batches for row in unpadded(batch)]
    totals = np.zeros(shape(sites))
    for row in rows:
        for site, weights in maps_of(model, row):
            for head, own in zip(sites[site].survivors, heads_of(sites[site], weights), strict=True):
                lines = own.double().flatten(0, 1).tolist()
                totals[site, head] += sum(formulas[variant](a) for line in lines for a in line) / len(lines) / len(rows)
    for head in sites.removed():
        totals[head] = np.nan
    return totals


def slow_gate_gradients(model: Any, batches: list[dict[str, torch.Tensor]]) -> list[np.ndarray]:
    """For each sentence (sites, heads): the derivative of its loss by real gates on the head outputs."""
    sites = find_sites(model, "heads")
    results = []
    for batch in batches:
        for row in unpadded(batch):
            labels = row.pop("labels")
            values = {
                site.index: torch.ones(len(site.survivors), dtype=model.dtype, requires_grad=True)
                for site in sites
                if site.survivors
            }
            with gates(sites, values):
                loss = torch.nn.functional.cross_entropy(model(**row).logits, labels)
            derivatives = dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))
            found = sites.expand([derivatives[site.index].tolist() if site.survivors else [] for site in sites])
            results.append(as_matrix(found))
    return results


def slow_distillation_loss(
    model: Any, original: Any, sequences: list[list[dict[str, torch.Tensor]]], outputs: Any, temperature: float
) -> torch.Tensor:
    """The loss of a batch whose rows are lists of sequences, each alone and without padding.

    A temperature of 0 stands for outputs that are no logits.

    `outputs(found)` makes the outputs of a row, a list of vectors, from what the model returns for its sequences.
    """
    errors, values, before = [], [], []
    for row in sequences:
        (ours, states), (theirs, unpruned) = (_found(each, row) for each in (model, original))
        errors.append(torch.cat([each - other for each, other in zip(states, unpruned, strict=True)], dim=1))
        before.append(torch.cat(unpruned, dim=1))
        values.append(list(zip(outputs(ours), outputs(theirs), strict=True)))
    whole = torch.cat(before, dim=1)  # (layers, N, d)
    spread = (whole - whole.mean(1, keepdim=True)).square().sum(-1).mean(1)
    hidden = (torch.cat(errors, dim=1).square().sum(-1).mean(1) / spread).mean()
    if temperature:
        rows = [sum(_kl(*(each / temperature for each in pair)) for pair in row) / len(row) for row in values]
        return temperature**2 * sum(rows) / len(rows) + hidden
    ours, theirs = (torch.stack([torch.stack(row) for row in side]) for side in _sides(values))  # (rows, 1, d)
    return (ours - theirs).square().sum() / (theirs - theirs.mean(0)).square().sum() + hidden


def _found(model: Any, row: list[dict[str, torch.Tensor]]) -> tuple[list[Any], list[torch.Tensor]]:
    """What the model returns for each sequence, and the states after each layer, (layers, T, d)."""
    states: list[list[torch.Tensor]] = []

    def note(module: Any, given: Any, result: Any) -> None:
        states[-1].append(result[0] if isinstance(result, tuple) else result)

    hooks = [layer.module.register_forward_hook(note) for layer in find_sites(model).layers]
    found = []
    for sequence in row:
        states.append([])
        found.append(model(**sequence))
    for hook in hooks:
        hook.remove()
    return found, [torch.cat(each) for each in states]


def _kl(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    p, q = theirs.exp() / theirs.exp().sum(), ours.exp() / ours.exp().sum()
    return (p * (p / q).log()).sum()


def _sides(values: Any) -> Any:
    return ([[pair[side] for pair in row] for row in values] for side in (0, 1))


def slow_contexts(model: Any, row: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """For each site the inputs of its output map, (T, units * size), at each application, for one unpadded sentence."""
    sites = find_sites(model)
    seen: list[list[torch.Tensor]] = [[] for _ in sites]
    handles = [
        site.output.register_forward_pre_hook(lambda module, given, calls=calls: calls.append(given[0][0]))
        for site, calls in zip(sites, seen, strict=True)
    ]
    with torch.no_grad():
        model(**{name: tensor for name, tensor in row.items() if name != "labels"})
    for handle in handles:
        handle.remove()
    return seen


def slow_output_norms(model: Any, batches: list[dict[str, torch.Tensor]]) -> list[list[float]]:
    """For each site and unit that is left: the mean over sentences and tokens of the norm of what it adds."""
    sites = find_sites(model)
    totals = [[0.0] * len(site.survivors) for site in sites]
    rows = [row for batch in batches for row in unpadded(batch)]
    for row in rows:
        for site, calls in zip(sites, slow_contexts(model, row), strict=True):
            for context in calls:
                units = zip(heads_of(site, context.mT), columns_of(site), strict=True)
                for place, (own, columns) in enumerate(units):
                    added = own.mT @ columns.mT  # (T, d)
                    totals[site.index][place] += float(added.norm(dim=1).mean()) / len(rows)
    return totals


def slow_reconstruction(
    model: Any, batches: list[dict[str, torch.Tensor]], ridge: float, weighted: bool = False
) -> list[tuple[list[float], list[float]]]:
    """For each site, by unit that is left: the error added in the best order of removal, and that of removing it alone.

    Errors are those of lstsq, for every unit at every step, on the stacked inputs of the output map of each sentence
    alone. `weighted`: tokens and directions by the squared gradients of the loss.
    """
    sites = find_sites(model)
    inputs: list[list[torch.Tensor]] = [[] for _ in sites]
    gradients: list[list[torch.Tensor]] = [[] for _ in sites]
    rows = [row for batch in batches for row in unpadded(batch)]
    for row in rows:
        labels = row["labels"]
        results: list[list[torch.Tensor]] = [[] for _ in sites]
        handles = [
            site.output.register_forward_hook(lambda module, given, result, found=found: found.append(result))
            for site, found in zip(sites, results, strict=True)
        ]
        logits = model(**{name: tensor for name, tensor in row.items() if name != "labels"}).logits
        for handle in handles:
            handle.remove()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        for site, calls in zip(sites, slow_contexts(model, row), strict=True):
            inputs[site.index] += calls
            found = torch.autograd.grad(loss, results[site.index], retain_graph=True)
            gradients[site.index] += [gradient[0] for gradient in found]
    scores = []
    for site in sites:
        x, squares = torch.cat(inputs[site.index]), torch.cat(gradients[site.index]).square()
        weight = site.output.weight.detach()
        weight = weight if isinstance(site.output, Conv1D) else weight.mT
        shares = torch.full((len(x),), 1 / len(x), dtype=x.dtype)
        if weighted:
            shares, weight = squares.sum(1) / len(rows), weight * (squares.sum(0) / squares.sum()).sqrt()
        mean = shares @ x / shares.sum() if site.output.bias is not None else torch.zeros_like(x[0])
        a = (x - mean) * shares.sqrt()[:, None]
        if site.survivors:
            a = torch.cat([a, (ridge * a.square().sum(0).mean()).sqrt() * torch.eye(a.shape[1], dtype=a.dtype)])
        channels = [each.tolist() for each in heads_of(site, torch.arange(a.shape[1]))]
        scores.append(_slow_elimination(a, weight, channels))
    return scores


def _slow_elimination(a: torch.Tensor, weight: torch.Tensor, channels: list[list[int]]) -> tuple[list[float], ...]:
    def error(gone: list[int]) -> float:
        without = {channel for unit in gone for channel in channels[unit]}
        kept = [channel for channel in range(a.shape[1]) if channel not in without]
        fitted = torch.linalg.lstsq(a[:, kept], a @ weight).solution if kept else weight[:0]
        return float((a @ weight - a[:, kept] @ fitted).square().sum())

    units = range(len(channels))
    added, gone, highest, before = [0.0] * len(units), list[int](), 0.0, 0.0
    while len(gone) < len(units):
        after, unit = min((error([*gone, unit]), unit) for unit in units if unit not in gone)
        highest = max(highest, after - before)
        added[unit], before = highest, after
        gone.append(unit)
    return added, [error([unit]) for unit in units]


def slow_effects(model: Any, batches: list[dict[str, torch.Tensor]]) -> list[np.ndarray]:
    """For each site (sentences, units left): the derivative of the loss by real gates on heads and neurons."""
    sites = find_sites(model)
    effects: list[list[np.ndarray]] = [[] for _ in sites]
    for row in (row for batch in batches for row in unpadded(batch)):
        labels = row.pop("labels")
        values = {
            site.index: torch.ones(len(site.survivors), dtype=model.dtype, requires_grad=True)
            for site in sites
            if site.survivors
        }
        with gates(sites, values):
            loss = torch.nn.functional.cross_entropy(model(**row).logits, labels)
        found = dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))
        for site in sites:
            effects[site.index].append(found[site.index].numpy() if site.survivors else np.zeros(0))
    return [np.stack(rows) for rows in effects]


def slow_squares(model: Any, batches: list[dict[str, torch.Tensor]]) -> list[np.ndarray]:
    """For each site (units left): the mean over sentences of the squared derivatives of gates, one per application."""
    sites, totals, count = find_sites(model), dict[int, Any](), 0
    for row in (row for batch in batches for row in unpadded(batch)):
        labels, opened = row.pop("labels"), list[tuple[int, torch.Tensor]]()
        with ExitStack() as stack:
            for site in sites:

                def multiply(module: Any, arguments: Any, site: Any = site, opened: Any = opened) -> Any:
                    gate = torch.ones(len(site.survivors), dtype=model.dtype, requires_grad=True)
                    opened.append((site.index, gate))
                    return (arguments[0] * site.by_channel(gate),)

                if site.survivors:
                    stack.callback(site.output.register_forward_pre_hook(multiply).remove)
            loss = torch.nn.functional.cross_entropy(model(**row).logits, labels)
        for (index, _), gradient in zip(opened, torch.autograd.grad(loss, [gate for _, gate in opened]), strict=True):
            totals[index] = totals.get(index, 0) + gradient.numpy() ** 2
        count += 1
    return [totals[site.index] / count if site.survivors else np.zeros(0) for site in sites]
