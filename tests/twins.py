"""Slow, obvious versions of what the package computes fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from greedy_gnorm.sites import find_sites


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


def slow_gradient_norms(
    model: Any, batches: list[dict[str, torch.Tensor]], objective: str = "logit-norm"
) -> np.ndarray:
    """(3, sites, heads): the mean over sentences of the norm of each head's weight gradient, a backward a sentence."""
    model = model.eval()
    sites = find_sites(model)
    sums = np.zeros((3, *sites.shape))
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
                for place, linear in enumerate((site.query, site.key, site.value)):
                    for position, head in enumerate(site.survivors):
                        block = linear.weight.grad[position * site.head_size : (position + 1) * site.head_size]
                        sums[place, site.index, head] += float(block.double().norm())
            count += 1
    model.zero_grad()
    means = sums / count
    for head in sites.removed():
        means[:, head.site, head.index] = np.nan
    return means
