"""Selective accuracy: how often a model is right on the examples that it is sure of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neuvar import _validate
from neuvar.measures.conversion import as_tensor, probabilities_and_labels
from neuvar.measures.estimate import Proportion, central_interval
from neuvar.measures.plots import plot_selective

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class SelectiveAccuracy:
    """Accuracy on the most confident examples, for every share of examples kept.

    Attributes:
        thresholds: Distinct scores, the most confident first.
        kept: Number of examples whose score is at least the threshold.
        right: Number of correct predictions among them.
        n: Number of examples.
        area: Area under the curve of accuracy against coverage; 1 minus the mean risk (AURC).
        resampled: Its values in bootstrap resamples of the examples, sorted.
        confidence: Confidence level of the intervals.
    """

    thresholds: Array = field(repr=False)
    kept: Array = field(repr=False)
    right: Array = field(repr=False)
    n: int
    area: float
    resampled: Array = field(repr=False)
    confidence: float = 0.95

    @property
    def coverage(self) -> Array:
        """Share of examples kept at each threshold."""
        coverage: Array = self.kept / self.n
        return coverage

    @property
    def accuracy(self) -> Array:
        """Accuracy on the examples kept at each threshold."""
        accuracy: Array = self.right / self.kept
        return accuracy

    @property
    def stderr(self) -> float:
        """Bootstrap standard error of ``area``."""
        return float(np.std(self.resampled, ddof=1))

    @property
    def interval(self) -> tuple[float, float]:
        """Bootstrap interval of ``area``."""
        return central_interval(self.resampled, self.confidence)

    def at(self, coverage: float) -> Proportion:
        """Accuracy on the smallest set of most confident examples with at least this coverage.

        Examples with equal scores are kept or left out together.
        """
        _validate.number("coverage", coverage, above=0, high=1)
        # A share such as 0.3 of 10 is above 3 by rounding.
        k = int(np.searchsorted(self.kept, coverage * self.n - 1e-9))
        return Proportion(int(self.right[k]), int(self.kept[k]), self.confidence)

    def plot(self, ax: Axes | None = None, *, label: str | None = None) -> Axes:
        """Plot accuracy against coverage, with the interval as a band, on ``ax`` or new axes."""
        return plot_selective(self, ax, label)


def selective_accuracy(
    outputs: Any,
    labels: Any,
    *,
    logits: bool,
    score: Any = None,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> SelectiveAccuracy:
    """Accuracy against coverage: keep the examples that the model is sure of, drop the others.

    References:
        Geifman & El-Yaniv 2017, Selective classification for deep neural networks.

    Args:
        outputs: Logits or probabilities, shape (n, classes).
        labels: True classes, shape (n,).
        logits: Whether ``outputs`` are logits or probabilities.
        score: How sure the model is of each example, larger is surer; by default the largest
            probability. For example ``-prediction.mutual_information``.
        resamples: Number of bootstrap resamples.
        confidence: Confidence level of the intervals.
        seed: Seed of the resampling.

    >>> import torch
    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> found = selective_accuracy(p, [0, 0, 0, 1], logits=False)
    >>> found.at(0.75).value, found.at(1).value
    (1.0, 0.75)
    """
    p, truth = probabilities_and_labels(outputs, labels, logits=logits)
    resamples = _validate.integer("resamples", resamples, low=100)
    _validate.probability("confidence", confidence)
    largest, predicted = p.max(1)
    sure = largest if score is None else as_tensor("score", score).double()
    if sure.shape != truth.shape or not sure.isfinite().all():
        raise ValueError(
            f"score must be {len(truth)} finite numbers, one per example, got shape "
            f"{tuple(sure.shape)}"
        )
    order = torch.argsort(sure, descending=True, stable=True)
    scores, correct = sure[order].numpy(), (predicted == truth)[order].numpy().astype(float)
    ends = np.flatnonzero(np.diff(scores, append=np.nan) != 0)  # the last of each group of ties
    n = len(scores)
    generator = np.random.Generator(np.random.PCG64(_validate.seed(seed)))

    def area(times: Array) -> float:
        kept, right = np.cumsum(times)[ends], np.cumsum(times * correct)[ends]
        shares = np.divide(right, kept, out=np.zeros_like(right), where=kept > 0)
        return float(np.diff(kept, prepend=0) @ shares / n)

    def resample() -> float:
        return area(np.bincount(generator.integers(n, size=n), minlength=n).astype(float))

    return SelectiveAccuracy(
        thresholds=scores[ends],
        kept=ends + 1,
        right=np.cumsum(correct)[ends].astype(int),
        n=n,
        area=area(np.ones(n)),
        resampled=np.sort([resample() for _ in range(resamples)]),
        confidence=confidence,
    )
