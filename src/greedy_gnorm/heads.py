"""The nouns of a run: which heads there are, what they scored, what each step did. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


class Head(NamedTuple):
    """One attention head; `index` counts in the original, unpruned model."""

    site: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def __str__(self) -> str:
        return f"{self.site}.{self.index}"


@dataclass(frozen=True)
class HeadScores:
    """A score per head, (sites, heads), NaN where the head is gone (the paper's expanded matrix).

    `logs` orders the heads where it is given: a product of small norms can underflow, its logarithm can't.
    `parts` are the matrices that the score was made of, such as the norms of the Q, K and V gradients.
    """

    values: Matrix
    logs: Matrix | None = None
    parts: Mapping[str, Matrix] = field(default_factory=dict)

    @property
    def keys(self) -> Matrix:
        """What heads are ordered by, (sites, heads)."""
        return self.values if self.logs is None else self.logs

    def heads(self) -> list[Head]:
        """The heads that have a score, by (site, head)."""
        return [Head(int(site), int(index)) for site, index in np.argwhere(~np.isnan(self.values))]

    def order(self, *, highest_first: bool = False) -> list[Head]:
        """The scored heads, first to be removed first; ties go by (site, head)."""
        sign = -1.0 if highest_first else 1.0
        return sorted(self.heads(), key=lambda head: (sign * float(self.keys[head]), head))

    def without(self, heads: Iterable[Head]) -> HeadScores:
        """The same scores with these heads marked as gone."""
        gone = tuple(zip(*heads, strict=True))

        def marked(matrix: Matrix) -> Matrix:
            matrix = matrix.copy()
            if gone:
                matrix[gone] = np.nan
            return matrix

        logs = None if self.logs is None else marked(self.logs)
        return HeadScores(marked(self.values), logs, {name: marked(part) for name, part in self.parts.items()})


@dataclass(frozen=True)
class Step:
    """One turn of the loop: what was scored, what was removed for it, the quality and the size after it.

    `stop` is the reason for ending the run, on the last step only.
    """

    step: int
    removed: tuple[Head, ...]
    scores: HeadScores | None
    quality: Mapping[str, float]
    parameters: int
    bytes: int
    seconds: Mapping[str, float]
    stop: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The step as one line of the journal."""
        line: dict[str, Any] = {
            "step": self.step,
            "removed": [list(head) for head in self.removed],
            "scores": None if self.scores is None else matrix_to_json(self.scores.values),
            "quality": {name: number_to_json(value) for name, value in self.quality.items()},
            "parameters": self.parameters,
            "bytes": self.bytes,
            "seconds": dict(self.seconds),
            "stop": self.stop,
        }
        if self.scores is not None and self.scores.logs is not None:
            line["log_scores"] = matrix_to_json(self.scores.logs)
        return line

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Step:
        """The step that `to_json` wrote; KeyError, TypeError or ValueError where it is not one."""
        scores = None
        if line["scores"] is not None:
            logs = matrix_from_json(line["log_scores"]) if "log_scores" in line else None
            scores = HeadScores(matrix_from_json(line["scores"]), logs)
        return cls(
            step=int(line["step"]),
            removed=tuple(Head(int(site), int(index)) for site, index in line["removed"]),
            scores=scores,
            quality={name: number_from_json(value) for name, value in line["quality"].items()},
            parameters=int(line["parameters"]),
            bytes=int(line["bytes"]),
            seconds=dict(line["seconds"]),
            stop=line["stop"],
        )


def removed_by(steps: Iterable[Step]) -> list[Head]:
    """All heads that these steps removed, in the order they went."""
    return [head for step in steps for head in step.removed]


def by_site(heads: Iterable[Head]) -> dict[int, list[int]]:
    """Head numbers by site, both ascending: the form of `pruned_heads` in a configuration."""
    groups: dict[int, list[int]] = {}
    for head in sorted(heads):
        groups.setdefault(head.site, []).append(head.index)
    return groups


def number_to_json(value: float) -> float | str | None:
    """JSON has no NaN and no infinity: null and a word stand for them."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def number_from_json(value: float | str | None) -> float:
    """The number that `number_to_json` wrote."""
    return math.nan if value is None else float(value)


def matrix_to_json(matrix: Matrix) -> list[list[float | str | None]]:
    """A matrix as nested lists, exact to the last bit."""
    return [[number_to_json(value) for value in row] for row in matrix.tolist()]


def matrix_from_json(rows: list[list[float | str | None]]) -> Matrix:
    """The matrix that `matrix_to_json` wrote."""
    return np.array([[number_from_json(value) for value in row] for row in rows], dtype=np.float64)
