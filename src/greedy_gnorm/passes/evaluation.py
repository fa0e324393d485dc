"""Measuring the quality of a model, with the labels of the rows and with those that the unpruned model predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from greedy_gnorm.data.batches import Batch, Batches
from greedy_gnorm.errors import DataError, NonFiniteScore
from greedy_gnorm.model.modes import evaluating, without_gradients
from greedy_gnorm.model.sites import Sites
from greedy_gnorm.passes.layers import outputs
from greedy_gnorm.passes.processes import gather_rows
from greedy_gnorm.phases import counted
from greedy_gnorm.tasks.intervals import Interval, paired_intervals, quality_interval
from greedy_gnorm.tasks.task import AGREEMENT, Task, task_of
from greedy_gnorm.units import Matrix, pack_rows

LABELS, PREDICTED = "labels", "predicted"


def evaluate(sites: Sites, batches: Batches) -> dict[str, float]:
    """The task's measures on these rows and those of the other processes."""
    return measures(task_of(sites.model), batches, row_statistics(sites, batches).numpy())


def measures(task: Task, batches: Batches, statistics: Matrix) -> dict[str, float]:
    """The measures by the labels of the rows, and the agreement with the unpruned model where that is measured."""
    found: dict[str, float] = {}
    for source, table in by_source(batches, statistics).items():
        if source == PREDICTED:
            found[AGREEMENT] = task.measures(table)[task.agreement]
        else:
            found |= task.measures(table)
    return found


def by_source(batches: Batches, statistics: Matrix) -> dict[str, Matrix]:
    """The statistics with the labels of each source."""
    width = statistics.shape[1] // len(batches.judged_by)
    return {
        source: statistics[:, place * width : (place + 1) * width] for place, source in enumerate(batches.judged_by)
    }


@dataclass(frozen=True)
class Evaluation:
    """The quality on some rows: all measures, the interval of the leading one, and which rows are right, packed.

    Rows are right or wrong where the leading measure is the share of those that are right.
    """

    quality: Mapping[str, float]
    interval: tuple[float, float]
    right: str | None = None


def judge(sites: Sites, batches: Batches, measure: str) -> Evaluation:
    """The quality on these rows and those of the other processes, led by a measure."""
    task, statistics = task_of(sites.model), row_statistics(sites, batches).numpy()
    source, name = (PREDICTED, task.agreement) if measure == AGREEMENT else (LABELS, measure)
    table = by_source(batches, statistics)[source]
    right = task.right_rows(table, name)
    return Evaluation(
        measures(task, batches, statistics),
        quality_interval(task, table, name),
        None if right is None else pack_rows(right),
    )


def tested(task: Task, batches: Batches, tables: Sequence[Matrix]) -> dict[str, Any]:
    """The quality of two models on the same rows, with 95 % intervals of every measure and of its change.

    `tables` are the statistics of the rows, of the unpruned model and of the pruned one.
    """
    qualities = [measures(task, batches, table) for table in tables]
    intervals: dict[str, dict[str, Interval]] = {}
    for source in batches.judged_by:
        found = paired_intervals(task, *(by_source(batches, table)[source] for table in tables))
        intervals |= {AGREEMENT: found[task.agreement]} if source == PREDICTED else found
    return {
        "rows": len(tables[0]),
        "quality": {name: [quality[name] for quality in qualities] for name in qualities[0]},
        "intervals": {
            name: {side: list(interval) for side, interval in sides.items()} for name, sides in intervals.items()
        },
    }


def row_statistics(sites: Sites, batches: Batches) -> Tensor:
    """The task's statistics of every row in the order of the data, (N, S) float64, for each source of labels."""
    task = task_of(sites.model)
    found: list[Tensor] = []
    with evaluating(sites.model), without_gradients(sites.model):
        for batch in counted(batches.items, "Evaluating", "batch"):
            exact = outputs(sites, batch).double()
            tables = [
                task.row_statistics(exact, _labels(batch, source).to(exact.device), batch)
                for source in batches.judged_by
            ]
            finite = torch.isfinite(exact).flatten(1).all(1)
            found.append(torch.cat(tables, dim=1).masked_fill(~finite[:, None], torch.nan))
    tables = [table.cpu() for table in found]  # only now: a GPU would have to wait after each batch
    statistics = gather_rows(tables, [batch.rows for batch in batches])
    if not torch.isfinite(statistics).all():
        raise NonFiniteScore("The model's outputs on evaluation rows are NaN or infinite. Check its weights for NaN.")
    sources = by_source(batches, statistics.numpy()).values()
    return torch.from_numpy(np.hstack([task.combined(table) for table in sources]))


def _labels(batch: Batch, source: str) -> Tensor:
    labels: Tensor | None = getattr(batch, source)
    if labels is None:
        raise DataError("Measuring quality requires labels, but the evaluation rows have none.")
    return labels


def with_drawn_labels(model: nn.Module, batches: Batches) -> Batches:
    """The same rows with labels drawn from this model's predictions, with the seed of the batches."""
    task, chance = task_of(model), torch.Generator().manual_seed(batches.seed)
    with evaluating(model), torch.no_grad():
        items = [
            replace(batch, labels=task.drawn_labels(task.outputs(model, batch), batch, chance)) for batch in batches
        ]
    return replace(batches, items=tuple(items))


def with_predictions(model: nn.Module, batches: Batches) -> Batches:
    """The same rows, on which agreement with this model is measured too, or instead where they have no labels.

    Where the task has no other labels, its own measures are those of agreement.
    """
    task = task_of(model)
    with evaluating(model), torch.no_grad():
        found = [task.predicted_labels(task.outputs(model, batch), batch) for batch in batches]
        labels = task.joined_predictions(found, batches.items)
        items = [replace(batch, predicted=each) for batch, each in zip(batches, labels, strict=True)]
    if task.own_labels:
        return replace(batches, items=tuple(replace(batch, labels=batch.predicted, predicted=None) for batch in items))
    labelled = all(batch.labels is not None for batch in items)
    return replace(batches, items=tuple(items), judged_by=(PREDICTED, LABELS) if labelled else (PREDICTED,))
