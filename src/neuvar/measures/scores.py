"""Scores of predicted probabilities: proper scores, selective accuracy, and area under the ROC."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neuvar import _validate
from neuvar.measures.conversion import as_array, as_tensor, probabilities_and_labels
from neuvar.measures.estimate import (
    Estimate,
    Proportion,
    bisect,
    bootstrap,
    central_interval,
    normal_quantile,
    wilson,
)
from neuvar.measures.plots import plot_band

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = np.ndarray[Any, np.dtype[Any]]


def log_loss(outputs: Any, labels: Any, *, logits: bool, confidence: float = 0.95) -> Estimate:
    r"""Mean log loss (cross entropy) of predicted probabilities, in nats.

    .. math:: -\frac1n \sum_i \log p_i(y_i)

    The interval is for the mean over new examples. It is infinite if a label has probability 0.

    Args:
        outputs: Logits or probabilities, shape (n, classes).
        labels: True classes, shape (n,).
        logits: True if ``outputs`` are logits, False if they are probabilities.
        confidence: Confidence level of the interval.

    >>> round(log_loss(torch.tensor([[0.8, 0.2]] * 4), [0, 0, 0, 1], logits=False).mean, 3)
    0.57
    """
    p, y = probabilities_and_labels(outputs, labels, logits=logits)
    # softmax may round a small probability to 0; log_softmax keeps its logarithm.
    logs = as_tensor("outputs", outputs).double().log_softmax(1) if logits else p.log()
    losses = -logs.gather(1, y[:, None]).flatten().numpy()
    return Estimate.of(losses, confidence, within=(0, math.inf))


def brier_score(outputs: Any, labels: Any, *, logits: bool, confidence: float = 0.95) -> Estimate:
    r"""Brier score: the squared distance of the probabilities from the truth, from 0 to 2.

    .. math:: \frac1n \sum_i \sum_c \big(p_i(c) - [c = y_i]\big)^2

    This is Brier's own definition, a sum over classes. With two classes it is twice the
    usual binary score. The arguments are as for :func:`log_loss`.

    References:
        Brier 1950, Verification of forecasts expressed in terms of probability.

    >>> round(brier_score(torch.tensor([[0.8, 0.2]] * 4), [0, 0, 0, 1], logits=False).mean, 3)
    0.38
    """
    p, y = probabilities_and_labels(outputs, labels, logits=logits)
    p_label = p.gather(1, y[:, None]).flatten()
    distances = p.square().sum(1) - 2 * p_label + 1
    return Estimate.of(distances.numpy(), confidence, within=(0, 2))


@dataclass(frozen=True, eq=False)
class SelectiveAccuracy:
    """Accuracy on the most confident examples, for every share of examples kept.

    Attributes:
        thresholds: Distinct scores, the most confident first.
        kept: Number of examples whose score is at least the threshold.
        right: Number of correct predictions among them.
        n: Number of examples.
        area: Area under the curve of accuracy against coverage; 1 minus the mean risk (AURC).
        resampled: ``area`` in bootstrap resamples of the examples, sorted.
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
        # Floating-point rounding may put coverage * n slightly above a whole number.
        k = int(np.searchsorted(self.kept, coverage * self.n - 1e-9))
        return Proportion(int(self.right[k]), int(self.kept[k]), self.confidence)

    def plot(self, ax: Axes | None = None, *, label: str | None = None) -> Axes:
        """Plot accuracy against coverage, with the interval as a band, on ``ax`` or new axes."""
        # The band of the first few examples is so wide that it would hide the rest.
        shown = self.coverage >= min(0.02, self.coverage[-1])
        x, y = self.coverage[shown], self.accuracy[shown]
        z = normal_quantile(self.confidence)
        ax = plot_band(ax, x, y, wilson(y, self.kept[shown].astype(float), z), label)
        ax.set(xlabel="coverage: share of examples kept, most confident first", ylabel="accuracy")
        return ax


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
    """Accuracy against coverage: keep the most confident examples, drop the others.

    References:
        Geifman & El-Yaniv 2017, Selective classification for deep neural networks.

    Args:
        outputs: Logits or probabilities, shape (n, classes).
        labels: True classes, shape (n,).
        logits: True if ``outputs`` are logits, False if they are probabilities.
        score: Confidence of the model in each example, such as ``-prediction.mutual_information``;
            by default the largest probability.
        resamples: Number of bootstrap resamples.
        confidence: Confidence level of the intervals.
        seed: Seed of the resampling.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> result = selective_accuracy(p, [0, 0, 0, 1], logits=False)
    >>> result.at(0.75).value, result.at(1).value
    (1.0, 0.75)
    """
    p, truth = probabilities_and_labels(outputs, labels, logits=logits)
    resamples = _validate.integer("resamples", resamples, low=100)
    _validate.probability("confidence", confidence)
    largest, predicted = p.max(1)
    values = largest if score is None else as_tensor("score", score).double()
    if values.shape != truth.shape or not values.isfinite().all():
        raise ValueError(
            f"score must be {len(truth)} finite numbers, one per example, got shape "
            f"{tuple(values.shape)}"
        )
    order = torch.argsort(values, descending=True, stable=True)
    scores, correct = values[order].numpy(), (predicted == truth)[order].numpy().astype(float)
    ends = np.flatnonzero(np.diff(scores, append=np.nan) != 0)  # the last of each group of ties
    n = len(scores)
    generator = np.random.Generator(np.random.PCG64(_validate.seed(seed)))

    def area(times: Array) -> float:
        kept, right = np.cumsum(times)[ends], np.cumsum(times * correct)[ends]
        shares = np.divide(right, kept, out=np.zeros_like(right), where=kept > 0)
        return float(np.diff(kept, prepend=0) @ shares / n)

    return SelectiveAccuracy(
        thresholds=scores[ends],
        kept=ends + 1,
        right=np.cumsum(correct)[ends].astype(int),
        n=n,
        area=area(np.ones(n)),
        resampled=bootstrap(area, n, resamples, generator),
        confidence=confidence,
    )


