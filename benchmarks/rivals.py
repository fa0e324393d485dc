"""Slower ways to the same gradients, written plainly: what one exact scoring pass is measured against."""

from __future__ import annotations

from typing import Any

import torch

from greedy_gnorm.data.batches import Batches, padded
from greedy_gnorm.model.sites import Sites


def plain_forward(model: Any, batches: Batches) -> None:
    """The unit of all ratios: the model run once, without gradients."""
    with torch.no_grad():
        for batch in batches:
            model(**batch.inputs)


def backward_per_sentence(sites: Sites, batches: Batches) -> list[torch.Tensor]:
    """The obvious exact way: each sentence alone, without padding, a backward pass, the norms of the blocks."""
    model: Any = sites.model
    sums = [torch.zeros(3, len(site.survivors), dtype=torch.float64) for site in sites]
    for batch in batches:
        for ids, mask in zip(batch.inputs["input_ids"], batch.inputs["attention_mask"], strict=True):
            model.zero_grad()
            model(input_ids=ids[mask.bool()][None]).logits.norm().backward()
            for site, total in zip(sites, sums, strict=True):
                for place, linear in enumerate(site.inputs.values()):
                    gradient: Any = linear.weight.grad
                    total[place] += gradient.view(len(site.survivors), -1).norm(dim=1)
    model.zero_grad()
    return [total / batches.rows for total in sums]


def papers_procedure(sites: Sites, batches: Batches, layers: int) -> None:
    """The paper's section on time: in each greedy iteration a full backward pass for every batch in each layer.

    The first `layers` of them: each costs the same.
    """
    model: Any = sites.model
    for site in sites[:layers]:
        for batch in batches:
            model.zero_grad()
            model(**batch.inputs).logits.norm().backward()
            for linear in site.inputs.values():
                gradient: Any = linear.weight.grad
                gradient.view(len(site.survivors), -1).norm(dim=1)
    model.zero_grad()


def in_order(batches: Batches, rows_per_batch: int = 32) -> Batches:
    """The same sentences as the authors batch them: as they come, 32 at a time."""
    rows = {}
    for batch in batches:
        for row, ids, mask in zip(batch.rows, batch.inputs["input_ids"], batch.inputs["attention_mask"], strict=True):
            kept = ids[mask.bool()].tolist()
            rows[row] = {"input_ids": kept, "attention_mask": [1] * len(kept)}
    numbers = sorted(rows)
    groups = [numbers[start : start + rows_per_batch] for start in range(0, len(numbers), rows_per_batch)]
    items = [
        type(batches.items[0])(
            padded([rows[row] for row in group], {"input_ids": 0, "attention_mask": 0}), None, tuple(group)
        )
        for group in groups
    ]
    return Batches(tuple(items), "in order")


def per_sample_gradients(sites: Sites, batches: Batches, chunk: int = 8) -> list[torch.Tensor]:
    """torch.func: a gradient for every sentence of a chunk at once, of the q, k and v weights of all layers."""
    model: Any = sites.model
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = {names[id(linear.weight)]: linear.weight.detach() for site in sites for linear in site.inputs.values()}

    def norm(weights: dict[str, torch.Tensor], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        additive = torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask == 0, torch.finfo(torch.float32).min)
        inputs = {"input_ids": ids[None], "attention_mask": additive[None, None, None, :]}
        logits: torch.Tensor = torch.func.functional_call(model, weights, (), inputs).logits
        return logits.norm()

    each = torch.func.vmap(torch.func.grad(norm), in_dims=(None, 0, 0))
    sums = [torch.zeros(3, len(site.survivors), dtype=torch.float64) for site in sites]
    for batch in batches:
        for start in range(0, len(batch), chunk):
            some = slice(start, start + chunk)
            with torch.no_grad():  # no graph around the gradients that are asked for
                gradients = each(wanted, batch.inputs["input_ids"][some], batch.inputs["attention_mask"][some])
            for site, total in zip(sites, sums, strict=True):
                for place, linear in enumerate(site.inputs.values()):
                    gradient = gradients[names[id(linear.weight)]]
                    total[place] += gradient.view(len(gradient), len(site.survivors), -1).norm(dim=2).sum(0)
    model.set_attn_implementation(own)
    return [total / batches.rows for total in sums]
