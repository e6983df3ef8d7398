"""Score labels by the predicted probabilities of the classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neuvar.cleaning.posterior import Array, chunks, count_pairs, fit_noise_model, label_posterior
from neuvar.labels.noisy_labels import checked_labels
from neuvar.measures.estimate import normal_quantile, wilson

SUM_TOLERANCE = 1e-3
REPLACE_AT = 0.9
"""Suggestions with at least this probability replace the given label."""


@dataclass(frozen=True)
class NoiseRate:
    """Estimated fraction of wrong labels.

    Attributes:
        value: the estimate.
        low: lower end of its confidence interval.
        high: upper end.
        confidence: confidence level of the interval, for the sampling error of the examples. The
            interval also covers unclear examples: low counts them as mistakes of the network, high
            as wrong labels.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.95

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True, eq=False)
class Transition:
    """Estimated noise transition matrix.

    Attributes:
        matrix: probability of each given label (column) for each true class (row), float64. The row
            of a class without examples is nan.
        low: lower ends of the confidence intervals.
        high: upper ends.
        confidence: confidence level of each interval.
    """

    matrix: Array
    low: Array
    high: Array
    confidence: float = 0.95


@dataclass(frozen=True, eq=False)
class LabelIssues:
    """Label quality, flagged labels and suggested labels of a dataset.

    Attributes:
        labels: class index of each given label, int64, shape (n,); as in cleanlab.
        probabilities: predicted probabilities, float32 or float64, shape (n, classes).
        quality: label quality from 0 to 1; the lower, the more likely the label is wrong.
        suggested: index of the most probable other class, int64; the given label if no class has a
            higher predicted probability.
        flagged: whether to review the label, bool; flags balance precision and recall.
        error_probability: probability that the label is wrong.
        suggestion_probability: probability that the most probable other class is the true one.
        noise_rate: estimated fraction of wrong labels.
        transition: estimated noise transition matrix.
        names: name of each class.
        values: label of each class in its original form: a number, text or another object.
        files: path of each image within its folder; empty for other data.
        b: noise scale at the end of training; None without noise.
        unseen: indices of examples that a :class:`~neuvar.LabelObserver` never saw. They are not
            judged. Their label is -1 if it is unknown.
    """

    labels: Array
    probabilities: Array = field(repr=False)
    quality: Array
    suggested: Array
    flagged: Array
    error_probability: Array
    suggestion_probability: Array
    noise_rate: NoiseRate
    transition: Transition = field(repr=False)
    names: tuple[str, ...]
    values: Array
    files: tuple[str, ...] = field(default=(), repr=False)
    b: float | None = None
    unseen: Array = field(default_factory=lambda: np.empty(0, dtype=np.int64), repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def ranked(self) -> Array:
        """Indices of all examples, lowest quality first."""
        return np.argsort(self.quality, kind="stable")

    @property
    def worst(self) -> Array:
        """Indices of the flagged examples, lowest quality first."""
        ranked = self.ranked
        return ranked[self.flagged[ranked]]

    @property
    def uncertainty(self) -> Array:
        """Entropy of the predicted probabilities, divided by its maximum: from 0 to 1.

        High for examples of no class or of several classes. Rank them by
        ``np.argsort(-issues.uncertainty)``; no threshold separates them from hard examples.
        """
        entropy = np.empty(len(self))
        for part in chunks(self.probabilities):
            p = self.probabilities[part].astype(np.float64)
            entropy[part] = -np.einsum("nk,nk->n", p, np.log(np.where(p > 0, p, 1)))
        return entropy / math.log(len(self.names))

    def sure(self, precision: float = REPLACE_AT) -> Array:
        """Mask of the flagged labels whose suggestion is right with at least this probability."""
        chosen: Array = self.flagged & (self.suggestion_probability >= precision)
        return chosen

    @property
    def cleaned(self) -> Array:
        """Labels in their original form, with the suggestions that are ``sure()``."""
        if (self.labels < 0).any():
            raise ValueError(
                f"{(self.labels < 0).sum()} of {len(self)} labels are not known: their examples "
                "were never seen in training; give label_issues() the labels of all examples"
            )
        labels: Array = self.values[np.where(self.sure(), self.suggested, self.labels)]
        return labels

    @property
    def pairs(self) -> Array:
        """Number of flagged examples for each given (row) and suggested (column) class."""
        flagged = self.flagged
        return count_pairs(self.labels[flagged], self.suggested[flagged], len(self.names))

    def __str__(self) -> str:
        return (
            f"{int(self.flagged.sum())} of {len(self)} labels are flagged; about "
            f"{self.noise_rate} of all labels are wrong"
            + (f"; {len(self.unseen)} examples were never seen" if len(self.unseen) else "")
        )


def judge_labels(
    probabilities: Any,
    labels: Any,
    *,
    names: Sequence[str] | None = None,
    history: bool = False,
    confidence: float = 0.95,
) -> LabelIssues:
    r"""Find wrong labels from the predicted probabilities of the classes.

    Bayes' rule gives the probability of each true class k, given the label g of an example x:

    .. math:: P(k \mid x, g) \propto q_k(x) \, (T_{kg} + ε \, η_g(x)),

    with the belief q in each class and the predicted distribution η of the given label. Both are
    powers of the probabilities. T is counted from the most confident predictions: labels that they
    contradict are flips from class to class. If there are few of them, labels are wrong where
    examples are hard, and ε is large.

    - ``error_probability``: multiplied by 0.95, because predictions may be wrong. The factor is
      smaller for a weak network: it is reduced by the share of labels that predictions contradict
      with low confidence.
    - ``flagged``: the probability, times 0.95, is above 0.5, and the probabilities prefer another
      class.
    - ``suggestion_probability``: lowered further, because suggestions replace labels. Halved in
      confidence groups that contradict labels more than twice as often as the most confident
      predictions (lower end of the interval). Never above the median of the suggestions of these.
    - ``noise_rate``: the fraction of flagged labels.
    - ``transition``: counts the given labels of each class after flagged labels are replaced. Its
      intervals are Wilson's and cover sampling error only.

    Args:
        probabilities: shape (n, classes), from a network that has not memorized the labels.
        labels: n class indices from 0.
        names: name of each class; its index by default.
        history: True for probabilities averaged over a training on these labels, as by a
            :class:`~neuvar.LabelObserver`; False for held-out ones, as from cross-validation.
        confidence: confidence level of the intervals.

    >>> issues = judge_labels([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], [0, 0, 0])
    >>> issues.flagged.tolist(), issues.suggested.tolist(), issues.ranked.tolist()
    ([False, True, False], [0, 1, 0], [1, 2, 0])
    """
    p = check_probabilities(probabilities)
    return judge_checked(p, labels, names=names, history=history, confidence=confidence)


def judge_checked(
    p: Array,
    labels: Any,
    *,
    names: Sequence[str] | None,
    history: bool,
    confidence: float = 0.95,
) -> LabelIssues:
    """:func:`judge_labels` for checked probabilities; the result shares their memory."""
    n, classes = p.shape
    y = _check_labels(labels, n, classes)
    names = [str(k) for k in range(classes)] if names is None else names
    if len(names) != classes:
        raise ValueError(f"names must have one for each of {classes} classes, got {len(names)}")
    z = normal_quantile(confidence)
    result = label_posterior(p, y, fit_noise_model(p, y), history=history)
    contradicted = p.max(1) > p[np.arange(n), y]
    flagged = result.flagged & contradicted
    suggested = np.where(contradicted, result.other, y)
    rate = float(flagged.mean())
    least = min(result.certain, rate)
    most = max(float(contradicted.mean()), float(result.wrong.mean()), rate)
    low, high = wilson(np.array([least, most]), np.array([n, n]), z)
    return LabelIssues(
        labels=y,
        probabilities=p,
        quality=result.quality,
        suggested=suggested,
        flagged=flagged,
        error_probability=result.wrong,
        suggestion_probability=result.other_probability,
        noise_rate=NoiseRate(rate, float(low[0]), float(high[1]), confidence),
        transition=_transition(np.where(flagged, suggested, y), y, classes, z, confidence),
        names=tuple(map(str, names)),
        values=np.arange(classes),
    )


def _transition(true: Array, given: Array, classes: int, z: float, confidence: float) -> Transition:
    counts = count_pairs(true, given, classes)
    totals = counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # classes without examples become nan
        matrix = counts / totals
        return Transition(matrix, *wilson(matrix, totals, z), confidence)


def compare_with_chance(p: Array, labels: Array) -> tuple[float, float, float]:
    """Mean probability of the labels, the same for shuffled labels, and their difference.

    The difference is in standard errors.
    """
    n = len(labels)
    own = p[np.arange(n), labels].astype(np.float64)
    shares = np.bincount(labels, minlength=p.shape[1]) / n
    by_chance = np.einsum("nk,k->n", p, shares)  # without a copy of p in float64
    gain = own - by_chance
    # 1e-9 is above the rounding errors if all classes are equally probable.
    error = float(gain.std()) / math.sqrt(n) + 1e-9
    return float(own.mean()), float(by_chance.mean()), float(gain.mean()) / error


def check_probabilities(value: Any) -> Array:
    """A copy of the probabilities with rows that sum to 1, in float32 or else float64."""
    p: Array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if p.ndim != 2 or p.shape[1] < 2 or not len(p) or p.dtype.kind not in "fiub":
        raise ValueError(
            "probabilities must be numbers of shape (n, classes) with at least 2 classes, "
            f"got shape {p.shape} and type {p.dtype}"
        )
    p = p.astype(np.float32 if p.dtype == np.float32 else np.float64)
    totals = np.empty(len(p))
    for part in chunks(p):
        if not np.isfinite(p[part]).all() or (p[part] < 0).any():
            raise ValueError("probabilities must be finite and not negative")
        totals[part] = p[part].sum(1, dtype=np.float64)
    worst = int(np.abs(totals - 1).argmax())
    if abs(totals[worst] - 1) > SUM_TOLERANCE:
        raise ValueError(
            f"each row of probabilities must sum to 1, row {worst} sums to {totals[worst]:.6g}"
        )
    p /= totals[:, None]
    return p


def _check_labels(value: Any, n: int, classes: int) -> Array:
    y: Array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if y.dtype.kind == "f" and np.isfinite(y).all() and (y == np.round(y)).all():
        y = y.astype(np.int64)
    labels = checked_labels("labels", y, classes).numpy()
    if len(labels) != n:
        raise ValueError(
            f"probabilities and labels must have the same length, got {n} and {len(labels)}"
        )
    return labels
