"""Preparation of a model before training: a clean copy, lazy layers, and the batch size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from neuvar._eval_mode import eval_mode
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


def init_lazy_layers(model: nn.Module, run: Callable[[], Any]) -> None:
    """Run the model once, if it has lazy layers, so that they get their parameters."""
    if any(map(is_lazy, model.parameters())):
        with torch.no_grad(), eval_mode(model):
            run()


def avoid_single(count: int, size: int) -> int:
    """A batch size without a last batch of one example, which batch normalization refuses."""
    size = integer("batch_size", size, low=1)
    while 1 < size < count and count % size == 1:
        size += 1
    return size
