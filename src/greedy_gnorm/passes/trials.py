"""Removing units on trial: how far the outputs are from those of the unpruned model then."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.errors import NonFiniteScore
from greedy_gnorm.model.gates import closed
from greedy_gnorm.model.modes import evaluating, without_gradients
from greedy_gnorm.model.sites import Sites
from greedy_gnorm.passes.layers import outputs
from greedy_gnorm.passes.processes import gather_rows
from greedy_gnorm.phases import counted
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import Unit


def trial_removals(sites: Sites, batches: Batches, units: Sequence[Unit]) -> dict[Unit, float]:
    """The mean divergence from the reference of the rows with each unit removed alone.

    Those of the upper layers come first: a pass runs only the layers from the change on, so lower ones run less often.
    """
    found: dict[Unit, float] = {}
    for unit in counted(sorted(units, reverse=True), "Looking ahead", "head"):
        with closed(sites, [unit]):
            found[unit] = divergence(sites, batches)
    return found


def divergence(sites: Sites, batches: Batches) -> float:
    """The mean divergence of the model's outputs from the reference of the rows, over those of all processes."""
    task, values = task_of(sites.model), list[torch.Tensor]()
    with evaluating(sites.model), without_gradients(sites.model):
        for batch in batches:
            assert batch.reference is not None
            values.append(task.row_divergences(outputs(sites, batch).double(), batch.reference.double(), batch))
    rows = gather_rows([each[:, None].double().cpu() for each in values], [batch.rows for batch in batches])
    mean = float(rows.mean())
    if not math.isfinite(mean):
        raise NonFiniteScore("The outputs of the model are NaN or infinite on scoring rows: check the weights.")
    return mean
