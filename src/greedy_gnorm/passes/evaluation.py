"""Measuring the quality of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.errors import DataError, NonFiniteScore
from greedy_gnorm.model.modes import evaluating, without_gradients
from greedy_gnorm.model.sites import Sites
from greedy_gnorm.passes.layers import outputs
from greedy_gnorm.passes.processes import gather_rows
from greedy_gnorm.tasks.task import task_of


def evaluate(sites: Sites, batches: Batches) -> dict[str, float]:
    """The task's measures on these rows and those of the other processes."""
    statistics = row_statistics(sites, batches)
    if not torch.isfinite(statistics).all():
        raise NonFiniteScore("The model's outputs on evaluation rows are NaN or infinite. Check its weights for NaN.")
    return dict(task_of(sites.model).measures(statistics.numpy()))


def row_statistics(sites: Sites, batches: Batches) -> Tensor:
    """The task's statistics of every row in the order of the data, (N, S) float64; NaN if an output is not finite."""
    task = task_of(sites.model)
    found: list[Tensor] = []
    with evaluating(sites.model), without_gradients(sites.model):
        for batch in batches:
            if batch.labels is None:
                raise DataError("Measuring quality requires labels, but the evaluation rows have none.")
            exact = outputs(sites, batch).double()
            statistics = task.row_statistics(exact, batch.labels.to(exact.device)).cpu()
            finite = torch.isfinite(exact.cpu()).flatten(1).all(1)
            found.append(statistics.masked_fill(~finite[:, None], torch.nan))
    return gather_rows(found, [batch.rows for batch in batches])
