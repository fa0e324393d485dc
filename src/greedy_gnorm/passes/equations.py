"""Normal equations of least squares: sums over the tokens of all batches and processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from greedy_gnorm.passes.processes import gather_tensors, world_size

BLOCK = 256
"""Columns of X'X that are computed at once."""


class _Centred:
    """Rows less their weighted mean, (N, D), each multiplied by the root of its weight.

    The mean that is subtracted is in the precision of the rows, so a `shift`, (D,), is left; `mean` is without it.
    """

    def __init__(self, rows: Tensor, weights: Tensor, total: float) -> None:
        shares = (weights.double() / total).to(rows.dtype)
        mean = shares @ rows
        self.rows = rows - mean
        self.shift = (shares @ self.rows).double()
        self.mean = mean.double() + self.shift
        self.rows.mul_(weights.sqrt()[:, None].to(rows.dtype))


class NormalEquations:
    """The count, the means and the centred products of inputs, (N, D), and targets, (N, d), added batch by batch."""

    def __init__(self, inputs: int, outputs: int, device: torch.device | None = None) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.count = 0.0  # the sum of the weights
        self.mean_input, self.mean_target = zeros(inputs), zeros(outputs)
        self.squares, self.products = zeros(inputs, inputs), zeros(inputs, outputs)

    def add(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> None:
        """Add rows with weights, (N,), in float32 at least; a batch is centred by its own means, which keeps digits."""
        inputs, targets = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (inputs, targets))
        total = float(weights.sum(dtype=torch.float64))
        if not total:
            return
        x, y = _Centred(inputs, weights, total), _Centred(targets, weights, total)
        self._add_squares(x.rows)
        self.squares.addr_(x.shift, x.shift, alpha=-total)
        self.products.add_(x.rows.mT @ y.rows).addr_(x.shift, y.shift, alpha=-total)
        self._merge_means(total, x.mean, y.mean)

    def _add_squares(self, x: Tensor) -> None:
        """Add X'X block by block; it is symmetric, so the blocks below the diagonal are copies."""
        for start in range(0, x.shape[1], BLOCK):
            end = min(start + BLOCK, x.shape[1])
            upper = x[:, start:end].mT @ x[:, start:]
            self.squares[start:end, start:].add_(upper)
            self.squares[end:, start:end].add_(upper[:, end - start :].mT)

    def at(self, channels: Sequence[int]) -> NormalEquations:
        """The equations of some of the inputs."""
        places = torch.tensor(channels, dtype=torch.long, device=self.squares.device)
        part = NormalEquations(len(channels), len(self.mean_target), self.squares.device)
        part.count, part.mean_target = self.count, self.mean_target
        part.mean_input, part.products = self.mean_input[places], self.products[places]
        part.squares = self.squares[places][:, places]
        return part

    def merge(self, other: NormalEquations) -> None:
        """Add the rows of other equations."""
        self.squares += other.squares
        self.products += other.products
        if other.count:
            self._merge_means(other.count, other.mean_input, other.mean_target)

    def _merge_means(self, count: float, mean_input: Tensor, mean_target: Tensor) -> None:
        total = self.count + count
        apart = mean_input - self.mean_input, mean_target - self.mean_target
        between = self.count * count / total
        self.squares.addr_(apart[0], apart[0], alpha=between)
        self.products.addr_(apart[0], apart[1], alpha=between)
        self.mean_input += apart[0] * (count / total)
        self.mean_target += apart[1] * (count / total)
        self.count = total

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.mean_input), len(self.mean_target)

    def gathered(self) -> NormalEquations:
        """The equations of all processes together."""
        if world_size() == 1:
            return self
        own = torch.cat(
            [
                torch.tensor([self.count], dtype=torch.float64),
                *(part.flatten().cpu() for part in (self.mean_input, self.mean_target, self.squares, self.products)),
            ]
        )
        whole = NormalEquations(*self._shape, self.squares.device)
        for share in gather_tensors(own):
            part = NormalEquations(*self._shape, self.squares.device)
            part.count = float(share[0])
            rest = share[1:].to(self.squares.device)
            for target in (part.mean_input, part.mean_target, part.squares, part.products):
                target.copy_(rest[: target.numel()].view_as(target))
                rest = rest[target.numel() :]
            whole.merge(part)
        return whole
