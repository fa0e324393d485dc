"""Normal equations of least squares: sums over the tokens of all batches and processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from greedy_gnorm.passes.processes import gather_tensors, world_size

BLOCK = 256
"""Columns of X'X that are computed at once."""


class _Rows(NamedTuple):
    """Rows that were added: their weight, their means, and the means that are left in what was multiplied.

    The mean that is subtracted from rows is in their precision, so a little of it is left.
    """

    weight: float
    means: Tensor  # of inputs and targets, (D + d,)
    left: Tensor


class NormalEquations:
    """The count, the means and the centred products of inputs, (N, D), and targets, (N, d), added batch by batch.

    Products are sums in float64 of rows less the means of their batch, which keeps digits. When they are read, the
    batches become one, centred by the means of all rows; until then, of X'X only the blocks above the diagonal are
    known.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | None = None) -> None:
        self._inputs = inputs
        self._products = torch.zeros(inputs, inputs + outputs, dtype=torch.float64, device=device)
        nothing = self._products.new_zeros(inputs + outputs)
        self._batches = [_Rows(0.0, nothing, nothing)]

    @property
    def count(self) -> float:
        """The sum of the weights."""
        return sum(rows.weight for rows in self._batches)

    def add(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> None:
        """Add rows with weights, (N,); they are multiplied in float32 at least."""
        total = float(weights.sum(dtype=torch.float64))
        if not total:
            return
        exact = torch.promote_types(torch.promote_types(inputs.dtype, targets.dtype), torch.float32)
        rows = torch.cat([inputs.to(exact), targets.to(exact)], dim=1)
        mean = (weights.double() / total).to(exact) @ rows
        root = weights.sqrt().to(exact)
        rows.sub_(mean).mul_(root[:, None])
        left = (root @ rows).double() / total
        self._batches.append(_Rows(total, mean.double() + left, left))
        for start in range(0, self._inputs, BLOCK):
            end = min(start + BLOCK, self._inputs)
            self._products[start:end, start:] += rows[:, start:end].mT @ rows[:, start:]

    def _centre(self) -> _Rows:
        """Make one batch of all, with products that are centred by its means."""
        if len(self._batches) > 1:
            counts = self._products.new_tensor([rows.weight for rows in self._batches])[:, None]
            means = torch.stack([rows.means for rows in self._batches])  # (batches, D + d)
            left = torch.stack([rows.left for rows in self._batches])
            mean = (counts * means).sum(0) / counts.sum().clamp_min(torch.finfo(counts.dtype).tiny)
            apart = means - mean
            self._products += (counts * apart)[:, : self._inputs].mT @ apart
            self._products -= (counts * left)[:, : self._inputs].mT @ left
            for start in range(0, self._inputs, BLOCK):  # X'X is symmetric
                end = min(start + BLOCK, self._inputs)
                self._products[end : self._inputs, start:end] = self._products[start:end, end : self._inputs].mT
            self._batches = [_Rows(self.count, mean, torch.zeros_like(mean))]
        return self._batches[0]

    @property
    def device(self) -> torch.device:
        """Where the sums are."""
        return self._products.device

    @property
    def squares(self) -> Tensor:
        """X'X of centred inputs, (D, D)."""
        self._centre()
        return self._products[:, : self._inputs]

    @property
    def products(self) -> Tensor:
        """X'Y of centred inputs and targets, (D, d)."""
        self._centre()
        return self._products[:, self._inputs :]

    @property
    def mean_input(self) -> Tensor:
        """The means of the inputs, (D,)."""
        return self._centre().means[: self._inputs]

    @property
    def mean_target(self) -> Tensor:
        """The means of the targets, (d,)."""
        return self._centre().means[self._inputs :]

    def at(self, channels: Sequence[int]) -> NormalEquations:
        """The equations of some of the inputs."""
        count, means, left = self._centre()
        places = torch.tensor([*channels, *range(self._inputs, len(means))], dtype=torch.long, device=self.device)
        part = NormalEquations(len(channels), len(means) - self._inputs, self.device)
        part._products = self._products[places[: len(channels)]][:, places]
        part._batches = [_Rows(count, means[places], left[places])]
        return part

    def merge(self, other: NormalEquations) -> None:
        """Add the rows of other equations."""
        self._batches.append(other._centre())
        self._products += other._products

    def gathered(self) -> NormalEquations:
        """The equations of all processes together."""
        if world_size() == 1:
            return self
        count, means, _ = self._centre()
        whole = NormalEquations(self._inputs, len(means) - self._inputs, self.device)
        own = [torch.tensor([count], dtype=torch.float64), means.cpu(), self._products.flatten().cpu()]
        for share in gather_tensors(torch.cat(own)):
            rest, end = share[1:].to(self.device), len(means)
            whole._batches.append(_Rows(float(share[0]), rest[:end], torch.zeros_like(means)))
            whole._products += rest[end:].view_as(self._products)
        return whole
