"""How important each unit is: one idea a file, by name.

Scores never cut, and know nothing of rules, runs or files.
"""

# ruff: noqa: I001  (the order of registration: the paper's own first)
from greedy_gnorm.scores import gnorm
from greedy_gnorm.scores import entropy
from greedy_gnorm.scores import taylor
from greedy_gnorm.scores import attribution
from greedy_gnorm.scores import removal
from greedy_gnorm.scores import baselines
from greedy_gnorm.scores.registry import SCORES
from greedy_gnorm.scores.registry import Score
from greedy_gnorm.scores.registry import ScoreFunction
from greedy_gnorm.scores.registry import score
from greedy_gnorm.scores.registry import score_with

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
