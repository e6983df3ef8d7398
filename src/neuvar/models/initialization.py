"""Initial weights that depend on a seed alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuvar import _validate

Model = TypeVar("Model", bound=nn.Module)


def seeded(make: Callable[[], Model], seed: int) -> Model:
    """Make a model whose initial weights come from its own generator.

    Convolutions and linear layers get torch's default initialization, as in the paper's public
    code. Which b is suitable depends on the size of these weights.
    """
    generator = torch.Generator("cpu").manual_seed(_validate.seed(seed))
    with torch.device("meta"):  # torch's own initialization would draw from the global generator
        model = make()
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)
            if module.bias is not None:
                bound = 1 / math.sqrt(module.weight[0].numel())
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, _BatchNorm):
            module.reset_parameters()
        else:
            assert not list(module.parameters(recurse=False)), f"no initialization for {module}"
    return model
