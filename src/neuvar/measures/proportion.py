"""Proportions: a count out of a number of cases, with its error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

from neuvar._validate import integer, probability

Number = TypeVar("Number", float, np.ndarray[Any, np.dtype[Any]])


@dataclass(frozen=True)
class Proportion:
    """So many of so many cases, as a share with a binomial error.

    Attributes:
        count: In how many cases it happened.
        of: How many cases there were; 0 is allowed, and then nothing is known.

    >>> wrong = Proportion(count=8, of=20)
    >>> wrong.value, round(wrong.stderr, 3)
    (0.4, 0.11)
    >>> low, high = wrong.interval(confidence=0.95)
    >>> round(low, 3), round(high, 3)
    (0.219, 0.613)
    """

    count: int
    of: int

    def __post_init__(self) -> None:
        for name, number in (("count", self.count), ("of", self.of)):
            integer(name, number, low=0)
        if self.count > self.of:
            raise ValueError(f"count must be at most of = {self.of}, got {self.count}")

    @property
    def value(self) -> float:
        """The share, between 0 and 1; nan if there were no cases."""
        return self.count / self.of if self.of else math.nan

    @property
    def stderr(self) -> float:
        r"""Standard error :math:`\sqrt{p(1 - p)/n}` of the share; nan if there were no cases.

        It is 0 when none or all cases count, which does not mean that the share is known exactly:
        :meth:`interval` is right there, too.
        """
        return math.sqrt(self.value * (1 - self.value) / self.of) if self.of else math.nan

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's score interval for the share; (0, 1) if there were no cases.

        Its lower end is exactly 0 when no case counts, its upper end exactly 1 when all do.

        References:
            Wilson 1927, Probable inference, the law of succession, and statistical inference.
        """
        z = normal_quantile(confidence)
        return wilson(self.value, self.of, z) if self.of else (0.0, 1.0)


def normal_quantile(confidence: float) -> float:
    """How many standard errors a two-sided interval of this confidence reaches to either side."""
    return -NormalDist().inv_cdf((1 - probability("confidence", confidence)) / 2)


def wilson(share: Number, of: Number, z: float) -> tuple[Number, Number]:
    """Wilson's score interval which reaches z standard errors to either side of a share.

    >>> low, high = wilson(np.array([0.0, 0.4, 1.0]), np.array(20.0), 1.96)
    >>> low.round(3).tolist(), high.round(3).tolist()
    ([0.0, 0.219, 0.839], [0.161, 0.613, 1.0])
    """
    return _wilson_low(share, of, z), 1 - _wilson_low(1 - share, of, z)


def _wilson_low(share: Number, of: Number, z: float) -> Number:
    # The roots of Wilson's quadratic have a product that is known: the smaller root from the
    # larger one loses no digits, and is 0 for a share of 0.
    square = share * (1 - share) / of + (z / (2 * of)) ** 2
    if isinstance(share, np.ndarray):
        larger = share + z**2 / (2 * of) + z * np.sqrt(square)
        return np.asarray(np.divide(share**2, larger, out=np.zeros_like(share), where=share != 0))
    return share**2 / (share + z**2 / (2 * of) + z * math.sqrt(square)) if share else 0.0
