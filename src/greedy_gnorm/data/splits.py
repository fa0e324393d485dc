"""Splitting rows into scoring and evaluation rows: seeded, stratified, without overlap."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from greedy_gnorm.data.rows import Row
from greedy_gnorm.errors import DataError


def stratified(labels: Sequence[Any], count: int, seed: int) -> list[int]:
    """Draw `count` places so that every label keeps its share; ascending, and the same for the same seed."""
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
    """The classes by which to stratify; rows with a number or several labels have none."""
    return [row.label if isinstance(row.label, int) else None for row in rows]


def sampled(rows: list[Row], count: int | None, seed: int) -> list[Row]:
    """A seeded, stratified sample of at most `count` rows; all rows if it is None."""
    if count is None or count >= len(rows):
        return rows
    return [rows[place] for place in stratified(_strata(rows), count, seed)]


def split_rows(rows: list[Row], count: int | None, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows into `count` scoring rows (at most half of the texts) and evaluation rows; no text is in both.

    Where several rows have one source, all of them go to the same side, and there are about `count` scoring rows.
    """
    unique = list({row.words: row for row in reversed(rows)}.values())[::-1]
    sources = list({row.source: row for row in reversed(unique)}.values())[::-1]
    if len(sources) < 2:
        raise DataError(
            "All rows have the same text, or are about the same article, and can't be split for evaluation: give "
            "eval_data."
        )
    half = len(sources) // 2
    wanted = half if count is None else min(max(round(count * len(sources) / len(unique)), 1), half)
    taken = {row.source for row in sampled(sources, wanted, seed)}
    return [row for row in unique if row.source in taken], [row for row in rows if row.source not in taken]


def warn_of_overlap(scoring: Sequence[Any], evaluation: Sequence[Any]) -> None:
    """Warn about rows (texts or tokens) that are used both for scoring and for evaluation."""
    evaluated = set(evaluation)
    shared = sum(row in evaluated for row in scoring)
    if shared:
        warnings.warn(
            f"{shared} of {len(scoring)} scoring rows are also evaluation rows: quality is partly measured on the rows "
            f"that heads were chosen on.",
            stacklevel=3,
        )
