"""Means and proportions with confidence intervals."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

from neuvar._validate import integer, probability

Number = TypeVar("Number", float, np.ndarray[Any, np.dtype[Any]])


@dataclass(frozen=True)
class Estimate:
    """A mean over independent samples, with its standard error.

    ``interval`` contains the true mean with probability ``confidence``. If a sample is not finite,
    the mean and both ends of the interval are infinite.
    """

    mean: float
    stderr: float
    interval: tuple[float, float]
    samples: int
    confidence: float = 0.95

    @classmethod
    def of(
        cls,
        samples: Sequence[float] | np.ndarray,
        confidence: float = 0.95,
        *,
        within: tuple[float, float] = (-math.inf, math.inf),
    ) -> Estimate:
        """Estimate a mean from samples; the interval is cut where no mean can be.

        >>> Estimate.of([1.0, 2.0, 3.0]).mean
        2.0
        """
        x, confidence = np.asarray(samples, float), probability("confidence", confidence)
        tail = (1 - confidence) / 2
        low, high = max(limit(x, tail), within[0]), min(limit(x, 1 - tail), within[1])
        return cls(*_mean_and_error(x), (low, high), len(x), confidence)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.mean:.4g} [{low:.4g}, {high:.4g}]"


def _mean_and_error(x: np.ndarray) -> tuple[float, float]:
    if not np.isfinite(x).all():  # the loss has overflowed
        return math.inf, math.inf
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x)))


def limit(samples: Sequence[float] | np.ndarray, level: float) -> float:
    r"""One-sided confidence limit: the true mean is below it with probability ``level``.

    Losses at random weights are skewed, so Student's interval misses too often on one side. Hall's
    transformation :math:`g(T) = T + aT^2 + a^2T^3/3 + a/2` with
    :math:`a = \hat\gamma / (3\sqrt{n})` removes the skewness :math:`\hat\gamma` from the
    studentized mean T, and has an inverse in closed form.

    References:
        Hall 1992, On the removal of skewness by transformation.

    >>> x = [0.1, 0.3, 0.2, 1.9, 0.4]
    >>> limit(x, 0.5) < limit(x, 0.95)
    True
    """
    x, n = np.asarray(samples, float), len(samples)
    if n < 2:
        raise ValueError(f"a standard error needs at least 2 samples, got {n}")
    mean, stderr = _mean_and_error(x)
    if not math.isfinite(mean) or stderr == 0:
        return mean
    z = (x - mean) / x.std(ddof=1)
    skewness = float(np.mean(z**3)) * n**2 / ((n - 1) * (n - 2)) if n > 2 else 0.0
    a = skewness / (3 * math.sqrt(n))
    t = student_quantile(1 - level, n - 1)
    if abs(a) > 1e-9:
        t = float(np.cbrt(1 + 3 * a * (t - a / 2)) - 1) / a
    return mean - stderr * t


@functools.lru_cache(maxsize=1024)
def student_quantile(level: float, dof: int) -> float:
    """Quantile of Student's t distribution with an integer number of degrees of freedom.

    >>> round(student_quantile(0.975, 9), 4)
    2.2622
    """
    if dof > 1000:  # the first terms of the expansion are exact to ten digits
        z = NormalDist().inv_cdf(level)
        return z + (z**3 + z) / (4 * dof) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
    bound = 1.0
    while not _student_cdf(-bound, dof) <= level <= _student_cdf(bound, dof):
        bound *= 2
    return bisect(lambda t: _student_cdf(t, dof) < level, -bound, bound)


def bisect(is_below: Callable[[float], bool], low: float, high: float) -> float:
    """Smallest number for which ``is_below`` is False, to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        if is_below(middle):
            low = middle
        else:
            high = middle
    return high


def _student_cdf(t: float, dof: int) -> float:
    """Student's distribution function: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle, odd = math.atan2(t, math.sqrt(dof)), dof % 2
    sine, cosine = math.sin(angle), math.cos(angle)
    n = np.arange(1 + odd, dof - 2, 2)
    series = sine * (1 + np.cumprod(n / (n + 1) * cosine**2).sum())
    if odd:
        series = 2 / math.pi * (angle + (cosine * series if dof > 1 else 0.0))
    return float((1 + series) / 2)


@dataclass(frozen=True)
class Proportion:
    """``count`` of ``of`` cases, with the binomial error of this proportion.

    >>> wrong = Proportion(count=8, of=20)
    >>> wrong.value, round(wrong.stderr, 3)
    (0.4, 0.11)
    >>> [round(end, 3) for end in wrong.interval]
    [0.219, 0.613]
    """

    count: int
    of: int
    confidence: float = 0.95

    def __post_init__(self) -> None:
        probability("confidence", self.confidence)
        integer("of", self.of, low=0)
        if integer("count", self.count, low=0) > self.of:
            raise ValueError(f"count must be at most of = {self.of}, got {self.count}")

    @property
    def value(self) -> float:
        """The proportion, from 0 to 1; nan if ``of`` is 0."""
        return self.count / self.of if self.of else math.nan

    @property
    def stderr(self) -> float:
        r"""Standard error :math:`\sqrt{p(1 - p)/n}`; nan if ``of`` is 0.

        It is 0 for proportions of 0 and 1. The interval has a width above 0 even then.
        """
        return math.sqrt(self.value * (1 - self.value) / self.of) if self.of else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval (1927); (0, 1) if ``of`` is 0.

        The lower end is exactly 0 if ``count`` is 0; the upper end is exactly 1 if it is ``of``.
        """
        z = normal_quantile(self.confidence)
        return wilson(self.value, self.of, z) if self.of else (0.0, 1.0)


def bootstrap(
    statistic: Callable[[np.ndarray], float], n: int, resamples: int, generator: np.random.Generator
) -> np.ndarray[Any, np.dtype[Any]]:
    """Values of a statistic in bootstrap resamples of n examples, sorted.

    ``statistic`` is called with the number of times that each example was drawn.
    """
    draws = (np.bincount(generator.integers(n, size=n), minlength=n) for _ in range(resamples))
    return np.sort([statistic(times.astype(float)) for times in draws])


def central_interval(
    values: Sequence[float] | np.ndarray[Any, np.dtype[Any]], confidence: float
) -> tuple[float, float]:
    """Interval between quantiles that contains a share ``confidence`` of the values."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def normal_quantile(confidence: float) -> float:
    """Half-width of a two-sided normal interval with this confidence, in standard errors."""
    return -NormalDist().inv_cdf((1 - probability("confidence", confidence)) / 2)


def wilson(share: Number, of: Number, z: float) -> tuple[Number, Number]:
    """Wilson's score interval of z standard errors for a proportion ``share`` of ``of`` cases.

    >>> low, high = wilson(np.array([0.0, 0.4, 1.0]), np.array(20.0), 1.96)
    >>> low.round(3).tolist(), high.round(3).tolist()
    ([0.0, 0.219, 0.839], [0.161, 0.613, 1.0])
    """
    return _wilson_low(share, of, z), 1 - _wilson_low(1 - share, of, z)


def _wilson_low(share: Number, of: Number, z: float) -> Number:
    # The product of the roots of Wilson's quadratic is known, so the smaller root follows from
    # the larger one without cancellation, and is 0 for a share of 0.
    square = share * (1 - share) / of + (z / (2 * of)) ** 2
    if isinstance(share, np.ndarray):
        larger = share + z**2 / (2 * of) + z * np.sqrt(square)
        return np.asarray(np.divide(share**2, larger, out=np.zeros_like(share), where=share != 0))
    return share**2 / (share + z**2 / (2 * of) + z * math.sqrt(square)) if share else 0.0
