"""Normal equations of least squares: sums over the tokens of all batches and processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from greedy_gnorm.passes.processes import gather_tensors, world_size

BLOCK = 256
"""Columns of X'X that are computed at once."""


class NormalEquations:
    """The count, the means and the centred products of inputs, (N, D), and targets, (N, d), added batch by batch.

    Products are sums in float64 of rows less the means of the first batch, which keeps digits. They are centred by the
    means of all rows when they are read; until then, of X'X only the blocks above the diagonal are known.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | None = None) -> None:
        self.count = 0.0  # the sum of the weights
        self._inputs = inputs
        self._means = torch.zeros(inputs + outputs, dtype=torch.float64, device=device)  # of inputs and targets
        self._products = torch.zeros(inputs, inputs + outputs, dtype=torch.float64, device=device)
        self._shift: Tensor | None = None  # what was subtracted from rows, where products are not centred

    def add(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> None:
        """Add rows with weights, (N,); they are multiplied in float32 at least."""
        total = float(weights.sum(dtype=torch.float64))
        if not total:
            return
        if self._shift is None and self.count:
            part = NormalEquations(*self._shape, self.device)
            part.add(inputs, targets, weights)
            self.merge(part)
            return
        exact = torch.promote_types(torch.promote_types(inputs.dtype, targets.dtype), torch.float32)
        if self._shift is None:
            shares = (weights.double() / total).to(exact)
            self._shift = torch.cat([shares @ inputs.to(exact), shares @ targets.to(exact)])
        rows = torch.empty(len(weights), len(self._shift), dtype=exact, device=inputs.device)
        torch.sub(inputs, self._shift[: self._inputs], out=rows[:, : self._inputs])
        torch.sub(targets, self._shift[self._inputs :], out=rows[:, self._inputs :])
        root = weights.sqrt().to(exact)
        rows.mul_(root[:, None])
        self._means += root @ rows  # sums, until they are divided by the count
        for start in range(0, self._inputs, BLOCK):
            end = min(start + BLOCK, self._inputs)
            self._products[start:end, start:] += rows[:, start:end].mT @ rows[:, start:]
        self.count += total

    def _centre(self) -> None:
        """Centre the products by the means of all rows."""
        if self._shift is None:
            return
        for start in range(0, self._inputs, BLOCK):  # X'X is symmetric
            end = min(start + BLOCK, self._inputs)
            self._products[end : self._inputs, start:end] = self._products[start:end, end : self._inputs].mT
        self._means /= self.count
        self._products.addr_(self._means[: self._inputs], self._means, alpha=-self.count)
        self._means += self._shift
        self._shift = None

    @property
    def device(self) -> torch.device:
        """Where the sums are."""
        return self._means.device

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
        self._centre()
        return self._means[: self._inputs]

    @property
    def mean_target(self) -> Tensor:
        """The means of the targets, (d,)."""
        self._centre()
        return self._means[self._inputs :]

    def at(self, channels: Sequence[int]) -> NormalEquations:
        """The equations of some of the inputs."""
        self._centre()
        outputs = range(self._inputs, len(self._means))
        places = torch.tensor([*channels, *outputs], dtype=torch.long, device=self.device)
        part = NormalEquations(len(channels), len(outputs), self.device)
        part.count, part._means = self.count, self._means[places]
        part._products = self._products[places[: len(channels)]][:, places]
        return part

    def merge(self, other: NormalEquations) -> None:
        """Add the rows of other equations."""
        self._centre()
        other._centre()
        self._products += other._products
        if other.count:
            total = self.count + other.count
            apart = other._means - self._means
            self._products.addr_(apart[: self._inputs], apart, alpha=self.count * other.count / total)
            self._means += apart * (other.count / total)
            self.count = total

    @property
    def _shape(self) -> tuple[int, int]:
        return self._inputs, len(self._means) - self._inputs

    def gathered(self) -> NormalEquations:
        """The equations of all processes together."""
        if world_size() == 1:
            return self
        self._centre()
        count = torch.tensor([self.count], dtype=torch.float64)
        whole = NormalEquations(*self._shape, self.device)
        for share in gather_tensors(torch.cat([count, self._means.cpu(), self._products.flatten().cpu()])):
            part = NormalEquations(*self._shape, self.device)
            part.count = float(share[0])
            part._means.copy_(share[1 : 1 + len(self._means)])
            part._products.copy_(share[1 + len(self._means) :].view_as(self._products))
            whole.merge(part)
        return whole
