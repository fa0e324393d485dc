"""How important each unit is: each file holds one idea, registered by name.

Scores never remove anything, and know nothing about rules, runs or files. They can be listed and checked without torch,
which takes seconds to load: each of them imports what it computes with when it is called.
"""

# ruff: noqa: I001  (imported in the order of registration, the paper's score first)
from greedy_gnorm.scores import gnorm, entropy, taylor, joint, attribution, removal, output, reconstruction, baselines
from greedy_gnorm.scores.registry import SCORES, Score, ScoreFunction, score, score_with

__all__ = [
    "SCORES",
    "Score",
    "ScoreFunction",
    "attribution",
    "baselines",
    "entropy",
    "gnorm",
    "joint",
    "output",
    "reconstruction",
    "removal",
    "score",
    "score_with",
    "taylor",
]
