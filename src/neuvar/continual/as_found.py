"""Look closely at a model, at its clean weights, and leave it as found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from neuvar.measures.as_found import as_found
from neuvar.optim.weights import _CARRIERS, NoisyWeights


def _carrier(p: Tensor) -> NoisyWeights | None:
    """What has put noise on a parameter and can take it off."""
    found: NoisyWeights | None = _CARRIERS.get(p, lambda: None)()
    return found if found is not None and p in found.carried.terms else None


def clean_copy(p: Tensor) -> Tensor:
    """Copy of a parameter's clean weights, whichever optimizer perturbs them."""
    carrier = _carrier(p)
    if carrier is None:
        return p.detach().clone()
    if carrier.keep.survives:
        return carrier.clean_copy(p)
    # Without a buffer that would take the noise off and put it on again, in place; but a forward
    # pass may have used the weights, and its backward pass would refuse them then.
    with torch.no_grad():
        return carrier.eps.result(p, p.detach(), factor=-1)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Clean weights, evaluation mode and gradients inside the block; then all as before."""
    with torch.enable_grad(), as_found(model):
        yield
