"""Memorization of wrong labels, and what the training curve says about how many are wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar.measures.proportion import (
    Proportion,
    is_between_0_and_1,
    is_int,
    normal_quantile,
    wilson,
)

SHORTEST_WINDOW = 10
"""How many epochs it takes at least to tell a plateau, and its error, from a slope."""


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


@dataclass(frozen=True)
class Plateau:
    """The last part of a training curve, and the noise rate that its height stands for.

    Attributes:
        reached: Whether the window is a plateau. Unless it is, ``height`` is merely the mean of the
            window and ``noise_rate`` estimates nothing.
        height: Mean accuracy in the window.
        drift: By how much the least-squares line rises from the window's first epoch to its last.
        drift_stderr: Standard error of the drift.
        epoch_stderr: Standard error of the height by fluctuation over epochs.
        degrees: Effective degrees of freedom of both standard errors.
        window: How many epochs, the last ones, were used.
        n: Number of training examples, or None.
    """

    reached: bool
    height: float
    drift: float
    drift_stderr: float
    epoch_stderr: float
    degrees: float
    window: int
    n: int | None

    @property
    def noise_rate(self) -> float:
        """One minus the height."""
        return 1 - self.height

    @property
    def stderr(self) -> float:
        """Standard error of the noise rate: over epochs and, if n is known, binomial."""
        binomial = self.height * (1 - self.height) / self.n if self.n else 0.0
        return math.hypot(self.epoch_stderr, math.sqrt(binomial))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Interval for the noise rate, within [0, 1], if the assumptions hold.

        Student's for the epochs and, if n is known, Wilson's for the binomial part; their reaches
        add in squares to either side.

        References:
            Zou & Donner 2008, Construction of confidence limits about effect measures.
        """
        rate, z = self.noise_rate, normal_quantile(confidence)
        low, high = wilson(rate, self.n, z) if self.n else (rate, rate)
        reach = _student(z, self.degrees) * self.epoch_stderr
        low, high = rate - math.hypot(rate - low, reach), rate + math.hypot(high - rate, reach)
        return max(0.0, low), min(1.0, high)


def plateau_noise_rate(
    train_accuracy: Sequence[float],
    *,
    n: int | None = None,
    window: int | None = None,
    tolerance: float = 0.01,
) -> Plateau:
    r"""Estimate the share of wrong labels from where the training accuracy stops rising.

    A network that learns all right labels and memorizes no wrong one fits the clean fraction of its
    training labels and no more: :math:`\hat\rho = 1 - \text{height}`. That is an assumption, and
    the curve alone cannot test it. Right labels that are not learned (b too large, training too
    short, hard examples) make the estimate too high; wrong labels that are memorized (b too small)
    make it too low; the two may cancel. A plateau near 1 means no wrong labels, or all of them
    memorized. Where true labels are at hand, :func:`label_memorization` tells.

    The curve is on a plateau if its drift over the window is shown to be within the tolerance: the
    90 % interval of the least-squares line's rise lies within ± tolerance, two one-sided tests at
    5 %. A curve that moves fails, and so does one that fluctuates too much to tell. What drift
    there is within the tolerance is not part of the error.

    Epochs are not independent. All errors take the residuals of the line as first-order
    autoregressive and use the effective number of epochs :math:`w (1 - r)/(1 + r)`, where r is
    their autocorrelation, corrected for its bias in short series and not taken below 0. On
    synthetic curves with n = 10,000 the 95 % interval held the rate in 90 to 97 % of all cases.
    Without n it held the share that is wrong in 84 to 97 % with autocorrelations up to 0.3, but at
    0.9 in windows of 10 or 25 epochs in as few as half.

    Args:
        train_accuracy: accuracy on the training labels, wrong ones included, after each epoch, best
            measured at clean weights and without augmentation; between 0 and 1.
        n: number of training examples. With it the error is that of the rate at which labels go
            wrong; without, of the share that is wrong among these very examples.
        window: how many epochs at the end to look at: 10 or more; a quarter of all, but at least
            10, unless given. Choose it so that the learning rate is constant in it.
        tolerance: largest drift over the window that still counts as none.

    References:
        Xie et al. 2021, Artificial neural variability for deep learning (where training stops);
        Schuirmann 1987 (two one-sided tests); Kendall 1954 (bias of the autocorrelation).

    >>> curve = [0.6 - 0.5 * 0.8**epoch for epoch in range(60)]
    >>> found = plateau_noise_rate(curve, n=10_000)
    >>> found.reached, round(found.noise_rate, 3), round(found.stderr, 4)
    (True, 0.4, 0.0049)
    >>> plateau_noise_rate([0.01 * epoch for epoch in range(60)]).reached
    False
    """
    curve = _curve(train_accuracy)
    if n is not None and not is_int(n, at_least=1):
        raise ValueError(f"n must be a whole number >= 1 or None, got {n!r}")
    if window is None:
        window = max(SHORTEST_WINDOW, len(curve) // 4)
    elif not is_int(window, at_least=SHORTEST_WINDOW) or window > len(curve):
        raise ValueError(
            f"window must be a whole number from {SHORTEST_WINDOW} to {len(curve)}, the number of "
            f"epochs, got {window!r}"
        )
    if not is_between_0_and_1(tolerance):
        raise ValueError(f"tolerance must be a number between 0 and 1, got {tolerance!r}")
    height, drift, height_error, drift_error, degrees = _line(curve[-window:])
    # Two one-sided tests at 5 % are one two-sided interval of 90 %.
    reach = _student(normal_quantile(0.9), degrees) * drift_error
    return Plateau(
        reached=abs(drift) + reach <= tolerance,
        height=height,
        drift=drift,
        drift_stderr=drift_error,
        epoch_stderr=height_error,
        degrees=degrees,
        window=window,
        n=n,
    )


def _curve(values: Any) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    found = tensor("train_accuracy", values)
    if found.dim() != 1 or len(found) < SHORTEST_WINDOW:
        raise ValueError(
            f"train_accuracy must be one number for each of at least {SHORTEST_WINDOW} epochs, "
            f"got shape {tuple(found.shape)}"
        )
    curve: np.ndarray[tuple[int], np.dtype[np.float64]] = found.double().numpy()
    wrong = curve[~((curve >= 0) & (curve <= 1))]
    if len(wrong):
        raise ValueError(f"train_accuracy must be between 0 and 1, got {wrong[0]}")
    return curve


def _line(y: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float, float, float]:
    """Height and rise of the least-squares line, their standard errors, degrees of freedom."""
    w = len(y)
    t = np.arange(w) - (w - 1) / 2
    height, slope = float(y.mean()), float(t @ y / (t @ t))
    e = y - height - slope * t
    squares = float(e @ e)
    # Around a fitted line the autocorrelation comes out too small by about (2 + 4r)/w.
    r = (w * float(e[1:] @ e[:-1]) / squares + 2) / (w - 4) if squares > 0 else 0.0
    r = min(max(r, 0.0), 0.95)
    effective = w * (1 - r) / (1 + r)
    variance = squares / w * effective / max(effective - 2, 1)
    height_error = math.sqrt(variance / effective)
    slope_error = math.sqrt(variance * w / effective / (t @ t))
    # Below 3 degrees of freedom intervals would say nothing, and _student would be inexact.
    return height, slope * (w - 1), height_error, slope_error * (w - 1), max(effective - 2, 3.0)


def _student(z: float, degrees: float) -> float:
    """Quantile of Student's distribution at the level of a normal one; within 1 % up to 99 %.

    References:
        Abramowitz & Stegun 1964, 26.7.5.
    """
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))
