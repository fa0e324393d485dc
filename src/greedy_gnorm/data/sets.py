"""Dividing data into the rows that a compression uses: for scoring, calibration, choosing and the final test."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.encoding import encode, token_counts
from greedy_gnorm.data.loading import LabelTask, both_rows, is_ready, labelled_splits, read_rows
from greedy_gnorm.data.rows import Row
from greedy_gnorm.data.sources import WHOLE, Splits, read_splits
from greedy_gnorm.data.splits import sampled, split_rows
from greedy_gnorm.errors import DataError
from greedy_gnorm.settings import Settings

log = logging.getLogger("greedy_gnorm")

SCORING, CALIBRATION, EVALUATION, TEST = "scoring", "calibration", "evaluation", "test"
"""Units are ranked on the first, maps fitted on the second, a step chosen on the third and reported on the last."""

HELD_OUT = 1000
"""The most rows that are taken from the training rows to choose a step on."""


def divided_batches(
    model: nn.Module, tokenizer: Any, task: LabelTask, data: Any, eval_data: Any, settings: Settings
) -> dict[str, Batches]:
    """Batches of the four sets of rows; no text is in two of them, except that scoring rows may serve calibration."""
    if is_ready(data) or is_ready(eval_data):
        raise DataError("Compression divides the rows itself: give rows of text, not ready batches.")
    pool, evaluation, test = divided_rows(task, data, eval_data, settings)
    scoring = sampled(pool, settings.samples, settings.seed)
    sets = {
        SCORING: encode(scoring, model, tokenizer, settings),
        CALIBRATION: calibration_batches(pool, model, tokenizer, settings),
        EVALUATION: encode(evaluation, model, tokenizer, settings, EVALUATION),
        TEST: encode(test, model, tokenizer, settings, TEST),
    }
    if settings.labels == "data":
        for rows in (evaluation, test):
            task.check_labels([row.label for row in rows])
    return sets


def calibration_batches(pool: Sequence[Row], model: nn.Module, tokenizer: Any, settings: Settings) -> Batches:
    """As many of these rows as have the tokens that calibration takes, in a seeded order."""
    order = np.random.default_rng(settings.seed).permutation(len(pool)).tolist()
    rows = [pool[place] for place in order[: settings.calibration_tokens]]  # a row has at least one token
    ends = np.cumsum(token_counts(rows, model, tokenizer))
    count = min(int(np.searchsorted(ends, settings.calibration_tokens)) + 1, len(rows))
    log.info("calibration: %d rows, %d tokens", count, ends[count - 1])
    return encode(rows[:count], model, tokenizer, settings, CALIBRATION)


def calibration_pool(task: LabelTask, data: Any, eval_data: Any, settings: Settings) -> list[Row]:
    """Rows to calibrate a pruning on: the training split if there is one, else those that scoring draws from."""
    splits = read_splits(data)
    if "train" in splits and (eval_data is not None or len(splits) > 1):
        (rows,) = read_rows([(splits, "train", False)], task, settings)
        return rows
    rows, _ = both_rows(task, data, eval_data, settings, needs_labels=False)
    return rows


def divided_rows(
    task: LabelTask, data: Any, eval_data: Any, settings: Settings
) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows to score and calibrate on, to choose a step on, and to test on.

    These are the training, validation and test splits where the data has them. A missing one is a seeded, stratified
    part of another; a single table is divided in three.
    """
    needed = settings.labels == "data"
    splits = read_splits(data)
    splits = labelled_splits(splits, settings) if needed else splits
    tests = None if eval_data is None else read_splits(eval_data)
    wanted: list[tuple[Splits, str, bool]] = [(splits, name, needed) for name in splits]
    if tests is not None:
        name = next(each for each in ("test", "validation", WHOLE, "train") if each in tests)
        wanted.append((tests, name, needed))
    tables = read_rows(wanted, task, settings)
    named = dict(zip(splits, tables, strict=False))
    whole = named.pop(WHOLE, None)
    test = tables[-1] if tests is not None else named.pop("test", None)
    validation = named.pop("validation", None)
    pool = named.pop("train", None)
    if pool is None:
        pool = whole if whole is not None else validation if validation is not None else test
        validation = None if pool is validation else validation
        test = None if pool is test and tests is None else test
    assert pool is not None
    if test is None:
        pool, test = _held_out(pool, settings, TEST)
    if validation is None:
        pool, validation = _held_out(pool, settings, EVALUATION)
    pool = _without_texts(pool, [*validation, *test])
    if not pool:
        raise DataError("All rows to score on are also evaluation rows: give rows with other texts.")
    validation, test = (sampled(rows, settings.eval_samples, settings.seed) for rows in (validation, test))
    counts = {SCORING: min(settings.samples or len(pool), len(pool)), EVALUATION: len(validation), TEST: len(test)}
    for name, count in counts.items():
        log.info("%s: %d rows", {EVALUATION: "choosing a step", TEST: "the final test"}.get(name, name), count)
    return pool, validation, test


def _held_out(rows: list[Row], settings: Settings, what: str) -> tuple[list[Row], list[Row]]:
    """A quarter of the rows, at most HELD_OUT, taken out of them for another use."""
    held, rest = split_rows(rows, min(max(len(rows) // 4, 1), HELD_OUT), settings.seed + (what == TEST))
    log.info("%d rows are held out for %s", len(held), "the final test" if what == TEST else "choosing a step")
    return rest, held


def _without_texts(rows: list[Row], others: Sequence[Row]) -> list[Row]:
    """The rows whose text is not among the others."""
    texts = {row.words for row in others}
    kept = [row for row in rows if row.words not in texts]
    if len(kept) < len(rows):
        log.info("%d rows are left out: their texts are also evaluation or test rows", len(rows) - len(kept))
    return kept


TOKENS_PER_CHANNEL = 10
"""Fewer calibration tokens than this for each input of an output map fit noise."""


def warn_of_few_tokens(calibration: Batches, widest: int) -> None:
    """Warn if the calibration rows have too few tokens for the widest output map."""
    tokens = sum(calibration.lengths().values())
    if tokens < TOKENS_PER_CHANNEL * widest:
        warnings.warn(
            f"The calibration rows have {tokens:,} tokens; {TOKENS_PER_CHANNEL * widest:,} or more are advisable for "
            f"maps with {widest:,} inputs. Give more rows; they need no labels with --labels own.",
            stacklevel=3,
        )
