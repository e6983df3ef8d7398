"""What label noise gives back, and what it takes."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Integers = Tensor | np.ndarray[Any, Any] | Sequence[int]
"""Labels as users have them."""

MOST_CLASSES = 10_000
"""A matrix with a row and a column for each class must fit into memory: 800 MB of float64."""


@dataclass(frozen=True, eq=False)
class NoisyLabels:
    """Labels with noise, and everything that is known about it.

    What needs the clean labels is None where these are not known.

    Attributes:
        noisy: the labels to train on, int64.
        clean: the labels without noise, int64.
        mask: True where the two differ.
        counts: how many labels of each clean class (row) became each class (column), int64.
        matrix: ``counts`` with each row divided by its sum, float64; a class that does not occur
            has a row of zeros.
        rate: the share of labels that differ, as it came out.
        provenance: how the labels were made: plain numbers and strings, and the SHA-256 of what
            went in and of what came out.
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


def account(
    noisy: Tensor, clean: Tensor | None, *, classes: int, provenance: dict[str, Any]
) -> NoisyLabels:
    """Compare labels with the clean ones and say where they come from."""
    mask = counts = matrix = rate = None
    if clean is not None:
        mask = noisy != clean
        counts = (clean * classes + noisy).bincount(minlength=classes**2).view(classes, classes)
        matrix = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
        rate = int(mask.sum()) / len(mask)
    facts = {
        **provenance,
        "classes": classes,
        "count": len(noisy),
        "clean_sha256": None if clean is None else tensor_sha256(clean),
        "noisy_sha256": tensor_sha256(noisy),
    }
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return NoisyLabels(noisy, clean, mask, counts, matrix, rate, facts, digest)


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's shape, type and elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checked_labels(name: str, labels: Integers, classes: int) -> Tensor:
    """A copy of the labels as int64, if each of them is the number of a class."""
    try:
        found = labels.detach() if isinstance(labels, Tensor) else torch.from_numpy(_array(labels))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be integers in one row, got {labels!r:.60}") from error
    if found.dim() != 1 or not len(found):
        raise ValueError(f"{name} must be one row of labels, got the shape {tuple(found.shape)}")
    if found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        raise ValueError(f"{name} must be integers, got {found.dtype}")
    found = found.to(torch.int64, copy=True)
    outside = found[(found < 0) | (found >= classes)]
    if len(outside):
        raise ValueError(
            f"{name} must be from 0 to {classes - 1} for {classes} classes, got {int(outside[0])}"
        )
    return found


def _array(labels: np.ndarray[Any, Any] | Sequence[int]) -> np.ndarray[Any, Any]:
    array = np.asarray(labels)
    if array.dtype.kind not in "iu":
        return array  # torch or the check of the type names what it is
    return array.astype(np.int64)


def checked_classes(classes: object) -> int:
    """The number of classes, if noise between them is possible."""
    number = _integer("classes", classes)
    if number < 2:
        raise ValueError(f"classes must be an int >= 2, got {classes!r}")
    if number > MOST_CLASSES:
        raise ValueError(f"classes must be at most {MOST_CLASSES}, got {classes!r}")
    return number


def checked_seed(seed: object) -> int:
    """The seed, if it is an int."""
    return _integer("seed", seed)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an int, got {value!r}")
    return operator.index(value)


def checked_rate(rate: object) -> float:
    """The rate, if it is a number in [0, 1)."""
    try:
        number = float(rate)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    if isinstance(rate, (bool, str)) or not 0 <= number < 1:
        raise ValueError(f"rate must be a number in [0, 1), got {rate!r}")
    return number
