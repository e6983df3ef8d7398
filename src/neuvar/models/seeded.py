"""Weights that depend on a seed alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Model = TypeVar("Model", bound=nn.Module)


def seeded(make: Callable[[], Model], seed: int) -> Model:
    """Make a model whose weights come from a generator of its own.

    Convolutions and linear layers start as torch starts them, uniform within one over the square
    root of their inputs, which is also what the paper's public code does. The noise b adds to the
    size of weights, so another start would mean another b.
    """
    fits = hasattr(seed, "__index__") and not isinstance(seed, bool)
    if not fits or not 0 <= operator.index(seed) < 2**32:  # the generator would drop higher bits
        raise ValueError(f"seed must be an int from 0 to {2**32 - 1}, got {seed!r}")
    generator = torch.Generator("cpu").manual_seed(operator.index(seed))
    with torch.device("meta"):  # torch's own initialisation would draw from the global generator
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
            assert not list(module.parameters(recurse=False)), f"{module} has no start"
    return model


def checked_size(name: str, value: object, *, multiple_of: int = 1) -> int:
    """A number of channels, units, blocks or classes, if it is one."""
    fits = not isinstance(value, bool) and hasattr(value, "__index__")
    if not fits or operator.index(value) < 1 or operator.index(value) % multiple_of:  # type: ignore[arg-type]
        kind = "an int >= 1" if multiple_of == 1 else f"a positive multiple of {multiple_of}"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    return operator.index(value)  # type: ignore[arg-type]


def checked_sizes(name: str, values: object, *, at_least: int) -> tuple[int, ...]:
    """Several of them."""
    sizes = tuple(values) if isinstance(values, Iterable) else ()
    if len(sizes) < at_least:
        raise ValueError(f"{name} must be {at_least} or more ints, got {values!r}")
    return tuple(checked_size(name, size) for size in sizes)
