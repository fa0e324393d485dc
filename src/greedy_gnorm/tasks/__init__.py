"""What a model predicts, one file for each kind: labels, loss, measures, and the objectives that scores differentiate.

Runs no passes of its own and never ranks or removes anything.
"""

from greedy_gnorm.tasks import classification
from greedy_gnorm.tasks.task import TASKS, Task, task_of

__all__ = ["TASKS", "Task", "classification", "task_of"]
