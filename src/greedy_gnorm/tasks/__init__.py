"""What a model predicts: labels, loss and measures of each task, and the objectives that scores differentiate.

Nothing in here runs passes over the data, ranks units or removes them.
"""

from greedy_gnorm.tasks import answers, choices, classification, embeddings, images, language, tokens
from greedy_gnorm.tasks.task import TASKS, Task, task_of

__all__ = [
    "TASKS",
    "Task",
    "answers",
    "choices",
    "classification",
    "embeddings",
    "images",
    "language",
    "task_of",
    "tokens",
]
