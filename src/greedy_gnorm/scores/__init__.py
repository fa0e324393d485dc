"""Head-importance scores, by name."""

# ruff: noqa: I001  (the order of registration: the paper's own first)
from greedy_gnorm.scores import gnorm, entropy, taylor, attribution, removal, baselines
from greedy_gnorm.scores.registry import SCORES, Score, ScoreFunction, score, score_with

__all__ = [
    "SCORES",
    "Score",
    "ScoreFunction",
    "attribution",
    "baselines",
    "entropy",
    "gnorm",
    "removal",
    "score",
    "score_with",
    "taylor",
]
