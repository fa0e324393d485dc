"""Rows divided into those to score on and those to evaluate on: seeded, stratified, without overlap."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from greedy_gnorm.data.rows import Row
from greedy_gnorm.errors import DataError


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


def warn_of_overlap(scoring: Sequence[Any], evaluation: Sequence[Any]) -> None:
    """Warn of rows (their texts or their tokens) that are on both sides, with their number."""
    seen = set(evaluation)
    shared = sum(row in seen for row in scoring)
    if shared:
        warnings.warn(
            f"{shared} of {len(scoring)} scoring rows are evaluation rows too: the quality is measured partly on the "
            f"rows that the heads were chosen by.",
            stacklevel=3,
        )
