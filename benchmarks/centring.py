"""How many digits the Gram form keeps where tokens are alike: python benchmarks/centring.py prints a table.

The relative error in float32 of the norm of X^T g against float64, for tokens whose mean is so many times as long as
their deviations and whose gradients sum to nothing: formed directly, by the plain Gram matrix (as 0.1.0 did), and by
the centred one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from greedy_gnorm.passes.gradients import Inputs, unit_norms
from greedy_gnorm.report.tables import as_markdown

ROWS, TOKENS, WIDTH, SIZE = 16, 64, 256, 32
RATIOS = (1.0, 17.3, 100.0, 1000.0, 10000.0)


def alike(ratio: float) -> tuple[Tensor, Tensor]:
    """Inputs and gradients, (rows, tokens, ...)."""
    chance = torch.Generator().manual_seed(0)
    mean = torch.randn(ROWS, 1, WIDTH, generator=chance, dtype=torch.float64)
    inputs = ratio * mean + torch.randn(ROWS, TOKENS, WIDTH, generator=chance, dtype=torch.float64)
    gradient = torch.randn(ROWS, TOKENS, 4 * SIZE, generator=chance, dtype=torch.float64)
    return inputs.float(), (gradient - gradient.mean(1, keepdim=True)).float()


def plain_gram(inputs: Tensor, gradient: Tensor) -> Tensor:
    """The norms by X X^T as it is."""
    terms = gradient * (inputs @ inputs.mT @ gradient)
    return terms.view(ROWS, TOKENS, -1, SIZE).sum((1, 3), dtype=torch.float64).clamp_min(0).sqrt()


def errors(ratio: float) -> list[float]:
    inputs, gradient = alike(ratio)
    mask = torch.ones(ROWS, TOKENS)
    exact = unit_norms(Inputs([inputs.double()], mask), gradient.double(), SIZE, gram=False)
    found = [
        unit_norms(Inputs([inputs], mask), gradient, SIZE, gram=False),
        plain_gram(inputs, gradient),
        unit_norms(Inputs([inputs], mask), gradient, SIZE, gram=True),
    ]
    return [float((each / exact - 1).abs().max()) for each in found]


if __name__ == "__main__":
    cells = [[f"{ratio:g}", f"{ratio**2:g}", *(f"{error:.1e}" for error in errors(ratio))] for ratio in RATIOS]
    names = ["mean / deviation", "squared", "formed directly", "Gram, 0.1.0", "Gram, centred"]
    print(as_markdown(names, cells), end="")
