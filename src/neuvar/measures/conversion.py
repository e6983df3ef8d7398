"""Conversion and validation of tensors, arrays and lists that a user passes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar._validate import boolean


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


def as_array(name: str, values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers as an array in double precision."""
    array: np.ndarray[Any, np.dtype[np.float64]] = as_tensor(name, values).double().numpy()
    return array


def several(name: str, values: Any) -> list[Any]:
    """One value or an iterable of values, as a list that is not empty."""
    is_one = isinstance(values, str) or not isinstance(values, Iterable)
    items = [values] if is_one or getattr(values, "ndim", 1) == 0 else list(values)
    if not items:
        raise ValueError(f"{name} must have at least one value, got {values!r}")
    return items


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


def probabilities_and_labels(outputs: Any, labels: Any, *, logits: bool) -> tuple[Tensor, Tensor]:
    """Probabilities of shape (n, classes) in double precision, and n labels."""
    values = as_tensor("outputs", outputs)
    if not values.is_floating_point() or values.dim() != 2 or min(values.shape) < 2:
        raise ValueError(
            "outputs must be floating-point numbers of shape (n, classes), with at least two "
            f"examples and two classes, got {values.dtype} of {tuple(values.shape)}"
        )
    if boolean("logits", logits):
        probabilities = values.double().softmax(dim=1)
        bad = int(probabilities.isnan().any(dim=1).sum())
        if bad:  # -inf is a valid logit, with probability 0
            raise ValueError(
                "outputs must be logits without nan, without +inf and without rows of only -inf, "
                f"got {bad} of {len(values)} rows that are invalid"
            )
    else:
        check_probabilities("outputs must be", values, dim=1)
        probabilities = values.double()
    truth = class_labels("labels", labels)
    n, classes = probabilities.shape
    if len(truth) != n or truth.max() >= classes:
        raise ValueError(
            f"labels must be {n} class labels below {classes}, as outputs has shape "
            f"{(n, classes)}, got {len(truth)} up to {truth.max().item()}"
        )
    return probabilities, truth


def check_probabilities(prefix: str, values: Tensor, *, dim: int) -> None:
    """Refuse negative values, and rows that do not sum to 1; ``prefix`` begins the message."""
    error = (values.double().sum(dim=dim) - 1).abs().max().item()
    # In half precision, rounding moves the sum away from 1.
    if not (values.min() >= 0 and error <= max(1e-4, math.sqrt(torch.finfo(values.dtype).eps))):
        raise ValueError(
            f"{prefix} probabilities >= 0 whose rows sum to 1, got a smallest value of "
            f"{values.min().item():.4g} and a sum that is off by {error:.4g}; for logits use "
            "logits=True"
        )


def check_fractions(name: str, values: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Refuse values outside 0 to 1, and nan."""
    outside = values[~((values >= 0) & (values <= 1))]
    if outside.size:
        raise ValueError(f"{name} must be between 0 and 1, got {outside[0]}")
