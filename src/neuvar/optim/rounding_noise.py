"""Rounding of weights to few bits, and training with the noise of rounding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from neuvar import _validate
from neuvar.optim.wrapper import Wrapper

BY = ("tensor", "row")
"""What shares a step: a whole tensor, or each slice along its first axis."""


def rounding_step(weights: Tensor, bits: int, *, by: str = "tensor") -> Tensor:
    r"""Step of rounding to signed integers: :math:`\Delta = \max|w| / (2^{bits - 1} - 1)`."""
    _validate.integer("bits", bits, low=2, high=16)
    _validate.one_of("by", by, BY)
    largest = weights.detach().abs()
    if by == "row" and weights.ndim > 1:
        largest = largest.amax(tuple(range(1, weights.ndim)), keepdim=True)
    else:
        largest = largest.max() if weights.numel() else largest.sum()
    step: Tensor = largest / (2 ** (bits - 1) - 1)
    return step


def round_weights(weights: Tensor, bits: int, *, by: str = "tensor") -> Tensor:
    r"""Round weights to the nearest multiple of a step, :math:`\Delta\,\mathrm{round}(w/\Delta)`.

    With 2 bits there are three values: :math:`-\Delta`, 0 and :math:`\Delta`.

    Args:
        weights: Any tensor.
        bits: 2 to 16.
        by: One step for the whole ``"tensor"``, or one for each ``"row"`` along its first axis.

    >>> import torch
    >>> round_weights(torch.tensor([0.9, -0.4, 0.2, -3.0]), bits=3)
    tensor([ 1., -0.,  0., -3.])
    """
    step = rounding_step(weights, bits, by=by)
    return (weights.detach() / step.masked_fill(step == 0, 1)).round() * step


def rounding_parameters(model: nn.Module, *, bits: int) -> list[dict[str, Any]]:
    """Parameter groups to train with the noise that rounding to ``bits`` bits will add.

    Rounding changes a weight by up to half a step. Each tensor of two or more dimensions gets
    uniform noise of this size, in a group of its own. Biases and normalization layers, which are
    usually not rounded, get none. The step is that of rounding by tensor. Rounding by row has a
    smaller step in most rows; there the noise is larger than the rounding error. The step depends
    on the largest weight, so call :func:`update_rounding_noise` regularly, such as once per epoch.

    Args:
        model: Any module.
        bits: The target, 2 to 16.

    >>> from neuvar import NVRMAdam
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> groups = rounding_parameters(model, bits=4)
    >>> optimizer = NVRMAdam(groups, model=model, lr=1e-3, b=0)
    >>> [group["noise"] for group in optimizer.param_groups]
    ['uniform', 'uniform', 'gaussian']
    >>> update_rounding_noise(optimizer)
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, got {type(model).__name__}")
    bits = _validate.integer("bits", bits, low=2, high=16)
    groups: list[dict[str, Any]] = []
    quiet = []
    for p in model.parameters():
        if p.ndim < 2:
            quiet.append(p)
        else:
            half = float(rounding_step(p, bits)) / 2
            groups.append({"params": [p], "b": half, "noise": "uniform", "rounding_bits": bits})
    if not groups:
        raise ValueError("model has no parameter of two or more dimensions to round")
    return [*groups, {"params": quiet, "b": 0.0}] if quiet else groups


def update_rounding_noise(optimizer: Wrapper) -> None:
    """Set b to half a step of rounding again, for the groups of :func:`rounding_parameters`."""
    if not isinstance(optimizer, Wrapper):
        raise ValueError(f"optimizer must be one of neuvar's, got {type(optimizer).__name__}")
    groups = [group for group in optimizer.param_groups if "rounding_bits" in group]
    if not groups:
        raise ValueError("optimizer has no parameter groups of rounding_parameters")
    for group in groups:
        (p,) = group["params"]
        group["b"] = float(rounding_step(optimizer.clean_copy(p), group["rounding_bits"])) / 2
