"""Memorization of wrong labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar.measures.proportion import Proportion


@dataclass(frozen=True)
class Memorization:
    """What a classifier makes of the right and of the wrong labels that it was trained with.

    The counts of ``noisy_memorized``, ``noisy_corrected`` and ``other`` add up to the number of
    wrong labels. A share of no examples, as of wrong labels where there are none, is nan.

    Attributes:
        clean_learned: Of the right labels, those predicted.
        noisy_memorized: Of the wrong labels, those predicted.
        noisy_corrected: Of the wrong labels, those in whose place the true one is predicted.
        other: Of the wrong labels, those in whose place a third class is predicted.
        noise_rate: Of all labels, the wrong ones.
        train_accuracy: Of all labels, right or wrong, those predicted.
    """

    clean_learned: Proportion
    noisy_memorized: Proportion
    noisy_corrected: Proportion
    other: Proportion
    noise_rate: Proportion
    train_accuracy: Proportion


def label_memorization(predictions: Any, *, clean: Any, noisy: Any) -> Memorization:
    """Count how many right labels a classifier learned and how many wrong ones it memorized.

    Args:
        predictions: class numbers of shape (n,), or logits or probabilities of shape (n, classes),
            of which the largest counts, the first one if several are equal.
        clean: true class numbers, shape (n,).
        noisy: class numbers that the classifier was trained with, shape (n,).

    Returns:
        The shares, each with its error.

    >>> found = label_memorization([0, 1, 2, 2, 0], clean=[0, 1, 1, 2, 2], noisy=[0, 1, 2, 0, 1])
    >>> found.clean_learned.value, found.noise_rate.value, found.train_accuracy.value
    (1.0, 0.6, 0.6)
    >>> [p.count for p in (found.noisy_memorized, found.noisy_corrected, found.other)]
    [1, 1, 1]
    """
    true, given = class_numbers("clean", clean), class_numbers("noisy", noisy)
    predicted, classes = _predicted("predictions", predictions)
    if not len(predicted) == len(true) == len(given):
        raise ValueError(
            f"predictions, clean and noisy must have the same length, "
            f"got {len(predicted)}, {len(true)} and {len(given)}"
        )
    for name, labels in (("clean", true), ("noisy", given)):
        if classes is not None and labels.max() >= classes:
            raise ValueError(
                f"{name} must be below the {classes} classes that predictions has columns for, "
                f"got {labels.max().item()}"
            )
    is_wrong = true != given

    def share(event: Tensor, among: Tensor) -> Proportion:
        return Proportion(int((event & among).sum()), int(among.sum()))

    everywhere = torch.ones_like(is_wrong)
    third = (predicted != given) & (predicted != true)
    return Memorization(
        clean_learned=share(predicted == given, ~is_wrong),
        noisy_memorized=share(predicted == given, is_wrong),
        noisy_corrected=share(predicted == true, is_wrong),
        other=share(third, is_wrong),
        noise_rate=share(is_wrong, everywhere),
        train_accuracy=share(predicted == given, everywhere),
    )


def tensor(name: str, values: Any) -> Tensor:
    """Numbers in any of the accepted forms as a tensor on the CPU, or a sentence."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        return torch.tensor(np.asarray(values))  # torch alone would make float32 of a list
    except (TypeError, ValueError, RuntimeError):
        kind = type(values).__name__
        raise ValueError(
            f"{name} must be a tensor, an array or a list of numbers, got {kind}"
        ) from None


def class_numbers(name: str, values: Any) -> Tensor:
    """Class numbers as int64, or a sentence which says why they are none."""
    found = tensor(name, values)
    if found.dim() != 1 or not len(found):
        raise ValueError(
            f"{name} must have shape (n,) with at least one example, got {tuple(found.shape)}"
        )
    if found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, class numbers from 0, got {found.dtype}")
    found = found.long()
    if found.min() < 0:
        raise ValueError(f"{name} must be class numbers from 0, got {found.min().item()}")
    return found


def _predicted(name: str, values: Any) -> tuple[Tensor, int | None]:
    """Predicted class numbers, and the number of classes where it is known."""
    found = tensor(name, values)
    if found.dim() == 1:
        return class_numbers(name, found), None
    if found.dim() != 2:
        raise ValueError(f"{name} must have shape (n,) or (n, classes), got {tuple(found.shape)}")
    if not found.dtype.is_floating_point or found.shape[0] < 1 or found.shape[1] < 2:
        raise ValueError(
            f"{name} of two dimensions must be floating-point numbers of shape (n, classes), with "
            f"at least one example and two classes, got {found.dtype} of {tuple(found.shape)}"
        )
    if found.isnan().any():
        raise ValueError(f"{name} must not be nan, got {int(found.isnan().sum())} nan")
    return found.argmax(dim=1), found.shape[1]
