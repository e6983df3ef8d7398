"""What one pass of a model over data shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """Loss and, for classification, accuracy (else nan) of a model over all data."""

    loss: float
    accuracy: float


def scalar(value: Any) -> Tensor:
    """What a loss returned, if it is one number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss must return the mean over the batch as a tensor, got {got}")
    return value.reshape(())


def are_classes(outputs: Any, targets: Any) -> bool:
    """Whether outputs are scores of classes along their second axis and targets are classes."""
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.ndim == targets.ndim + 1 >= 2
        and outputs.is_floating_point()
        and not (targets.is_floating_point() or targets.is_complex())
        and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)
        and outputs.shape[1] > 1
    )


def hit_rate(outputs: Any, targets: Any) -> Tensor:
    """Share of right classes in a batch, those below 0 left out; nan where there are none."""
    if not are_classes(outputs, targets):
        return torch.tensor(math.nan)
    counts = targets >= 0
    right = ((outputs.argmax(1) == targets) & counts).sum()
    share: Tensor = right / counts.sum().clamp(min=1)
    return share


def at_least_single(outputs: Any) -> Any:
    """Outputs of half precision in single: their loss would be rounded too much to compare."""
    if isinstance(outputs, Tensor) and outputs.dtype in (torch.float16, torch.bfloat16):
        return outputs.float()
    return outputs


def weighted_mean(values: list[Tensor], sizes: list[int]) -> float:
    """Mean over batches, each with the weight of its size."""
    found = torch.stack(values).detach().cpu().double()
    weights = torch.tensor(sizes, dtype=torch.float64)
    return float(found @ weights / weights.sum()) if len(sizes) else math.nan


def average(readings: list[Reading]) -> Reading:
    """Mean of several readings."""
    n = len(readings)
    return Reading(sum(r.loss for r in readings) / n, sum(r.accuracy for r in readings) / n)


def agree(one: Reading, other: Reading, clean: Reading, rounding: float) -> bool:
    """Whether two ways of computing a reading show the same effect of the noise.

    Where that is too small to be told from rounding, they do not.
    """
    effect = abs(other.loss - clean.loss)
    return 100 * rounding < effect < math.inf and (
        abs(one.loss - other.loss) <= 1e-3 * effect + 10 * rounding
    )
