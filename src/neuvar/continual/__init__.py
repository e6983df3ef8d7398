"""Learn tasks one after another: streams of tasks, and penalties against forgetting."""

from neuvar.continual.ewc import EWC
from neuvar.continual.importance import diagonal_fisher, output_sensitivity
from neuvar.continual.mas import MAS
from neuvar.continual.penalty import Penalty
from neuvar.continual.si import SI
from neuvar.continual.streams import (
    Stream,
    Task,
    permuted_tasks,
    rotated_tasks,
    split_tasks,
)

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
