"""Inputs and labels, in whichever form they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Batch = Tensor | tuple[Tensor, Tensor] | list[Tensor]
Data = Batch | Iterable[Batch]
"""Inputs, or inputs with labels: one batch, or several such as a DataLoader gives.

Two tensors in a tuple or a list are always inputs and their labels, never two batches.
"""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def batches(
    data: Data, weights: dict[str, Tensor], *, needs_labels: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels on the device of the weights; labels that nobody needs are zeros."""
    device = next(iter(weights.values())).device
    for batch in _listed(data):
        inputs, labels = _pair(batch)
        if needs_labels and labels is None:
            raise ValueError("data has inputs alone; this kind of Fisher needs their labels")
        if needs_labels and len(inputs) and labels is not None and not _are_classes(labels):
            raise ValueError(
                "data must have labels that are integers in one row, got "
                f"{labels.dtype} of shape {tuple(labels.shape)}"
            )
        if labels is None:
            labels = torch.zeros(len(inputs), dtype=torch.int64)
        if len(labels) != len(inputs):
            raise ValueError(f"data has {len(inputs)} inputs but {len(labels)} labels in a batch")
        if len(inputs):
            yield inputs.to(device), labels.to(device, torch.int64)


def _listed(data: Any) -> Iterable[object]:
    """Batches, also if there is but one."""
    if isinstance(data, Tensor):
        return [data]
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], Tensor):
        inputs, labels = _pair(data)
        if isinstance(data, list) and inputs.dim() > 1 and labels is not None and labels.dim() > 1:
            raise ValueError(
                "data must not be a list of two batches, which reads as inputs and their labels: "
                "give one batch of inputs, or an iterator"
            )
        return [data]
    if not isinstance(data, Iterable) or isinstance(data, (Mapping, str)) or hasattr(data, "dtype"):
        raise ValueError(
            "data must be a tensor of inputs, a pair of tensors (inputs, labels) or an iterable of "
            f"such, got {_described(data)}"
        )
    return data


def _pair(batch: object) -> tuple[Tensor, Tensor | None]:
    """Inputs, and labels where there are some."""
    if isinstance(batch, Tensor):
        found: tuple[Any, ...] = (batch, None)
    else:
        found = tuple(batch) if isinstance(batch, (tuple, list)) else ()
        if len(found) != 2 or not all(isinstance(part, Tensor) for part in found):
            raise ValueError(
                "data must have batches that are a tensor of inputs or a pair of tensors (inputs, "
                f"labels), got {_described(batch)}"
            )
    if any(part is not None and not part.dim() for part in found):
        raise ValueError("data must have a row for each sample, got a tensor that is one number")
    return found[0], found[1]


def _are_classes(labels: Tensor) -> bool:
    return labels.dim() == 1 and labels.dtype in INTEGERS


def _described(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, (tuple, list)):
        return f"a {kind} of {', '.join(type(part).__name__ for part in value[:4]) or 'nothing'}"
    return f"a {kind}"
