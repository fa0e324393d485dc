"""Dividing data into the rows that a run uses: for scoring, calibration, choosing a step and the final test."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.encoding import encode, longest_input
from greedy_gnorm.data.loading import RowTask, is_ready, labelled_splits, needs_row_labels, read_rows, ready_sets
from greedy_gnorm.data.rows import Row
from greedy_gnorm.data.sources import WHOLE, Splits, read_splits
from greedy_gnorm.data.splits import sampled, split_rows, warn_of_overlap
from greedy_gnorm.settings import Settings

log = logging.getLogger("greedy_gnorm")

SCORING, CALIBRATION, EVALUATION, TEST = "scoring", "calibration", "evaluation", "test"
"""Units are ranked on the first, maps fitted on the second, a step chosen on the third and reported on the last."""

HELD_OUT = 1000
"""The most rows that are taken from other rows to choose a step on, or to test on."""
LITTLE = 100
"""A table with fewer texts than this is divided in two: a step is chosen and reported on the same rows."""


def run_batches(
    model: nn.Module,
    tokenizer: Any,
    task: RowTask,
    data: Any,
    eval_data: Any,
    settings: Settings,
    *,
    needs_labels: bool,
    calibrated: bool,
) -> dict[str, Batches]:
    """The rows of a run by use; no text has two uses, except that calibration and scoring rows come from one pool.

    `needs_labels` says whether scores use labels, `calibrated` whether layers are fitted. Ready batches, and
    tables of few rows, have no test rows of their own.
    """
    if is_ready(data) or is_ready(eval_data):
        scoring, evaluation = ready_sets(task, data, eval_data, settings)
        return {SCORING: scoring, EVALUATION: evaluation, **({CALIBRATION: scoring} if calibrated else {})}
    pool, choosing, test = divided_rows(task, tokenizer, data, eval_data, settings, needs_labels=needs_labels)
    sets = {SCORING: encode(sampled(pool, settings.samples, settings.seed), model, tokenizer, task, settings)}
    if calibrated:
        sets[CALIBRATION] = calibration_batches(pool, model, tokenizer, task, settings)
    for use, rows in ((EVALUATION, choosing), (TEST, test)):
        if rows is not None:
            sets[use] = encode(rows, model, tokenizer, task, settings, use)
            if needs_row_labels(task, settings):
                task.check_labels([row.label for row in rows])
    return sets


def calibration_batches(
    pool: Sequence[Row], model: nn.Module, tokenizer: Any, task: RowTask, settings: Settings
) -> Batches:
    """As many of these rows as have the tokens that calibration takes, in a seeded order."""
    order = np.random.default_rng(settings.seed).permutation(len(pool)).tolist()
    rows = [pool[place] for place in order[: settings.calibration_tokens]]  # a row has at least one token
    ends = np.cumsum(task.token_counts(rows, tokenizer, longest_input(model, tokenizer), settings))
    count = min(int(np.searchsorted(ends, settings.calibration_tokens)) + 1, len(rows))
    log.info("calibration: %d rows, %d tokens", count, ends[count - 1])
    return encode(rows[:count], model, tokenizer, task, settings, CALIBRATION)


def divided_rows(
    task: RowTask, tokenizer: Any, data: Any, eval_data: Any, settings: Settings, *, needs_labels: bool
) -> tuple[list[Row], list[Row], list[Row] | None]:
    """Rows to score and calibrate on, to choose a step on, and to test on.

    These are the training, validation and test splits where the data has them. If there is only one of the latter two,
    it serves both uses, a part of its rows each: a model knows its training rows too well. A single table is divided in
    three, or in two if it is small.
    """
    pool, validation, test = _splits_by_use(task, tokenizer, data, eval_data, settings, needs_labels=needs_labels)
    if validation is None and test is None:
        if (texts := len({row.words for row in pool})) < LITTLE:
            pool, validation = split_rows(pool, settings.samples, settings.seed)
            warnings.warn(
                f"There are only {texts} different rows, so the step is chosen and its quality reported on the same "
                f"{len(validation)} rows: the report may be too good. Give {LITTLE} or more.",
                stacklevel=3,
            )
        else:
            pool, test = _held_out(pool, settings.seed + 1, TEST)
            pool, validation = _held_out(pool, settings.seed, EVALUATION)
    elif validation is None and test is not None:
        labelled = not needs_row_labels(task, settings) or all(row.label is not None for row in pool)
        if eval_data is not None and labelled:
            pool, validation = _held_out(pool, settings.seed, EVALUATION)
        else:
            test, validation = _held_out(test, settings.seed, EVALUATION, share=2)
    elif validation is not None and test is None:
        validation, test = _held_out(validation, settings.seed, TEST, share=2)
    assert validation is not None
    pool = _without_texts(pool, [*validation, *(test or [])])
    validation = sampled(validation, settings.eval_samples, settings.seed)
    test = None if test is None else sampled(test, settings.eval_samples, settings.seed)
    _log_counts({SCORING: _scored(pool, settings), EVALUATION: validation, TEST: test})
    return pool, validation, test


def compared_rows(
    task: RowTask, tokenizer: Any, data: Any, eval_data: Any, settings: Settings, *, needs_labels: bool
) -> tuple[list[Row], list[Row]]:
    """Rows to draw scoring samples and calibration rows from, and test rows: no step is chosen on other rows."""
    pool, validation, test = _splits_by_use(task, tokenizer, data, eval_data, settings, needs_labels=needs_labels)
    if test is None and validation is None:
        pool, test = _held_out(pool, settings.seed + 1, TEST)
    rows = validation if test is None else test
    assert rows is not None
    pool = _without_texts(pool, rows)
    rows = sampled(rows, settings.eval_samples, settings.seed)
    _log_counts({SCORING: _scored(pool, settings), EVALUATION: rows})
    return pool, rows


def _splits_by_use(
    task: RowTask, tokenizer: Any, data: Any, eval_data: Any, settings: Settings, *, needs_labels: bool
) -> tuple[list[Row], list[Row] | None, list[Row] | None]:
    """The rows of the splits that the data has, for training, validation and test; the first always exists."""
    needed = needs_row_labels(task, settings)
    splits = read_splits(data)
    if needed:
        splits = {name: splits[name] for name in splits if name == "train" and not needs_labels} | labelled_splits(
            splits, task.format, settings
        )
    tests = None if eval_data is None else read_splits(eval_data)
    for_all = needs_labels or (len(splits) == 1 and tests is None)
    wanted: list[tuple[Splits, str, bool]] = [
        (splits, name, needed and (for_all or name in ("validation", "test"))) for name in splits
    ]
    if tests is not None:
        name = next(each for each in ("test", "validation", WHOLE, "train") if each in tests)
        wanted.append((tests, name, needed))
    tables = read_rows(wanted, task, tokenizer, settings)
    named = dict(zip(splits, tables, strict=False))
    test = tables[-1] if tests is not None else named.get("test")
    pools = (name for name in ("train", WHOLE, "validation", "test") if name in named)
    first = next(pools)
    validation = named.get("validation") if first != "validation" else None
    return named[first], validation, None if first == "test" and tests is None else test


def _scored(pool: list[Row], settings: Settings) -> list[Row]:
    return pool[: settings.samples] if settings.samples else pool


def _log_counts(sets: Mapping[str, Sequence[Row] | None]) -> None:
    words = {
        SCORING: "scoring",
        EVALUATION: "choosing a step" if TEST in sets else "evaluation",
        TEST: "the final test",
    }
    for use, rows in sets.items():
        if rows is not None:
            log.info("%s: %d rows", words[use], len(rows))


def _held_out(rows: list[Row], seed: int, use: str, share: int = 4) -> tuple[list[Row], list[Row]]:
    """Rows without a part of them, at most HELD_OUT, and that part, which has another use."""
    held, rest = split_rows(rows, min(max(len(rows) // share, 1), HELD_OUT), seed)
    log.info("%d rows are held out for %s", len(held), "the final test" if use == TEST else "choosing a step")
    return rest, held


def _without_texts(rows: list[Row], others: Sequence[Row]) -> list[Row]:
    """The rows whose text is not among the others."""
    texts = {row.source for row in others}
    kept = [row for row in rows if row.source not in texts]
    if not kept:
        warn_of_overlap([row.source for row in rows], [row.source for row in others])
        return rows
    if len(kept) < len(rows):
        log.info("%d rows are left out: their texts are also evaluation or test rows", len(rows) - len(kept))
    return kept


FEW = 100
"""Fewer evaluation rows than this say little: the interval of a share is then up to 20 points wide."""


def warn_of_few_rows(rows: int, word: str = "evaluation") -> None:
    """Warn if quality is measured on so few rows that a difference of some points is noise."""
    if rows < FEW:
        warnings.warn(
            f"Only {rows} {word} rows: a difference of some points is noise. Give {FEW} or more.",
            stacklevel=3,
        )


TOKENS_PER_CHANNEL = 10
"""Fewer calibration tokens than this for each input of an output map fit noise."""


def warn_of_few_tokens(calibration: Batches, widest: int, settings: Settings) -> None:
    """Warn if the calibration rows have too few tokens for the widest output map."""
    tokens, enough = sum(calibration.lengths()), TOKENS_PER_CHANNEL * widest
    if tokens < enough:
        advice = "Give more rows" + ("." if settings.labels == "own" else "; they need no labels with --labels own.")
        if tokens >= settings.calibration_tokens:
            advice = f"Use more of the rows: --calibration-tokens {enough}."
        warnings.warn(
            f"The calibration rows have {tokens:,} tokens; {enough:,} or more are advisable for maps with {widest:,} "
            f"inputs. {advice}",
            stacklevel=3,
        )
