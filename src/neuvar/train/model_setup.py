"""Before a training: check the model, copy it at clean weights, choose the batch size."""

from __future__ import annotations

import copy

from torch import nn

from neuvar._validate import integer
from neuvar.optim.noisy_parameters import held_clean


def copy_clean(model: nn.Module) -> nn.Module:
    """A copy of a model at its clean weights."""
    with held_clean(model.parameters()):
        return copy.deepcopy(model)


def check_trainable(model: nn.Module) -> None:
    """Refuse a model without trainable parameters."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("model has nothing to train: it has no parameter with requires_grad=True")


def avoid_single(count: int, size: int) -> int:
    """A batch size without a last batch of one example, which batch normalization refuses."""
    size = integer("batch_size", size, low=1)
    while 1 < size < count and count % size == 1:
        size += 1
    return size
