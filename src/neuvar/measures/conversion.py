"""Conversion of tensors, arrays and lists that a user passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_tensor(name: str, values: Any) -> Tensor:
    """Numbers as a tensor on the CPU."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        return torch.tensor(np.asarray(values))  # torch.tensor(list) would round to float32
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be a tensor, an array or a list of numbers, got {type(values).__name__}"
        ) from None


def class_labels(name: str, values: Any) -> Tensor:
    """Class labels of shape (n,) as int64."""
    labels = as_tensor(name, values)
    if labels.dim() != 1 or not len(labels):
        raise ValueError(
            f"{name} must have shape (n,) with at least one example, got {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{name} must be integer class labels, got {labels.dtype}")
    labels = labels.long()
    if labels.min() < 0:
        raise ValueError(f"{name} must be class labels >= 0, got {labels.min().item()}")
    return labels


def check_fractions(name: str, values: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Refuse values outside 0 to 1, and nan."""
    outside = values[~((values >= 0) & (values <= 1))]
    if outside.size:
        raise ValueError(f"{name} must be between 0 and 1, got {outside[0]}")
