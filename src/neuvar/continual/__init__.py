"""Continual learning: streams of tasks, and penalties against forgetting."""

from neuvar.continual.importance import diagonal_fisher, output_sensitivity
from neuvar.continual.penalties import EWC, MAS, PENALTIES, SI, Penalty
from neuvar.continual.streams import (
    STREAMS,
    Stream,
    Task,
    permuted_tasks,
    rotated_tasks,
    split_tasks,
)

__all__ = [
    "EWC",
    "MAS",
    "PENALTIES",
    "SI",
    "STREAMS",
    "Penalty",
    "Stream",
    "Task",
    "diagonal_fisher",
    "output_sensitivity",
    "permuted_tasks",
    "rotated_tasks",
    "split_tasks",
]