@dataclass(frozen=True)
class AreaUnderROC:
    """Area under the ROC curve: 0.5 by chance, 1 if all outside scores are above all inside ones.

    Attributes:
        value: Probability that a random outside score is above a random inside one; ties count
            half.
        stderr: DeLong's standard error; 0 if the scores do not overlap.
        inside: Number of in-distribution inputs.
        outside: Number of out-of-distribution inputs.
        confidence: Confidence level of ``interval``.
    """

    value: float
    stderr: float
    inside: int
    outside: int
    confidence: float = 0.95

    @property
    def interval(self) -> tuple[float, float]:
        """Newcombe's score interval (his method 5); its width is above 0 even at 0 and 1.

        References:
            Newcombe 2006, Confidence intervals for an effect size measure based on the
            Mann-Whitney statistic.
        """
        z = normal_quantile(self.confidence)
        pairs, mean = self.inside * self.outside, (self.inside + self.outside) / 2

        def lower(value: float) -> float:
            """Smallest area that is at most z standard errors below a value."""

            def too_small(area: float) -> bool:
                spread = (1 - area) / (2 - area) + area / (1 + area)
                variance = area * (1 - area) / pairs * (1 + (mean - 1) * spread)
                return value - area > z * math.sqrt(variance)

            return bisect(too_small, 0.0, value) if value else 0.0

        return lower(self.value), 1 - lower(1 - self.value)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.4g} [{low:.4g}, {high:.4g}]"


def ood_auroc(inside: Any, outside: Any, *, confidence: float = 0.95) -> AreaUnderROC:
    """Area under the ROC curve (AUROC) for detecting out-of-distribution inputs.

    References:
        Hendrycks & Gimpel 2017, A baseline for detecting misclassified and out-of-distribution
        examples; DeLong et al. 1988, Comparing the areas under two or more correlated ROC curves.

    Args:
        inside: Uncertainty of in-distribution inputs, such as ``prediction.entropy``, shape (n,).
        outside: The same score for out-of-distribution inputs, shape (m,).
        confidence: Confidence level of the interval.

    >>> ood_auroc([0.1, 0.2, 0.6], [0.5, 0.9, 0.7]).value.__round__(3)
    0.889
    """
    _validate.probability("confidence", confidence)
    a, b = _scores("inside", inside), _scores("outside", outside)
    above_inside = _placements(b, a)  # for each outside score, the share of inside ones below it
    below_outside = 1 - _placements(a, b)
    variance = above_inside.var(ddof=1) / len(b) + below_outside.var(ddof=1) / len(a)
    value = float(above_inside.mean())
    return AreaUnderROC(value, math.sqrt(variance), len(a), len(b), confidence)


def _scores(name: str, values: Any) -> Array:
    scores = as_array(name, values)
    if scores.ndim != 1 or len(scores) < 2 or not np.isfinite(scores).all():
        raise ValueError(
            f"{name} must be at least two finite scores of shape (n,), got {scores.shape}"
        )
    return scores


def _placements(scores: Array, others: Array) -> Array:
    """Share of the others that are below each score; equal ones count half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")
    shares: Array = below / (2 * len(others))
    return shares
