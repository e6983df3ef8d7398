"""The result of every label noise function, and checks of their arguments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar._validate import integer, number

Integers = Tensor | np.ndarray[Any, Any] | Sequence[int]
"""Labels as a tensor, an array or a list."""

MAX_CLASSES = 10_000
"""The confusion matrix must fit into memory: 800 MB of float64."""


@dataclass(frozen=True, eq=False)
class NoisyLabels:
    """Noisy labels, and what is known about the noise; without clean labels some parts are None.

    Attributes:
        noisy: the labels to train on, int64.
        clean: the labels without noise, int64.
        mask: True where the two differ.
        counts: number of labels of each clean class (row) with each noisy class (column), int64.
        matrix: ``counts`` divided by its row sums, float64; zeros for a class without labels.
        rate: actual share of labels that differ.
        provenance: how the labels were made: plain numbers and strings, and the SHA-256 of clean
            and noisy labels.
        hash: SHA-256 of the provenance; equal for equal labels made in the same way.
    """

    noisy: Tensor
    clean: Tensor | None
    mask: Tensor | None
    counts: Tensor | None
    matrix: Tensor | None
    rate: float | None
    provenance: dict[str, Any]
    hash: str

    def __len__(self) -> int:
        return len(self.noisy)

    def __repr__(self) -> str:
        wrong = "" if self.mask is None else f", {int(self.mask.sum())} of them wrong"
        return f"NoisyLabels({len(self)} labels{wrong}, hash {self.hash[:8]})"


def make_result(noisy: Tensor, clean: Tensor | None, classes: int, **facts: Any) -> NoisyLabels:
    """Compare noisy with clean labels; the facts say how they were made."""
    mask = counts = matrix = rate = None
    if clean is not None:
        mask = noisy != clean
        counts = (clean * classes + noisy).bincount(minlength=classes**2).view(classes, classes)
        matrix = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
        rate = int(mask.sum()) / len(mask)
    facts |= {
        "classes": classes,
        "count": len(noisy),
        "clean_sha256": None if clean is None else tensor_sha256(clean),
        "noisy_sha256": tensor_sha256(noisy),
    }
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return NoisyLabels(noisy, clean, mask, counts, matrix, rate, facts, digest)


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's shape, dtype and elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checked_labels(name: str, labels: Integers, classes: int) -> Tensor:
    """A copy of the labels as int64, each from 0 to classes - 1."""
    try:
        if isinstance(labels, Tensor):
            result = labels.detach()
        else:
            array = np.asarray(labels)
            integers = array.dtype.kind in "iu"  # torch does not take all of NumPy's
            result = torch.from_numpy(array.astype(np.int64) if integers else array)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a list of integers, got {labels!r:.60}") from error
    if result.dim() != 1 or not len(result):
        raise ValueError(f"{name} must be one row of labels, got the shape {tuple(result.shape)}")
    if result.dtype == torch.bool or result.is_floating_point() or result.is_complex():
        raise ValueError(f"{name} must be integers, got {result.dtype}")
    result = result.to(torch.int64, copy=True)
    outside = result[(result < 0) | (result >= classes)]
    if len(outside):
        raise ValueError(
            f"{name} must be from 0 to {classes - 1} for {classes} classes, got {int(outside[0])}"
        )
    return result


def checked_classes(classes: object) -> int:
    """The number of classes, at least 2."""
    return integer("classes", classes, low=2, high=MAX_CLASSES)


def checked_rate(rate: object) -> float:
    """A noise rate: at least 0 and less than 1."""
    return number("rate", rate, low=0, below=1)
