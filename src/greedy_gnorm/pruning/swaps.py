"""Exchanging units that are about to be removed for units that would stay, while that lowers the estimated loss.

With the derivative g_xu of the objective of row x by the gate of unit u, removing the units R is estimated to cost

    mean over x of (sum over u in R of g_xu)^2,

which sees what units do together: of two whose effects cancel, both can go. A unit is only exchanged for one of its own
site, so the cost of the model stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.sites import Sites
from greedy_gnorm.passes.gradients import gate_table
from greedy_gnorm.tasks.objectives import Objective
from greedy_gnorm.tasks.task import Task
from greedy_gnorm.units import Matrix, Unit

Places = NDArray[np.bool_]


def check_exchanges(task: Task) -> None:
    """Refuse language models, whose few blocks of text are too few rows for sums over them."""
    if task.tokens_alike:
        raise GnormError("swap needs many rows, and a language model has few blocks of text: leave it out.")


def exchange(
    units: Sequence[Unit], allowed: Collection[Unit], sites: Sites, batches: Batches, objective: Objective
) -> tuple[Unit, ...]:
    """The units to remove after all exchanges that help; `allowed` are those that may be removed at all."""
    tables = gate_table(sites, batches, objective)
    left = [Unit(site.index, index) for site in sites for index in site.survivors]
    table, chosen, free = np.hstack(tables), set(units), set(allowed)
    ends = list(accumulate((each.shape[1] for each in tables), initial=0))
    found = local_search(
        table,
        np.array([unit in chosen for unit in left]),
        np.array([unit in free for unit in left]),
        [slice(start, end) for start, end in pairwise(ends)],
    )
    return tuple(unit for unit, gone in zip(left, found, strict=True) if gone)


def local_search(table: Matrix, removed: Places, allowed: Places, groups: Sequence[slice]) -> Places:
    """The columns to remove, (units,) true or false, such that no exchange within a group lowers the estimate.

    `table` has the derivatives, (rows, units). Groups take turns, each with its best exchange.
    """
    squares = np.square(table).sum(0)
    removed = removed.copy()
    total = table[:, removed].sum(1)
    threshold = 1e-9 * max(float(total @ total), float(squares.max()))  # what rounding could explain
    helped = True
    while helped:
        helped = False
        for group in groups:
            out = group.start + np.flatnonzero(removed[group])
            back = group.start + np.flatnonzero(~removed[group] & allowed[group])
            if not (len(out) and len(back)):
                continue
            change = (
                (squares[out] - 2 * table[:, out].T @ total)[:, None]
                + (squares[back] + 2 * table[:, back].T @ total)[None]
                - 2 * table[:, out].T @ table[:, back]
            )
            best = np.unravel_index(int(change.argmin()), change.shape)
            if change[best] < -threshold:
                stays, goes = out[best[0]], back[best[1]]
                removed[stays], removed[goes] = False, True
                total += table[:, goes] - table[:, stays]
                helped = True
    return removed
