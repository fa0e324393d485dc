"""What a classification head predicts: one label, several, or a number; and which quality speaks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from greedy_gnorm.errors import UnsupportedModel
from greedy_gnorm.registry import Registry


@dataclass(frozen=True)
class Problem:
    """A kind of task; `quality` is the measure (higher is better) that the rules and the curve follow."""

    name: str
    quality: str


PROBLEMS: Registry[Problem] = Registry("problem type")
for _problem in (
    Problem("single_label_classification", "accuracy"),
    Problem("multi_label_classification", "micro_f1"),
    Problem("regression", "r2"),
):
    PROBLEMS.add(_problem.name, _problem)


def problem_of(model: nn.Module) -> Problem:
    """The problem that the model's configuration names, else the one its number of labels implies."""
    config: Any = model.config
    if config.problem_type is None:
        return PROBLEMS["regression" if config.num_labels == 1 else "single_label_classification"]
    if config.problem_type == "regression" and config.num_labels > 1:
        raise UnsupportedModel(f"The model is a regression with {config.num_labels} outputs; one output is supported.")
    if config.problem_type not in PROBLEMS:
        raise UnsupportedModel(
            f"The model's problem_type is {config.problem_type!r}; supported are: {', '.join(PROBLEMS)}."
        )
    return PROBLEMS[config.problem_type]
