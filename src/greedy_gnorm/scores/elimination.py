"""Removing the units of a layer one after another, each time the one whose loss the others make up for best.

With P the inverse of the damped products of the inputs and W the weights, removing the inputs h and fitting the other
weights again leaves the error tr W_h' (P_hh)^-1 W_h, and for the next removal

    W <- W - P_:h (P_hh)^-1 W_h,    P <- P - P_:h (P_hh)^-1 P_h:

which are sums of products of L = P_:h R'^-1 and R^-1 W_h, with P_hh = R R'. They are only subtracted from the whole
matrices after some removals; until then what is needed of them is computed from the factors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from greedy_gnorm.units import Vector

AT_ONCE = 64
"""Inputs that are removed before the whole matrices are updated."""


class Elimination(NamedTuple):
    """The units in the order of removal, the error that each adds, and the error of removing each alone, by unit."""

    order: list[int]
    added: list[float]
    alone: Vector


def eliminate(gram: Tensor, weight: Tensor, size: int, ridge: float) -> Elimination:
    """Remove all units; the products of the inputs, (D, D), are damped by a part of the mean of their diagonal.

    Each unit has `size` inputs, side by side.
    """
    units = len(gram) // size
    strength = float(gram.diagonal().mean())
    if not strength:  # no unit returns anything but its mean
        return Elimination(list(range(units)), [0.0] * units, np.zeros(units))
    damped = gram.clone()
    damped.diagonal().add_(ridge * strength)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    alone = _errors(_own_blocks(inverse, size), _own_products(weight, size))
    left = torch.arange(units)
    order: list[int] = []
    added: list[float] = []
    while len(left):
        taken = _eliminate_some(inverse, weight, size, min(len(left), max(1, AT_ONCE // size)))
        order += left[taken.places].tolist()
        added += taken.added
        stay = torch.ones(len(left), dtype=torch.bool)
        stay[taken.places] = False
        inputs = stay.repeat_interleave(size).nonzero()[:, 0].to(inverse.device)
        factor = taken.left[inputs]
        inverse = inverse[inputs][:, inputs] - factor @ factor.mT
        weight = weight[inputs] - factor @ taken.right
        left = left[stay]
    return Elimination(order, added, alone.cpu().numpy())


class _Taken(NamedTuple):
    """Some units that were removed, the errors that they add, and the factors of what is to be subtracted."""

    places: list[int]
    added: list[float]
    left: Tensor  # (D, removed inputs): L L' from P, and L times the next from W
    right: Tensor  # (removed inputs, d)


def _eliminate_some(inverse: Tensor, weight: Tensor, size: int, count: int) -> _Taken:
    """Remove `count` units without a change of the whole matrices."""
    blocks, products = _own_blocks(inverse, size), _own_products(weight, size)  # (units, size, size) each
    left, right = weight.new_zeros(len(weight), count * size), weight.new_zeros(count * size, weight.shape[1])
    gone = torch.zeros(len(blocks), dtype=torch.bool, device=weight.device)
    places: list[int] = []
    added: list[float] = []
    for done in range(0, count * size, size):
        place = int(_errors(blocks, products).masked_fill(gone, torch.inf).argmin())
        own = slice(place * size, (place + 1) * size)
        earlier, results = left[:, :done], right[:done]
        root = torch.linalg.cholesky(inverse[own, own] - earlier[own] @ earlier[own].mT)
        column = inverse[:, own] - earlier @ earlier[own].mT  # of P as it is now
        factor = torch.linalg.solve_triangular(root, column.mT, upper=False).mT  # (D, size)
        result = torch.linalg.solve_triangular(root, weight[own] - earlier[own] @ results, upper=False)  # (size, d)
        mixed = (weight @ result.mT - earlier @ (results @ result.mT)).view_as(blocks)
        by_unit = factor.reshape(blocks.shape)
        blocks = blocks - by_unit @ by_unit.mT
        products = products - by_unit @ mixed.mT - mixed @ by_unit.mT + by_unit @ (result @ result.mT) @ by_unit.mT
        left[:, done : done + size], right[done : done + size] = factor, result
        gone[place] = True
        blocks[place], products[place] = torch.eye(size).to(blocks), 0
        places.append(place)
        added.append(float(result.square().sum()))
    return _Taken(places, added, left, right)


def _own_blocks(matrix: Tensor, size: int) -> Tensor:
    """The blocks of a matrix on its diagonal, (units, size, size)."""
    units = len(matrix) // size
    places = torch.arange(units, device=matrix.device)
    return matrix.view(units, size, units, size)[places, :, places]


def _own_products(weight: Tensor, size: int) -> Tensor:
    """The products of the weights of a unit's inputs with one another, (units, size, size)."""
    by_unit = weight.view(-1, size, weight.shape[1])
    return by_unit @ by_unit.mT


def _errors(blocks: Tensor, products: Tensor) -> Tensor:
    """The error of removing each unit next, (units,)."""
    if blocks.shape[1] == 1:
        return (products / blocks)[:, 0, 0]
    errors: Tensor = torch.linalg.solve(blocks, products).diagonal(dim1=1, dim2=2).sum(1)
    return errors
