"""Training: one loop for every optimizer, with evaluation, checkpoints and penalties."""

from neuvar.train.checkpoint import Checkpoint
from neuvar.train.evaluation import Evaluation, evaluate
from neuvar.train.loop import Fit, fit
from neuvar.train.optimizers import OPTIMIZERS, make_optimizer
from neuvar.train.range_test import FoundB, find_b

__all__ = [
    "OPTIMIZERS",
    "Checkpoint",
    "Evaluation",
    "Fit",
    "FoundB",
    "evaluate",
    "find_b",
    "fit",
    "make_optimizer",
]
