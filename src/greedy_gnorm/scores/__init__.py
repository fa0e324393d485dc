"""How important each unit is: each file holds one idea, registered by name.

Scores never remove anything, and know nothing about rules, runs or files.
"""

# ruff: noqa: I001  (imported in the order of registration, the paper's score first)
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
