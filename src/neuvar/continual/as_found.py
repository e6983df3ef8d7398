"""Look closely at a model, at its clean weights, and leave it as found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from neuvar.measures.as_found import as_found


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Clean weights, evaluation mode and gradients inside the block; then all as before."""
    with torch.enable_grad(), as_found(model):
        yield
