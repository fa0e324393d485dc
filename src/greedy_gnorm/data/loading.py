"""Loading the user's data as batches for scoring and for evaluation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from greedy_gnorm.data.batches import Batch, Batches, ready_batches
from greedy_gnorm.data.columns import (
    Columns,
    Format,
    LabelColumn,
    find_columns,
    has_labels,
    other_labels,
    read_labels,
)
from greedy_gnorm.data.encoding import EncodingTask, encode
from greedy_gnorm.data.rows import PIXELS, TOKENS, Label, Row, Text
from greedy_gnorm.data.sources import WHOLE, Splits, read_splits
from greedy_gnorm.data.splits import sampled, split_rows, warn_of_overlap
from greedy_gnorm.errors import DataError
from greedy_gnorm.settings import Settings

log = logging.getLogger("greedy_gnorm")


class RowTask(EncodingTask, Protocol):
    """The part of a task that loading uses."""

    @property
    def format(self) -> Format:
        """The common names of columns in the data of this task."""
        ...

    @property
    def labelled(self) -> bool:
        """Whether rows need labels of their own."""
        ...

    @property
    def row(self) -> type[Row]:
        """What a row of the data is."""
        ...

    @property
    def own_labels(self) -> bool:
        """Whether rows are judged by what the unpruned model makes of them, and labels are an addition."""
        ...

    def read_texts(
        self, table: Any, columns: Columns, tokenizer: Any, settings: Settings
    ) -> list[tuple[Text, Text | None]]:
        """The text of each row, and the second text where there is one."""
        ...

    def map_labels(self, columns: Sequence[LabelColumn], settings: Settings) -> list[list[Label]]:
        """Map the labels of all columns to the model's numbers by a single mapping; returns a list for each column."""
        ...

    def check_labels(self, labels: Sequence[Any]) -> None:
        """Refuse labels for which quality can't be measured."""
        ...

    def completed(self, batch: Batch) -> Batch:
        """A batch that the caller has made, with the labels that its tokens imply, if they do."""
        ...


def scoring_batches(
    model: nn.Module, tokenizer: Any, task: RowTask, data: Any, settings: Settings, *, needs_labels: bool = False
) -> Batches:
    """Batches for scoring alone, from the validation split if there is one, else the training split, else all rows."""
    if is_ready(data):
        return _ready(task, data, settings)
    splits = read_splits(data)
    split = _first(splits, "validation", "train", WHOLE, "test")
    (rows,) = read_rows([(splits, split, needs_labels)], task, tokenizer, settings)
    rows = sampled(rows, settings.samples, settings.seed)
    log.info("scoring: %d rows of %s", len(rows), split)
    return encode(rows, model, tokenizer, task, settings)


def ready_sets(task: RowTask, data: Any, eval_data: Any, settings: Settings) -> tuple[Batches, Batches]:
    """Batches for scoring and for evaluation that the caller has made."""
    if not is_ready(data) or not is_ready(eval_data):
        raise DataError("Batches can't be split into scoring and evaluation rows: give data and eval_data.")
    scoring, evaluation = (_ready(task, each, settings) for each in (data, eval_data))
    if needs_ready_labels(task, settings):
        task.check_labels(_ready_labels(evaluation))
    warn_of_overlap(_inputs_by_row(scoring), _inputs_by_row(evaluation))
    return scoring, evaluation


def both_rows(
    task: RowTask,
    tokenizer: Any,
    data: Any,
    eval_data: Any,
    settings: Settings,
    *,
    needs_labels: bool,
    draws: int = 1,
) -> tuple[list[Row], list[Row]]:
    """The rows to draw scoring samples from, enough for this many draws, and the evaluation rows."""
    splits, needed = read_splits(data), needs_row_labels(task, settings)
    if eval_data is not None:
        eval_splits = read_splits(eval_data)
        scoring_split = _first(splits, "validation", "train", WHOLE, "test")
        evaluation_split = _first(eval_splits, "test", "validation", WHOLE, "train")
        wanted = [(splits, scoring_split, needs_labels), (eval_splits, evaluation_split, needed)]
        scoring, evaluation = read_rows(wanted, task, tokenizer, settings)
    elif len(splits := labelled_splits(splits, task.format, settings) if needed else splits) == 1:
        scoring_split = evaluation_split = next(iter(splits))
        (rows,) = read_rows([(splits, scoring_split, needed)], task, tokenizer, settings)
        scoring, evaluation = split_rows(rows, settings.samples and draws * settings.samples, settings.seed)
    else:
        evaluation_split = _first(splits, "test", "validation", "train")
        others = {name: table for name, table in splits.items() if name != evaluation_split}
        scoring_split = _first(others, "validation", "train")
        wanted = [(splits, scoring_split, needs_labels), (splits, evaluation_split, needed)]
        scoring, evaluation = read_rows(wanted, task, tokenizer, settings)
    evaluation = sampled(evaluation, settings.eval_samples, settings.seed)
    if needed:
        task.check_labels([row.label for row in evaluation])
    count = len(scoring) if settings.samples is None else min(len(scoring), settings.samples)
    log.info("scoring: %d rows of %s", count, scoring_split)
    log.info("evaluation: %d rows of %s", len(evaluation), evaluation_split)
    return scoring, evaluation


