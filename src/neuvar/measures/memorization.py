"""Memorization of wrong labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuvar.measures.conversion import as_tensor, class_labels
from neuvar.measures.estimate import Proportion


@dataclass(frozen=True)
class Memorization:
    """How a classifier predicts its right and its wrong training labels.

    The counts of ``noisy_memorized``, ``noisy_corrected`` and ``other`` add up to the number of
    wrong labels. A proportion of no examples is nan.

    Attributes:
        clean_learned: Of the right labels, those predicted.
        noisy_memorized: Of the wrong labels, those predicted.
        noisy_corrected: Of the wrong labels, those for which the true class is predicted.
        other: Of the wrong labels, those for which a third class is predicted.
        noise_rate: Of all labels, the wrong ones.
        train_accuracy: Of all labels, right or wrong, those predicted.
    """

    clean_learned: Proportion
    noisy_memorized: Proportion
    noisy_corrected: Proportion
    other: Proportion
    noise_rate: Proportion
    train_accuracy: Proportion


def label_memorization(
    predictions: Any, *, clean: Any, noisy: Any, confidence: float = 0.95
) -> Memorization:
    """Count how many right labels a classifier learned and how many wrong ones it memorized.

    Args:
        predictions: Classes of shape (n,), or logits or probabilities of shape (n, classes), of
            which the first largest counts.
        clean: True classes, shape (n,).
        noisy: Classes that the classifier was trained with, shape (n,).
        confidence: Confidence level of the intervals.

    >>> result = label_memorization([0, 1, 2, 2, 0], clean=[0, 1, 1, 2, 2], noisy=[0, 1, 2, 0, 1])
    >>> result.clean_learned.value, result.noise_rate.value, result.train_accuracy.value
    (1.0, 0.6, 0.6)
    >>> [p.count for p in (result.noisy_memorized, result.noisy_corrected, result.other)]
    [1, 1, 1]
    """
    true, given = class_labels("clean", clean), class_labels("noisy", noisy)
    predicted, classes = _predicted(predictions)
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

    def share(event: Tensor, among: Tensor) -> Proportion:
        return Proportion(int((event & among).sum()), int(among.sum()), confidence)

    is_wrong = true != given
    everything = torch.ones_like(is_wrong)
    return Memorization(
        clean_learned=share(predicted == given, ~is_wrong),
        noisy_memorized=share(predicted == given, is_wrong),
        noisy_corrected=share(predicted == true, is_wrong),
        other=share((predicted != given) & (predicted != true), is_wrong),
        noise_rate=share(is_wrong, everything),
        train_accuracy=share(predicted == given, everything),
    )


def _predicted(predictions: Any) -> tuple[Tensor, int | None]:
    """Predicted classes, and the number of classes if known."""
    values = as_tensor("predictions", predictions)
    shape = tuple(values.shape)
    if values.dim() == 1:
        return class_labels("predictions", values), None
    if values.dim() != 2:
        raise ValueError(f"predictions must have shape (n,) or (n, classes), got {shape}")
    if not values.is_floating_point() or shape[0] < 1 or shape[1] < 2:
        raise ValueError(
            "predictions of two dimensions must be floating-point numbers of shape (n, classes), "
            f"with at least one example and two classes, got {values.dtype} of {shape}"
        )
    if values.isnan().any():
        raise ValueError(f"predictions must not be nan, got {int(values.isnan().sum())} nan")
    return values.argmax(dim=1), shape[1]
