"""Head-importance scores, by name."""

from greedy_gnorm.scores import baselines, gnorm
from greedy_gnorm.scores.registry import SCORES, Score, ScoreFunction, score

__all__ = ["SCORES", "Score", "ScoreFunction", "baselines", "gnorm", "score"]
