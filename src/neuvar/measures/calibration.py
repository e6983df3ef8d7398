"""Calibration: whether a classifier is right as often as it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from neuvar import _validate
from neuvar._validate import integer, probability
from neuvar.measures.memorization import class_numbers, tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class CalibrationBin:
    """Examples of similar confidence.

    Attributes:
        confidence: Their mean confidence in the predicted class.
        accuracy: Which share of them is predicted right.
        count: How many they are.
        expected: Between which accuracies a calibrated model would come out in 95 % of all cases.
    """

    confidence: float
    accuracy: float
    count: int
    expected: tuple[float, float]


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error of a classifier's predicted class, with all that it rests on.

    The error is a mean of absolute values and so comes out above 0 also for a perfectly calibrated
    model. Compare ``value`` with ``floor``, or look at :meth:`interval`, before you call a model
    badly calibrated, and never compare values of different n or numbers of bins.

    Attributes:
        value: Expected calibration error, the plug-in estimate that papers report.
        maximum: Largest gap of any bin. Small bins make it large by chance.
        n: Number of examples.
        bins: Bins in order of confidence, without those that hold no example.
        scheme: How the bins were made.
        resampled: Its values in bootstrap resamples of the examples, sorted.
        calibrated: Its values for calibrated models with the same confidences, sorted.
    """

    value: float
    maximum: float
    n: int
    bins: tuple[CalibrationBin, ...] = field(repr=False)
    scheme: str
    resampled: tuple[float, ...] = field(repr=False)
    calibrated: tuple[float, ...] = field(repr=False)

    @property
    def stderr(self) -> float:
        """Standard error by the bootstrap, with the bins held fixed."""
        return float(np.std(self.resampled, ddof=1))

    @property
    def bias_reduced(self) -> float:
        r"""Value less the bootstrap's estimate of its bias: :math:`2\,\text{ECE} - \bar{ECE^*}`.

        It takes less than half of the bias away for a calibrated model, and more of it the larger
        the gaps are. It is not cut at 0, so that means over runs stay fair.

        References:
            Efron & Tibshirani 1993, An introduction to the bootstrap, chapter 10. The correction
            of Kumar et al. 2019, which is unbiased, is for the squared error.
        """
        return 2 * self.value - float(np.mean(self.resampled))

    @property
    def floor(self) -> float:
        """What a perfectly calibrated model with these confidences would show, on average.

        Outcomes are drawn from the confidences, which are kept, as are the bins.

        References:
            Bröcker & Smith 2007, Increasing the reliability of reliability diagrams.
        """
        return float(np.mean(self.calibrated))

    def floor_interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Between which values a perfectly calibrated model would come out."""
        return _central(self.calibrated, confidence)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Interval for the calibration error between these bins.

        The spread of the resampled values about their mean, put about the value and, for the lower
        end, moved down by the bias. The lower end is 0 if a calibrated model could, within
        :meth:`floor_interval`, show as much. In simulations with 300 to 3,000 examples an interval
        of 95 % held the truth in 90 to 97 % of all cases; the percentile interval never holds it
        for a calibrated model.
        """
        low, high = _central(self.resampled, confidence)
        plausible = self.value <= self.floor_interval(confidence)[1]
        lower = 0.0 if plausible else max(0.0, 2 * self.value - high)
        return lower, min(1.0, self.value + float(np.mean(self.resampled)) - low)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the reliability diagram, on the given axes or on new ones, and return them.

        A point is a bin. The grey bar in its column reaches over the accuracies that a calibrated
        model would show there in 95 % of all cases; a bin outside its bar is an orange diamond.
        """
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError:
                raise ImportError(
                    'plot() needs matplotlib, which is not installed; pip install "neuvar[plot]"'
                ) from None
            ax = pyplot.subplots(figsize=(4.8, 4.8), layout="constrained")[1]
        _draw(self, ax)
        return ax


def calibration_error(
    outputs: Any,
    labels: Any,
    *,
    logits: bool,
    bins: int = 15,
    scheme: str = "equal-mass",
    resamples: int = 1000,
    seed: int = 0,
) -> Calibration:
    r"""Expected calibration error of the predicted class, with its error and its floor.

    .. math:: \text{ECE} = \sum_b \frac{n_b}{n} \left| \text{conf}_b - \text{acc}_b \right|

    where b runs over bins of similar confidence, the confidence being the largest probability.

    Args:
        outputs: logits or probabilities, shape (n, classes).
        labels: true class numbers, shape (n,).
        logits: whether ``outputs`` are logits; if not, they are probabilities.
        bins: how many bins.
        scheme: "equal-mass" for bins with as many examples each, "equal-width" for bins of width
            1/bins, with their upper ends. Equal confidences always share a bin, so that the order
            of the examples does not matter; with many ties there are fewer bins.
        resamples: how many resamples, of the bootstrap and of calibrated models each.
        seed: of the resampling.

    Returns:
        The error with its table of bins; it can draw itself.

    References:
        Guo et al. 2017, On calibration of modern neural networks (equal width);
        Nixon et al. 2019, Measuring calibration in deep learning (equal mass);
        Kumar et al. 2019, Verified uncertainty calibration (bias).

    >>> probabilities = torch.tensor([[0.9, 0.1]] * 100)
    >>> labels = torch.tensor([0] * 70 + [1] * 30)
    >>> found = calibration_error(probabilities, labels, logits=False)
    >>> round(found.value, 3), round(found.stderr, 2), round(found.floor, 2), len(found.bins)
    (0.2, 0.05, 0.02, 1)
    """
    if not isinstance(logits, bool):
        raise ValueError(f"logits must be True or False, got {logits!r}")
    probabilities = _probabilities(outputs, logits)
    truth = class_numbers("labels", labels)
    n, classes = probabilities.shape
    if len(truth) != n or truth.max() >= classes:
        raise ValueError(
            f"labels must be {n} class numbers below {classes}, as outputs has shape "
            f"{(n, classes)}, got {len(truth)} up to {truth.max().item()}"
        )
    bins, resamples = integer("bins", bins, low=1), integer("resamples", resamples, low=100)
    seed = _validate.seed(seed)
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    largest, predicted = probabilities.max(dim=1)
    order = torch.argsort(largest, stable=True)
    confidence, correct = largest[order].numpy(), (predicted == truth)[order].numpy()
    number = SCHEMES[scheme](confidence, bins)
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    generator = np.random.Generator(np.random.PCG64(seed))
    return _estimate(confidence, correct, starts, scheme, resamples, generator)


def _estimate(
    confidence: Array,
    correct: Array,
    starts: Array,
    scheme: str,
    resamples: int,
    generator: np.random.Generator,
) -> Calibration:
    """Estimate from examples in order of confidence and the places where bins start."""
    n, counts = len(confidence), np.diff(starts, append=len(confidence))
    sums, right = np.add.reduceat(confidence, starts), np.add.reduceat(correct.astype(int), starts)

    def error(gaps: Array) -> float:
        return float(np.abs(np.add.reduceat(gaps, starts)).sum() / n)

    def resample() -> float:
        times = np.bincount(generator.integers(n, size=n), minlength=n)
        return error(times * (confidence - correct))

    hits = np.empty((resamples, len(starts)))
    for row in hits:
        row[:] = np.add.reduceat((generator.random(n) < confidence).astype(int), starts)
    low, high = np.quantile(hits / counts, [0.025, 0.975], axis=0)
    columns = zip(sums / counts, right / counts, counts, low, high, strict=True)
    return Calibration(
        value=error(confidence - correct),
        maximum=float((np.abs(sums - right) / counts).max()),
        n=n,
        bins=tuple(
            CalibrationBin(float(conf), float(acc), int(count), (float(least), float(most)))
            for conf, acc, count, least, most in columns
        ),
        scheme=scheme,
        resampled=tuple(sorted(resample() for _ in range(resamples))),
        calibrated=tuple(np.sort(np.abs(hits - sums).sum(axis=1) / n).tolist()),
    )


def _probabilities(outputs: Any, logits: bool) -> Tensor:
    """Probabilities in double precision, or a sentence which says why there are none."""
    found = tensor("outputs", outputs)
    if not found.dtype.is_floating_point or found.dim() != 2 or min(found.shape) < 2:
        raise ValueError(
            "outputs must be floating-point numbers of shape (n, classes), with at least two "
            f"examples and two classes, got {found.dtype} of {tuple(found.shape)}"
        )
    if logits:
        probabilities = found.double().softmax(dim=1)
        bad = int(probabilities.isnan().any(dim=1).sum())
        if bad:  # but -inf is a sound logit, of a class that is ruled out
            raise ValueError(
                "outputs must be logits without nan or +inf, and not all -inf in a row, "
                f"got {bad} of {len(found)} rows that are not"
            )
        return probabilities
    off = (found.double().sum(dim=1) - 1).abs().max().item()
    # Probabilities of low precision cannot sum to 1 any better.
    if not (found.min() >= 0 and off <= max(1e-4, math.sqrt(torch.finfo(found.dtype).eps))):
        raise ValueError(
            "outputs must be probabilities >= 0 whose rows sum to 1, got a smallest value of "
            f"{found.min().item():.4g} and a sum that is off by {off:.4g}; for logits say "
            "logits=True"
        )
    return found.double()


def _equal_mass(confidence: Array, bins: int) -> Array:
    """Bin of each example in order: ties go to the bin of their middle."""
    _, which, counts = np.unique(confidence, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts + 1) / 2
    number: Array = np.floor((middle + 0.5) * bins / len(confidence)).astype(int)
    return number[which]


def _equal_width(confidence: Array, bins: int) -> Array:
    """Bin of each example; an edge belongs to the bin below it."""
    return np.searchsorted(np.arange(1, bins) / bins, confidence, side="left")


SCHEMES: dict[str, Callable[[Array, int], Array]] = {
    "equal-mass": _equal_mass,
    "equal-width": _equal_width,
}


def _central(values: tuple[float, ...], confidence: float) -> tuple[float, float]:
    """The central part of a sample that holds this share of it."""
    confidence = probability("confidence", confidence)
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _draw(found: Calibration, ax: Axes) -> None:
    """Points over grey bars over the diagonal; shapes differ as well as colours."""
    x, y = np.array([[b.confidence, b.accuracy] for b in found.bins]).T
    low, high = np.array([b.expected for b in found.bins]).T
    edge = math.floor(10 * min(x.min(), y.min(), low.min(), 0.9)) / 10
    limits = (edge - 0.02 * (1 - edge), 1 + 0.02 * (1 - edge))
    ax.vlines(x, low, high, color="0.8", linewidth=5, zorder=1, label="calibrated model, 95 %")
    ax.plot((0, 1), (0, 1), color="0.45", linewidth=1, linestyle=(0, (4, 3)), zorder=2)
    ax.plot(x, y, color="0.25", linewidth=1, zorder=3)
    outside = (y < low) | (y > high)
    for chosen, marker, colour, label in (
        (~outside, "o", "#0072B2", "bin within its bar"),
        (outside, "D", "#D55E00", "bin outside its bar"),
    ):
        if chosen.any():
            points: dict[str, Any] = {
                "c": colour,
                "edgecolors": "white",
                "linewidths": 0.8,
                "label": label,
            }
            ax.scatter(x[chosen], y[chosen], s=52, marker=marker, zorder=4, **points)
    least, most = found.interval()
    bins = f"{len(found.bins)} bin{'s' if len(found.bins) > 1 else ''}"
    ax.set_title(
        f"calibration error {found.value:.3f}, 95 % interval {least:.3f} to {most:.3f}\n"
        f"by chance alone {found.floor:.3f}; n = {found.n:,}, {bins}",
        fontsize="small",
        loc="left",
    )
    # On the side of the diagonal where most points are not.
    overconfident = sum(b.count * (b.confidence - b.accuracy) for b in found.bins) > 0
    ax.legend(loc="upper left" if overconfident else "lower right", frameon=False, fontsize="small")
    ax.set(xlim=limits, ylim=limits, aspect="equal", xlabel="confidence", ylabel="accuracy")
    ax.spines[["top", "right"]].set_visible(False)