def evaluation_batches(model: nn.Module, tokenizer: Any, task: RowTask, data: Any, settings: Settings) -> Batches:
    """Batches for evaluation alone, from the test split if there is one, else the validation split, else all rows."""
    if is_ready(data):
        batches = _ready(task, data, settings)
        if needs_ready_labels(task, settings):
            task.check_labels(_ready_labels(batches))
        return batches
    splits, needed = read_splits(data), needs_row_labels(task, settings)
    splits = labelled_splits(splits, task.format, settings) if needed else splits
    split = _first(splits, "test", "validation", WHOLE, "train")
    (rows,) = read_rows([(splits, split, needed)], task, tokenizer, settings)
    rows = sampled(rows, settings.eval_samples, settings.seed)
    if needed:
        task.check_labels([row.label for row in rows])
    return encode(rows, model, tokenizer, task, settings, "evaluation")


def needs_ready_labels(task: RowTask, settings: Settings) -> bool:
    """Whether the caller's own batches must have labels; those of a language model are completed."""
    return settings.labels == "data" and not task.own_labels


def needs_row_labels(task: RowTask, settings: Settings) -> bool:
    """Whether quality is measured with labels of the data."""
    return task.labelled and settings.labels == "data"


def is_ready(data: Any) -> bool:
    """Whether the data is a list of batches (dicts with input_ids or pixel_values) rather than rows."""
    return (
        isinstance(data, list | tuple)
        and bool(data)
        and all(hasattr(batch, "keys") and (TOKENS in batch or PIXELS in batch) for batch in data)
    )


def _first(splits: Splits, *names: str) -> str:
    return next((name for name in names if name in splits), next(iter(splits)))


def labelled_splits(splits: Splits, names: Format, settings: Settings) -> Splits:
    """The splits that have labels."""
    if len(splits) == 1:
        return splits
    labelled = {}
    for name, table in splits.items():
        if has_labels(table, names, settings):
            labelled[name] = table
        else:
            log.info("the %s split has no labels and is ignored", name)
    return labelled or splits


def read_rows(
    wanted: Sequence[tuple[Splits, str, bool]], task: RowTask, tokenizer: Any, settings: Settings
) -> list[list[Row]]:
    """Read the rows of some splits, given with whether they need labels; all labels are mapped by a single mapping."""
    tables = [splits[split] for splits, split, _ in wanted]
    columns = [find_columns(table, task.format, settings) for table in tables]
    texts = [task.read_texts(table, each, tokenizer, settings) for table, each in zip(tables, columns, strict=True)]
    if not (task.labelled or task.own_labels):
        return [[task.row(*words, None) for words in table] for table in texts]
    labels = _read_labels(wanted, [each.label for each in columns], task, settings)
    return [
        [task.row(*words, label) for words, label in zip(*table, strict=True)]
        for table in zip(texts, labels, strict=True)
    ]


def _read_labels(
    wanted: Sequence[tuple[Splits, str, bool]], names: Sequence[str | None], task: RowTask, settings: Settings
) -> list[Sequence[Label | None]]:
    """Read the labels of each split; None for rows that need no labels and whose labels can't be read."""
    found: list[Sequence[Label | None]] = [[None] * len(splits[split]) for splits, split, _ in wanted]
    columns: dict[int, LabelColumn] = {}
    for place, ((splits, split, needed), name) in enumerate(zip(wanted, names, strict=True)):
        try:
            if name is not None:
                columns[place] = read_labels(splits[split], name, split)
            elif needed:
                present = ", ".join(splits[split].column_names)
                raise DataError(
                    f"Which column is the label? Give its name with --label. Columns: {present}. Without labels, use "
                    f"--labels own."
                )
        except DataError as error:
            if needed:
                raise
            log.info("the labels of the scoring rows are not used: %s", error)
    used = {(id(splits), split) for splits, split, _ in wanted}
    unused = [
        column
        for splits in {id(splits): splits for splits, _, _ in wanted}.values()
        for split, table in splits.items()
        if (id(splits), split) not in used and (column := other_labels(table, task.format, settings)) is not None
    ]
    try:
        mapped = task.map_labels([*columns.values(), *unused], settings)
    except DataError as error:
        optional = [place for place in columns if not wanted[place][2]]
        if not optional:
            raise
        for place in optional:
            del columns[place]
        mapped = task.map_labels([*columns.values(), *unused], settings)
        log.info("the labels of the scoring rows are not used: %s", error)
    for place, labels in zip(columns, mapped[: len(columns)], strict=True):
        found[place] = labels
    return found


def _ready(task: RowTask, data: Any, settings: Settings) -> Batches:
    batches = ready_batches(data, seed=settings.seed, threshold=settings.threshold)
    return replace(batches, items=tuple(map(task.completed, batches)))


def _inputs_by_row(batches: Batches) -> list[Any]:
    """The tokens of each row, or the bytes of each image: what tells rows apart."""
    rows: list[Any] = []
    for batch in batches:
        if PIXELS in batch.inputs:
            rows += [image.cpu().contiguous().view(torch.uint8).numpy().tobytes() for image in batch.inputs[PIXELS]]
            continue
        ids = batch.inputs[TOKENS]
        mask = batch.inputs.get("attention_mask", torch.ones_like(ids)).bool()
        rows += [tuple(row[real].tolist()) for row, real in zip(ids, mask, strict=True)]
    return rows


def _ready_labels(batches: Batches) -> list[Any]:
    if any(batch.labels is None for batch in batches):
        raise DataError("Measuring quality requires labels, but the evaluation batches have none.")
    labels = [label for batch in batches if batch.labels is not None for label in batch.labels.tolist()]
    return [tuple(label) if isinstance(label, list) else label for label in labels]
