"""Prune attention heads from Hugging Face transformer models: Greedy-Gnorm, exact and fast."""

from greedy_gnorm.checkpoint import load
from greedy_gnorm.errors import DataError, GnormError, NonFiniteScore, RunFolderError, UnsupportedModel
from greedy_gnorm.heads import Head, HeadScores, Step
from greedy_gnorm.outcome import Run
from greedy_gnorm.run import prune, score
from greedy_gnorm.sites import find_sites
from greedy_gnorm.surgery import remove_heads

__all__ = [
    "DataError",
    "GnormError",
    "Head",
    "HeadScores",
    "NonFiniteScore",
    "Run",
    "RunFolderError",
    "Step",
    "UnsupportedModel",
    "find_sites",
    "load",
    "prune",
    "remove_heads",
    "score",
]
