"""Continual learning: streams of tasks, and penalties against forgetting."""

from neuvar.continual.importance import diagonal_fisher, output_sensitivity
from neuvar.continual.penalties import EWC, MAS, SI, Penalty
from neuvar.continual.streams import Stream, Task, permuted_tasks, rotated_tasks, split_tasks

__all__ = [
    "EWC",
    "MAS",
    "SI",
    "Penalty",
    "Stream",
    "Task",
    "diagonal_fisher",
    "output_sensitivity",
    "permuted_tasks",
    "rotated_tasks",
    "split_tasks",
]
