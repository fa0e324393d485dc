"""Rows for scoring and rows for evaluation: columns, labels, division, samples, batches."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch import nn

from greedy_gnorm.batches import Batches, ready_batches
from greedy_gnorm.config import Settings
from greedy_gnorm.encoding import Row, encode
from greedy_gnorm.errors import DataError
from greedy_gnorm.labels import Label, parse_label_map, to_model_labels
from greedy_gnorm.problems import problem_of
from greedy_gnorm.sources import WHOLE, Tables, read_tables

log = logging.getLogger("greedy_gnorm")

PAIRS = (
    ("text", "text_pair"),
    ("text", "text2"),
    ("text1", "text2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
)
TEXTS = (
    "text",
    "sentence",
    "content",
    "review",
    "tweet",
    "document",
    "headline",
    "title",
    "premise",
    "question",
    "query",
)
LABELS = ("label", "labels", "gold_label", "class", "target", "category", "sentiment", "emotion", "intent", "score")


def scoring_batches(
    model: nn.Module, tokenizer: Any, data: Any, settings: Settings, *, needs_labels: bool = False
) -> Batches:
    """Batches for a score alone: the validation rows where there is such a split, else the training rows, else all."""
    if is_ready(data):
        return ready_batches(data, seed=settings.seed)
    tables = read_tables(data)
    split = _first(tables, "validation", "train", WHOLE, "test")
    rows = sampled(_rows(tables, split, model, settings, needs_labels), settings.samples, settings.seed)
    log.info("scoring: %d rows of %s", len(rows), split)
    return encode(rows, model, tokenizer, settings)


def both_batches(
    model: nn.Module, tokenizer: Any, data: Any, eval_data: Any, settings: Settings, *, needs_labels: bool
) -> tuple[Batches, Batches]:
    """Batches for scoring and for evaluation, of different rows unless the caller gives the same ones."""
    if is_ready(data) or is_ready(eval_data):
        if not is_ready(data) or not is_ready(eval_data):
            raise DataError("Ready batches can't be divided: give ready batches as data and as eval_data.")
        scoring, evaluation = (ready_batches(each, seed=settings.seed) for each in (data, eval_data))
        check_labels(_ready_labels(evaluation), problem_of(model).name)
        warn_of_overlap(_token_rows(scoring), _token_rows(evaluation))
        return scoring, evaluation
    pool, rows = both_rows(model, data, eval_data, settings, needs_labels=needs_labels)
    sample = sampled(pool, settings.samples, settings.seed)
    warn_of_overlap([row.words for row in sample], [row.words for row in rows])
    return (
        encode(sample, model, tokenizer, settings),
        encode(rows, model, tokenizer, settings, "evaluation"),
    )


def both_rows(
    model: nn.Module, data: Any, eval_data: Any, settings: Settings, *, needs_labels: bool, draws: int = 1
) -> tuple[list[Row], list[Row]]:
    """Rows to draw scoring samples from, enough for so many draws, and the evaluation rows."""
    tables = read_tables(data)
    if eval_data is not None:
        eval_tables = read_tables(eval_data)
        scoring_split = _first(tables, "validation", "train", WHOLE, "test")
        evaluation_split = _first(eval_tables, "test", "validation", WHOLE, "train")
        scoring = _rows(tables, scoring_split, model, settings, needs_labels)
        evaluation = _rows(eval_tables, evaluation_split, model, settings, True)
    elif len(tables := _labelled(tables, settings)) == 1:
        scoring_split = evaluation_split = next(iter(tables))
        rows = _rows(tables, scoring_split, model, settings, True)
        scoring, evaluation = divided(rows, settings.samples and draws * settings.samples, settings.seed)
    else:
        evaluation_split = _first(tables, "test", "validation", "train")
        others = {name: table for name, table in tables.items() if name != evaluation_split}
        scoring_split = _first(others, "validation", "train")
        scoring = _rows(tables, scoring_split, model, settings, needs_labels)
        evaluation = _rows(tables, evaluation_split, model, settings, True)
    evaluation = sampled(evaluation, settings.eval_samples, settings.seed)
    check_labels([row.label for row in evaluation], problem_of(model).name)
    count = len(scoring) if settings.samples is None else min(len(scoring), settings.samples)
    log.info("scoring: %d rows of %s", count, scoring_split)
    log.info("evaluation: %d rows of %s", len(evaluation), evaluation_split)
    return scoring, evaluation


def is_ready(data: Any) -> bool:
    """Whether the caller gave batches (dicts with input_ids) rather than rows."""
    return isinstance(data, list | tuple) and bool(data) and all(hasattr(b, "keys") and "input_ids" in b for b in data)


def _first(tables: Tables, *names: str) -> str:
    return next((name for name in names if name in tables), next(iter(tables)))


def _labelled(tables: Tables, settings: Settings) -> Tables:
    """The splits whose labels are there: some data sets leave out those of their test split, or write -1."""
    if len(tables) == 1:
        return tables
    labelled = {}
    for name, table in tables.items():
        column = settings.label or next((usual for usual in LABELS if usual in table.column_names), None)
        if column not in table.column_names or all(value == -1 or _is_missing(value) for value in table[column]):
            log.info("the %s split has no labels; it is left out", name)
        else:
            labelled[name] = table
    return labelled or tables


class Columns(NamedTuple):
    text: str
    pair: str | None
    label: str | None


def find_columns(table: datasets.Dataset, settings: Settings) -> Columns:
    """The columns the user named, else those with a usual name."""
    there = list(table.column_names)
    for option, name in (("--text", settings.text), ("--text-pair", settings.text_pair), ("--label", settings.label)):
        if name is not None and name not in there:
            raise DataError(f"There is no column {name!r} ({option}). Columns: {', '.join(there)}.")
    label = settings.label or next((name for name in LABELS if name in there), None)
    if settings.text is not None:
        return Columns(settings.text, settings.text_pair, label)
    text, pair = next((both for both in PAIRS if set(both) <= set(there)), (None, None))
    text = text or next((name for name in TEXTS if name in there), None)
    if text is None:
        raise DataError(f"Which column is the text? Name it with --text. Columns: {', '.join(there)}.")
    return Columns(text, settings.text_pair or pair, label)


def _rows(tables: Tables, split: str, model: nn.Module, settings: Settings, needs_labels: bool) -> list[Row]:
    """The rows of a split, their texts checked and their labels mapped."""
    table = tables[split]
    columns = find_columns(table, settings)
    if columns.label is None and needs_labels:
        raise DataError(f"Which column is the label? Name it with --label. Columns: {', '.join(table.column_names)}.")
    texts = _texts(table, columns.text)
    pairs: Sequence[str | None] = [None] * len(texts) if columns.pair is None else _texts(table, columns.pair)
    labels: Sequence[Label | None] = [None] * len(texts)
    if columns.label is not None:
        try:
            labels = _labels(table, columns.label, split, model, settings)
        except DataError as error:
            if needs_labels:
                raise
            log.info("the labels of the scoring rows are not used: %s", error)
    return [Row(*row) for row in zip(texts, pairs, labels, strict=True)]


def _labels(table: datasets.Dataset, column: str, split: str, model: nn.Module, settings: Settings) -> list[Label]:
    values = list(table[column])
    missing = [row for row, value in enumerate(values) if _is_missing(value)]
    if missing:
        raise DataError(f"{len(missing)} rows of {split} have no {column!r}: {_numbers(missing)}.")
    feature = table.features[column]
    names = getattr(getattr(feature, "feature", feature), "names", None)  # of a list of classes, or of a class
    label_map = parse_label_map(settings.label_map)
    return to_model_labels(values, names, model.config, problem_of(model).name, label_map)


def _texts(table: datasets.Dataset, column: str) -> list[str]:
    values = list(table[column])
    missing = [row for row, value in enumerate(values) if _is_missing(value)]
    if missing:
        raise DataError(f"{len(missing)} rows have no text in {column!r} (empty or NaN): {_numbers(missing)}.")
    odd = [row for row, value in enumerate(values) if not isinstance(value, str)]
    if odd:
        raise DataError(f"Column {column!r} holds {type(values[odd[0]]).__name__}, not text, in {_numbers(odd)}.")
    return values


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def _numbers(rows: Sequence[int], most: int = 5) -> str:
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:most]))}{more} (counted from 0)"


def stratified(labels: Sequence[Any], count: int, seed: int) -> list[int]:
    """`count` places drawn so that every label keeps its share, ascending; the same for the same seed."""
    random = np.random.default_rng(seed)
    groups: dict[Any, list[int]] = {}
    for place, label in enumerate(labels):
        groups.setdefault(label, []).append(place)
    exact = {label: len(places) * count / len(labels) for label, places in groups.items()}
    shares = {label: int(share) for label, share in exact.items()}
    by_remainder = sorted(groups, key=lambda label: (shares[label] - exact[label], groups[label][0]))
    for label in by_remainder[: count - sum(shares.values())]:
        shares[label] += 1
    return sorted(
        int(place) for label, places in groups.items() for place in random.permutation(places)[: shares[label]]
    )


def _strata(rows: Sequence[Row]) -> list[Any]:
    """What a sample is stratified by: classes; a number or a set of labels has none."""
    return [row.label if isinstance(row.label, int) else None for row in rows]


def sampled(rows: list[Row], count: int | None, seed: int) -> list[Row]:
    """At most `count` rows, seeded and stratified; all where it is None."""
    if count is None or count >= len(rows):
        return rows
    return [rows[place] for place in stratified(_strata(rows), count, seed)]


def divided(rows: list[Row], count: int | None, seed: int) -> tuple[list[Row], list[Row]]:
    """`count` scoring rows (half of the texts at the most) and the rest for evaluation; no text is in both."""
    unique = list({row.words: row for row in reversed(rows)}.values())[::-1]
    if len(unique) < 2:
        raise DataError(
            f"{len(unique)} different text can't be divided into scoring and evaluation rows: give eval_data."
        )
    half = len(unique) // 2
    scoring = sampled(unique, half if count is None else min(count, half), seed)
    taken = {row.words for row in scoring}
    return scoring, [row for row in rows if row.words not in taken]


def check_labels(labels: Sequence[Any], problem: str) -> None:
    """Refuse evaluation rows on which quality can't be told."""
    if len(set(labels)) < 2:
        raise DataError(
            f"All {len(labels)} evaluation rows have the same label, on which no quality can be told "
            f"({problem}). Give rows of at least two."
        )


def warn_of_overlap(scoring: Sequence[Any], evaluation: Sequence[Any]) -> None:
    """Say how many of the rows (their texts or their tokens) are on both sides."""
    seen = set(evaluation)
    shared = sum(row in seen for row in scoring)
    if shared:
        warnings.warn(
            f"{shared} of {len(scoring)} scoring rows are evaluation rows too: the quality is measured partly on what "
            f"the heads were chosen by.",
            stacklevel=3,
        )


def _token_rows(batches: Batches) -> list[tuple[int, ...]]:
    rows = []
    for batch in batches:
        ids = batch.inputs["input_ids"]
        mask = batch.inputs.get("attention_mask", torch.ones_like(ids)).bool()
        rows += [tuple(row[real].tolist()) for row, real in zip(ids, mask, strict=True)]
    return rows


def _ready_labels(batches: Batches) -> list[Any]:
    if any(batch.labels is None for batch in batches):
        raise DataError("Quality needs labels, and these evaluation batches have none.")
    return [str(label) for batch in batches if batch.labels is not None for label in batch.labels.tolist()]
