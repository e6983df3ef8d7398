"""Memorization of wrong labels, noise rate from a training curve, and generalization gap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuvar._batches import Feed
from neuvar._validate import integer, probability
from neuvar.measures import estimate
from neuvar.measures.conversion import as_array, as_tensor, check_fractions, class_labels
from neuvar.measures.estimate import Estimate, Proportion
from neuvar.measures.landscape import Landscape
from neuvar.measures.loss_and_accuracy import (
    Loss,
    are_classes,
    check_mean,
    half_to_float,
    loss_per_example,
)

SHORTEST_WINDOW = 10
"""Smallest number of epochs that shows a plateau and its error."""


@dataclass(frozen=True)
class Memorization:
    """How a classifier predicts its right and its wrong training labels.

    Attributes:
        clean_learned: Share of the right labels that are predicted.
        noisy_memorized: Share of the wrong labels that are predicted.
        noisy_corrected: Share of the wrong labels for which the true class is predicted.
        other: Share of the wrong labels for which a third class is predicted.
        noise_rate: Share of wrong labels.
        train_accuracy: Share of all labels, right or wrong, that are predicted.
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
        predictions: Classes of shape (n,), or logits or probabilities of shape (n, classes). The
            prediction is the class with the largest value, the first one if several are equal.
        clean: True classes, shape (n,).
        noisy: Classes that the classifier was trained with, shape (n,).
        confidence: Confidence level of the intervals.

    >>> result = label_memorization([0, 1, 2, 2, 0], clean=[0, 1, 1, 2, 2], noisy=[0, 1, 2, 0, 1])
    >>> result.clean_learned.value, result.noise_rate.value, result.train_accuracy.value
    (1.0, 0.6, 0.6)
    >>> [p.count for p in (result.noisy_memorized, result.noisy_corrected, result.other)]
    [1, 1, 1]
    """
    true, trained = class_labels("clean", clean), class_labels("noisy", noisy)
    predicted, classes = _predicted(predictions)
    if not len(predicted) == len(true) == len(trained):
        raise ValueError(
            f"predictions, clean and noisy must have the same length, "
            f"got {len(predicted)}, {len(true)} and {len(trained)}"
        )
    for name, labels in (("clean", true), ("noisy", trained)):
        if classes is not None and labels.max() >= classes:
            raise ValueError(
                f"{name} must be below the {classes} classes that predictions has columns for, "
                f"got {labels.max().item()}"
            )

    def share(event: Tensor, among: Tensor) -> Proportion:
        return Proportion(int((event & among).sum()), int(among.sum()), confidence)

    learned, is_wrong = predicted == trained, true != trained
    everything = torch.ones_like(is_wrong)
    return Memorization(
        clean_learned=share(learned, ~is_wrong),
        noisy_memorized=share(learned, is_wrong),
        noisy_corrected=share(predicted == true, is_wrong),
        other=share(~learned & (predicted != true), is_wrong),
        noise_rate=share(is_wrong, everything),
        train_accuracy=share(learned, everything),
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


@dataclass(frozen=True)
class Plateau:
    """The last part of a training curve, and the noise rate that follows from its height.

    Attributes:
        reached: Whether the window is a plateau; if not, ``noise_rate`` is not an estimate.
        height: Mean accuracy in the window.
        drift: Rise of the least-squares line from the window's first epoch to its last.
        drift_stderr: Standard error of the drift.
        epoch_stderr: Standard error of the height from the fluctuation over epochs.
        degrees: Effective degrees of freedom of both standard errors.
        window: Number of epochs used.
        n: Number of training examples, or None.
        confidence: Confidence level of ``interval``.
    """

    reached: bool
    height: float
    drift: float
    drift_stderr: float
    epoch_stderr: float
    degrees: float
    window: int
    n: int | None
    confidence: float = 0.95

    @property
    def noise_rate(self) -> float:
        """One minus the height."""
        return 1 - self.height

    @property
    def stderr(self) -> float:
        """Standard error of the noise rate: over epochs and, if n is known, binomial."""
        binomial = self.height * (1 - self.height) / self.n if self.n else 0.0
        return math.hypot(self.epoch_stderr, math.sqrt(binomial))

    @property
    def interval(self) -> tuple[float, float]:
        """Interval for the noise rate, within [0, 1], if the assumptions hold.

        Combines Student's interval for the epochs with Wilson's for the binomial part, as in Zou &
        Donner 2008, Construction of confidence limits about effect measures.
        """
        rate, z = self.noise_rate, estimate.normal_quantile(self.confidence)
        low, high = estimate.wilson(rate, self.n, z) if self.n else (rate, rate)
        quantile = estimate.student_quantile((1 + self.confidence) / 2, int(self.degrees))
        width = quantile * self.epoch_stderr
        low, high = rate - math.hypot(rate - low, width), rate + math.hypot(high - rate, width)
        return max(0.0, low), min(1.0, high)


def plateau_noise_rate(
    train_accuracy: Sequence[float],
    *,
    n: int | None = None,
    window: int | None = None,
    tolerance: float = 0.01,
    confidence: float = 0.95,
) -> Plateau:
    r"""Estimate the share of wrong labels from where the training accuracy stops rising.

    A network that learns all right labels and memorizes no wrong one has the training accuracy
    :math:`1 - \rho` at noise rate :math:`\rho`. The curve cannot test this assumption: right labels
    that are not learned make the estimate too high, memorized wrong labels too low. If true labels
    are known, use :func:`label_memorization`.

    The window is a plateau if the 90 % interval of the drift lies within ± tolerance (two one-sided
    tests at 5 %). Standard errors assume first-order autoregressive (AR(1)) residuals. On synthetic
    curves with n = 10,000 the 95 % interval had 90 to 97 % coverage; without n, 84 to 97 % for
    autocorrelations up to 0.3, but only 50 % at 0.9 in windows of 10 or 25 epochs.

    References:
        Xie et al. 2021, Artificial neural variability for deep learning (where training stops);
        Schuirmann 1987 (two one-sided tests); Kendall 1954 (bias of the autocorrelation).

    Args:
        train_accuracy: Accuracy on the training labels, wrong ones included, after each epoch, from
            0 to 1; best measured at clean weights and without augmentation.
        n: Number of training examples. With n, the error is for the rate at which labels are
            corrupted; without n, for the share of wrong labels in this dataset.
        window: Number of epochs at the end to use, at least 10; by default a quarter of all. The
            learning rate should be constant in it.
        tolerance: Largest drift over the window that a plateau may have.
        confidence: Confidence level of the interval.

    >>> curve = [0.6 - 0.5 * 0.8**epoch for epoch in range(60)]
    >>> result = plateau_noise_rate(curve, n=10_000)
    >>> result.reached, round(result.noise_rate, 3), round(result.stderr, 4)
    (True, 0.4, 0.0049)
    """
    curve = as_array("train_accuracy", train_accuracy)
    if curve.ndim != 1 or len(curve) < SHORTEST_WINDOW:
        raise ValueError(
            f"train_accuracy must be one number for each of at least {SHORTEST_WINDOW} epochs, "
            f"got shape {curve.shape}"
        )
    check_fractions("train_accuracy", curve)
    if n is not None:
        n = integer("n", n, low=1)
    if window is None:
        window = max(SHORTEST_WINDOW, len(curve) // 4)
    elif integer("window", window, low=SHORTEST_WINDOW) > len(curve):
        raise ValueError(f"window must be at most the number of epochs, {len(curve)}, got {window}")
    tolerance = probability("tolerance", tolerance)
    height, drift, height_error, drift_error, degrees = _fit_line(curve[-window:])
    # Two one-sided tests at 5 % are one two-sided interval of 90 %.
    half_width = estimate.student_quantile(0.95, int(degrees)) * drift_error
    return Plateau(
        reached=abs(drift) + half_width <= tolerance,
        height=height,
        drift=drift,
        drift_stderr=drift_error,
        epoch_stderr=height_error,
        degrees=degrees,
        window=window,
        n=n,
        confidence=probability("confidence", confidence),
    )


def _fit_line(y: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float, float, float]:
    """Height and rise of the least-squares line, their standard errors, degrees of freedom."""
    w = len(y)
    t = np.arange(w) - (w - 1) / 2
    height, slope = float(y.mean()), float(t @ y / (t @ t))
    e = y - height - slope * t
    squares = float(e @ e)
    # The autocorrelation of residuals of a line is too small by about (2 + 4r)/w.
    r = (w * float(e[1:] @ e[:-1]) / squares + 2) / (w - 4) if squares > 0 else 0.0
    r = min(max(r, 0.0), 0.95)
    effective = w * (1 - r) / (1 + r)
    variance = squares / w * effective / max(effective - 2, 1)
    height_error = math.sqrt(variance / effective)
    slope_error = math.sqrt(variance * w / effective / (t @ t))
    # With fewer than 3 degrees of freedom intervals would be too wide to use.
    return height, slope * (w - 1), height_error, slope_error * (w - 1), max(effective - 2, 3.0)


@dataclass(frozen=True)
class GeneralizationGap:
    """How much worse a model is on new data than on its training data.

    Errors come from the finite number of new examples. ``loss_gap`` is test minus train,
    ``accuracy_gap`` train minus test. Without classes, ``train_accuracy`` is nan and the other
    accuracies are None.
    """

    train_loss: float
    test_loss: Estimate
    loss_gap: Estimate
    train_accuracy: float
    test_accuracy: Estimate | None
    accuracy_gap: Estimate | None


def generalization_gap(
    model: nn.Module,
    loss: Loss,
    train: Any,
    test: Any,
    *,
    confidence: float = 0.95,
    feed: Feed | None = None,
    batch_size: int = 1024,
) -> GeneralizationGap:
    r"""Measure how much worse a model is on new data.

    .. math:: L(\theta) - L(\theta, S)

    ``train`` are the training data without augmentation, ``test`` data that the model has not
    seen. The other arguments are as for :func:`neural_variability`.

    >>> model = nn.Linear(3, 2)
    >>> train = torch.randn(50, 3), torch.arange(50) % 2
    >>> test = torch.randn(50, 3), torch.arange(50) % 2
    >>> gap = generalization_gap(model, nn.functional.cross_entropy, train, test)
    >>> gap.loss_gap.samples
    50
    """
    probability("confidence", confidence)
    with Landscape(model, loss, train, feed=feed, batch_size=batch_size) as landscape:
        train_loss, train_accuracy = landscape.clean
    with Landscape(model, loss, test, feed=feed, batch_size=batch_size) as landscape:
        losses, hits = _each_example(landscape)
    has_classes = len(hits) > 0
    return GeneralizationGap(
        train_loss=train_loss,
        test_loss=Estimate.of(losses, confidence),
        loss_gap=Estimate.of(losses - train_loss, confidence),
        train_accuracy=train_accuracy,
        test_accuracy=Estimate.of(hits, confidence) if has_classes else None,
        accuracy_gap=Estimate.of(train_accuracy - hits, confidence) if has_classes else None,
    )


@torch.no_grad()
def _each_example(landscape: Landscape) -> tuple[np.ndarray, np.ndarray]:
    """Loss and accuracy of each example; no accuracies without classes."""
    losses, hits = [np.zeros(0)], [np.zeros(0)]
    with landscape.batches.one_pass() as batches:
        for batch in batches:
            outputs, targets = landscape.feed(landscape.model, batch)
            if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
                raise ValueError(
                    "the loss of single examples needs outputs and targets that are tensors, got "
                    f"{type(outputs).__name__} and {type(targets).__name__}"
                )
            outputs = half_to_float(outputs)
            each = loss_per_example(landscape.loss, outputs, targets).double().cpu()
            check_mean(landscape.loss(outputs, targets), each)
            losses.append(each.numpy())
            if are_classes(outputs, targets):
                right = (outputs.argmax(1) == targets).reshape(len(targets), -1)
                hits.append(right.double().mean(1).cpu().numpy())
    return np.concatenate(losses), np.concatenate(hits)
