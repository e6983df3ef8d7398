"""How well a score of uncertainty separates inputs of another kind from known ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuvar._validate import probability
from neuvar.measures.conversion import as_tensor
from neuvar.measures.estimate import bisect, normal_quantile

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class AreaUnderROC:
    """Area under the ROC curve: 0.5 by chance, 1 if all outside scores are above all inside ones.

    Attributes:
        value: Probability that a random outside score is above a random inside one; ties count
            half.
        stderr: DeLong's standard error; 0 if the scores are separated completely.
        inside: Number of inputs of the known kind.
        outside: Number of inputs of another kind.
        confidence: Confidence level of ``interval``.
    """

    value: float
    stderr: float
    inside: int
    outside: int
    confidence: float = 0.95

    @property
    def interval(self) -> tuple[float, float]:
        """Newcombe's score interval, his method 5, which is not empty at 0 and 1.

        References:
            Newcombe 2006, Confidence intervals for an effect size measure based on the
            Mann-Whitney statistic.
        """
        z = normal_quantile(self.confidence)
        return self._end(self.value, z), 1 - self._end(1 - self.value, z)

    def _end(self, value: float, z: float) -> float:
        """Smallest area that lies within z of its own standard errors of ``value``."""
        pairs, mean = self.inside * self.outside, (self.inside + self.outside) / 2

        def too_small(area: float) -> bool:
            spread = (1 - area) / (2 - area) + area / (1 + area)
            variance = area * (1 - area) / pairs * (1 + (mean - 1) * spread)
            return value - area > z * math.sqrt(variance)

        return bisect(too_small, 0.0, value) if value else 0.0

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.4g} [{low:.4g}, {high:.4g}]"


def ood_auroc(inside: Any, outside: Any, *, confidence: float = 0.95) -> AreaUnderROC:
    """Area under the ROC curve for detecting inputs of another kind (out of distribution).

    References:
        Hendrycks & Gimpel 2017, A baseline for detecting misclassified and out-of-distribution
        examples; DeLong et al. 1988, Comparing the areas under two or more correlated ROC curves.

    Args:
        inside: Scores of uncertainty of known inputs, such as ``prediction.entropy``, shape (n,).
        outside: The same scores of inputs of another kind, shape (m,).
        confidence: Confidence level of the interval.

    >>> ood_auroc([0.1, 0.2, 0.6], [0.5, 0.9, 0.7]).value.__round__(3)
    0.889
    """
    probability("confidence", confidence)
    a, b = _scores("inside", inside), _scores("outside", outside)
    above_inside = _placements(b, a)  # for each outside score, the share of inside ones below it
    below_outside = 1 - _placements(a, b)
    variance = above_inside.var(ddof=1) / len(b) + below_outside.var(ddof=1) / len(a)
    value = float(above_inside.mean())
    return AreaUnderROC(value, math.sqrt(variance), len(a), len(b), confidence)


def _scores(name: str, values: Any) -> Array:
    scores = as_tensor(name, values)
    if scores.ndim != 1 or len(scores) < 2 or not scores.double().isfinite().all():
        raise ValueError(
            f"{name} must be at least two finite scores of shape (n,), got {tuple(scores.shape)}"
        )
    array: Array = scores.double().numpy()
    return array


def _placements(scores: Array, others: Array) -> Array:
    """Share of the others that are below each score; equal ones count half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")
    shares: Array = below / (2 * len(others))
    return shares
