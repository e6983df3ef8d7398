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


def hit_rate(outputs: Any, targets: Any) -> Tensor:
    """Share of right classes in a batch, or nan where outputs are no scores of classes."""
    if (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.ndim == targets.ndim + 1
        and outputs.is_floating_point()
        and not (targets.is_floating_point() or targets.is_complex())
    ):
        return (outputs.argmax(1) == targets).float().mean()
    return torch.tensor(math.nan)


def weighted_mean(values: list[Tensor], sizes: list[int]) -> float:
    """Mean over batches, each with the weight of its size."""
    found = torch.stack(values).detach().cpu().double()
    weights = torch.tensor(sizes, dtype=torch.float64)
    return float(found @ weights / weights.sum()) if len(sizes) else math.nan


def average(readings: list[Reading]) -> Reading:
    """Mean of several readings."""
    n = len(readings)
    return Reading(sum(r.loss for r in readings) / n, sum(r.accuracy for r in readings) / n)


def agree(one: Reading, other: Reading, clean: Reading) -> bool:
    """Whether two ways of computing a reading give the same effect of the noise."""
    if not (math.isfinite(one.loss) and math.isfinite(other.loss)):
        return False
    allowed = 1e-3 * abs(other.loss - clean.loss) + 1e-6 * (abs(clean.loss) + abs(other.loss))
    return abs(one.loss - other.loss) <= allowed
