"""A mean and how sure it is."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from neuvar._validate import probability


@dataclass(frozen=True)
class Estimate:
    """A mean over independent samples, with its error.

    If a sample is not finite, the mean and both ends of the interval are infinite.

    Attributes:
        mean: The estimate.
        stderr: Its standard error.
        interval: Holds the true mean with probability ``confidence``.
        samples: How many independent samples it is the mean of.
        confidence: The probability that ``interval`` is meant to have.
    """

    mean: float
    stderr: float
    interval: tuple[float, float]
    samples: int
    confidence: float = 0.95

    @classmethod
    def of(cls, samples: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Estimate:
        """Estimate a mean from samples.

        >>> Estimate.of([1.0, 2.0, 3.0]).mean
        2.0
        """
        x = np.asarray(samples, dtype=np.float64)
        confidence = probability("confidence", confidence)
        mean, stderr = _mean_and_error(x)
        tail = (1 - confidence) / 2
        return cls(mean, stderr, (limit(x, tail), limit(x, 1 - tail)), len(x), confidence)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.mean:.4g} [{low:.4g}, {high:.4g}]"


def _mean_and_error(x: np.ndarray) -> tuple[float, float]:
    if not np.isfinite(x).all():
        # Where a loss overflows, or is no number any more, its mean is beyond any number.
        return math.inf, math.inf
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x)))


def limit(samples: Sequence[float] | np.ndarray, level: float) -> float:
    r"""One-sided limit: the true mean lies below it with probability ``level``.

    Losses at random weights are skewed: a few steep directions make a few draws large. Student's
    interval then misses too often on one side. Hall's transformation
    :math:`g(T) = T + aT^2 + a^2T^3/3 + a/2` with :math:`a = \hat\gamma / (3\sqrt{n})` removes the
    skewness :math:`\hat\gamma` from the studentised mean T, and its inverse is in closed form.

    References:
        Hall: On the removal of skewness by transformation, JRSS B 54(1), 1992.

    >>> x = [0.1, 0.3, 0.2, 1.9, 0.4]
    >>> limit(x, 0.5) < limit(x, 0.95)
    True
    """
    x = np.asarray(samples, dtype=np.float64)
    if len(x) < 2:
        raise ValueError(f"an error needs at least 2 samples, got {len(x)}")
    mean, stderr = _mean_and_error(x)
    if not math.isfinite(mean):
        return math.inf
    if stderr == 0:
        return mean
    n = len(x)
    spread = x.std(ddof=1)
    skew = float(np.mean(((x - mean) / spread) ** 3)) * n**2 / ((n - 1) * (n - 2)) if n > 2 else 0.0
    a = skew / (3 * math.sqrt(n))
    t = student_quantile(1 - level, n - 1)
    if abs(a) > 1e-9:
        t = float(np.cbrt(1 + 3 * a * (t - a / 2)) - 1) / a
    return mean - stderr * t


@functools.lru_cache(maxsize=1024)
def student_quantile(level: float, dof: int) -> float:
    """Quantile of Student's t distribution with a whole number of degrees of freedom.

    >>> round(student_quantile(0.975, 9), 4)
    2.2622
    """
    if dof > 1000:  # by then the first terms of its expansion are exact to ten digits
        z = NormalDist().inv_cdf(level)
        return z + (z**3 + z) / (4 * dof) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
    low, high = -1.0, 1.0
    while _student_cdf(high, dof) < level:
        high *= 2
    while _student_cdf(low, dof) > level:
        low *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _student_cdf(middle, dof) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_cdf(t: float, dof: int) -> float:
    """Distribution function, as the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    if dof % 2:
        k = np.arange(1, (dof - 1) // 2)
        terms = np.cumprod(np.concatenate([[cosine], 2 * k / (2 * k + 1) * cosine**2]))
        inside = 2 / math.pi * (angle + (sine * terms.sum() if dof > 1 else 0.0))
    else:
        k = np.arange(1, dof // 2)
        terms = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k) * cosine**2]))
        inside = sine * terms.sum()
    return float((1 + inside) / 2)
