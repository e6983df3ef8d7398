"""Estimate of the noise rate from the plateau of the training accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuvar._validate import integer, probability
from neuvar.measures.conversion import as_tensor, check_fractions
from neuvar.measures.estimate import normal_quantile, student_quantile, wilson

SHORTEST_WINDOW = 10
"""Epochs needed to tell a plateau, and its error, from a slope."""


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

        Combines Student's interval for the epochs with Wilson's for the binomial part.

        References:
            Zou & Donner 2008, Construction of confidence limits about effect measures.
        """
        rate, z = self.noise_rate, normal_quantile(self.confidence)
        low, high = wilson(rate, self.n, z) if self.n else (rate, rate)
        reach = student_quantile((1 + self.confidence) / 2, int(self.degrees)) * self.epoch_stderr
        low, high = rate - math.hypot(rate - low, reach), rate + math.hypot(high - rate, reach)
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
    tests at 5 %). Errors take the residuals of the line as first-order autoregressive. On synthetic
    curves with n = 10,000 the 95 % interval had 90 to 97 % coverage; without n, 84 to 97 % for
    autocorrelations up to 0.3, but only 50 % at 0.9 in windows of 10 or 25 epochs.

    References:
        Xie et al. 2021, Artificial neural variability for deep learning (where training stops);
        Schuirmann 1987 (two one-sided tests); Kendall 1954 (bias of the autocorrelation).

    Args:
        train_accuracy: Accuracy on the training labels, wrong ones included, after each epoch, from
            0 to 1; best measured at clean weights and without augmentation.
        n: Number of training examples. With it the error is that of the rate at which labels go
            wrong; without, of the share that is wrong among these examples.
        window: Number of epochs at the end to use, at least 10; by default a quarter of all. The
            learning rate should be constant in it.
        tolerance: Largest drift over the window that counts as none.
        confidence: Confidence level of the interval.

    >>> curve = [0.6 - 0.5 * 0.8**epoch for epoch in range(60)]
    >>> result = plateau_noise_rate(curve, n=10_000)
    >>> result.reached, round(result.noise_rate, 3), round(result.stderr, 4)
    (True, 0.4, 0.0049)
    """
    curve = _curve(train_accuracy)
    if n is not None:
        n = integer("n", n, low=1)
    if window is None:
        window = max(SHORTEST_WINDOW, len(curve) // 4)
    elif integer("window", window, low=SHORTEST_WINDOW) > len(curve):
        raise ValueError(f"window must be at most the {len(curve)} epochs given, got {window}")
    tolerance = probability("tolerance", tolerance)
    height, drift, height_error, drift_error, degrees = _fit_line(curve[-window:])
    # Two one-sided tests at 5 % are one two-sided interval of 90 %.
    reach = student_quantile(0.95, int(degrees)) * drift_error
    return Plateau(
        reached=abs(drift) + reach <= tolerance,
        height=height,
        drift=drift,
        drift_stderr=drift_error,
        epoch_stderr=height_error,
        degrees=degrees,
        window=window,
        n=n,
        confidence=probability("confidence", confidence),
    )


def _curve(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    curve = as_tensor("train_accuracy", values).double().numpy()
    if curve.ndim != 1 or len(curve) < SHORTEST_WINDOW:
        raise ValueError(
            f"train_accuracy must be one number for each of at least {SHORTEST_WINDOW} epochs, "
            f"got shape {curve.shape}"
        )
    check_fractions("train_accuracy", curve)
    return curve


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
    # With fewer than 3 degrees of freedom intervals would be useless.
    return height, slope * (w - 1), height_error, slope_error * (w - 1), max(effective - 2, 3.0)
