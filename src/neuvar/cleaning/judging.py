"""From probabilities of classes to a judgement on each label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuvar.cleaning.issues import Array, LabelIssues, NoiseRate, Transition
from neuvar.measures.proportion import normal_quantile, wilson

MOST_OFF = 1e-3
"""By how much probabilities may miss a sum of 1."""


def judge_labels(
    probabilities: Any, labels: Any, *, names: Sequence[str] | None = None, confidence: float = 0.95
) -> LabelIssues:
    """Judge labels by the probability of each class for each example.

    An example is flagged if another class than its label is the most probable one, which is then
    suggested. Its quality is the margin of its label, half of one plus the label's probability less
    that of the most probable other class, which cleanlab calls the normalized margin. How many
    labels are wrong, and which become which, comes from the confident joint: examples are counted
    for a class if their probability of it is at least the mean among those that are labelled so,
    which keeps what the network is not sure of out of the count.

    References:
        Northcutt et al. 2021, Confident learning: estimating uncertainty in dataset labels.

    Args:
        probabilities: shape (n, classes), of a network that has not memorized the labels.
        labels: n class numbers from 0.
        names: the name of each class; its number by default.
        confidence: of the intervals.

    >>> found = judge_labels([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], [0, 0, 0])
    >>> found.flagged.tolist(), found.suggested.tolist(), found.ranked.tolist()
    ([False, True, False], [0, 1, 0], [1, 2, 0])
    """
    p, y = checked_probabilities(probabilities), checked_labels(labels)
    n, classes = p.shape
    if len(y) != n:
        raise ValueError(
            f"probabilities and labels must have the same length, got {n} and {len(y)}"
        )
    if y.max() >= classes:
        raise ValueError(
            f"labels must be below {classes}, the number of columns of probabilities, got {y.max()}"
        )
    if names is None:
        names = [str(k) for k in range(classes)]
    if len(names) != classes:
        raise ValueError(f"names must have one for each of {classes} classes, got {len(names)}")
    suggested = p.argmax(1)
    rate, transition = _estimates(
        _confident_counts(p, y), y, normal_quantile(confidence), confidence
    )
    return LabelIssues(
        labels=y,
        probabilities=p,
        quality=normalized_margin(p, y),
        suggested=suggested,
        flagged=suggested != y,
        noise_rate=rate,
        transition=transition,
        names=tuple(map(str, names)),
    )


def normalized_margin(p: Array, y: Array) -> Array:
    """Half of one plus the probability of the label less that of the most probable other class.

    >>> normalized_margin(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 0])).round(3).tolist()
    [0.9, 0.2]
    """
    rows = np.arange(len(y))
    others = p.copy()
    others[rows, y] = -np.inf
    return np.asarray((1 + p[rows, y] - others.max(1)) / 2)


def _confident_counts(p: Array, y: Array) -> Array:
    """How many examples of each label (row) are confidently of each class (column)."""
    classes = p.shape[1]
    labelled = np.bincount(y, minlength=classes)
    sums = np.bincount(y, p[np.arange(len(y)), y], minlength=classes)
    mean = np.full(classes, np.inf)  # nobody is confidently of a class that is no one's label
    np.divide(sums, labelled, out=mean, where=labelled > 0)
    confident = np.where(p >= mean, p, -1.0)
    sure = confident.max(1) >= 0
    counts = np.zeros((classes, classes))
    np.add.at(counts, (y[sure], confident.argmax(1)[sure]), 1)
    # Where nobody with a label is sure of anything, the most probable classes must do.
    lost = ~sure & (counts.sum(1) == 0)[y]
    np.add.at(counts, (y[lost], p.argmax(1)[lost]), 1)
    return counts


def _estimates(
    counts: Array, y: Array, z: float, confidence: float
) -> tuple[NoiseRate, Transition]:
    """Share of wrong labels and transition matrix, with intervals, from the confident counts.

    The confident ones stand for all examples with the same label; the errors are those of sampling
    them.
    """
    classes = len(counts)
    labelled, sure = np.bincount(y, minlength=classes), counts.sum(1)
    kept = labelled > 0
    shares = counts[kept] / sure[kept, None]
    weight = labelled[kept] / len(y)
    wrong = 1 - shares[np.arange(kept.sum()), np.flatnonzero(kept)]
    rate = float(weight @ wrong)
    # Of few, or of none wrong, Wilson's interval still says how little is known.
    spread = float(weight**2 @ (wrong * (1 - wrong) / sure[kept]))
    of = rate * (1 - rate) / spread if spread > 0 else float(sure.sum())
    found = NoiseRate(rate, *wilson(rate, of, z), confidence)

    joint = np.zeros((classes, classes))
    joint[kept] = shares * weight[:, None]
    true = joint.sum(0)
    with np.errstate(invalid="ignore"):
        matrix = (joint / true).T
    low, high = np.full_like(matrix, np.nan), np.full_like(matrix, np.nan)
    counted = counts.sum(0)
    for i, j in np.argwhere(np.isfinite(matrix)):
        low[i, j], high[i, j] = wilson(float(matrix[i, j]), float(counted[i]), z)
    return found, Transition(matrix, low, high, confidence)


def checked_probabilities(value: Any) -> Array:
    """Probabilities as float64, with rows that sum to 1."""
    p: Array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if p.ndim != 2 or p.shape[1] < 2 or not len(p) or p.dtype.kind not in "fiub":
        raise ValueError(
            "probabilities must be numbers of shape (n, classes) with at least 2 classes, "
            f"got shape {p.shape} and type {p.dtype}"
        )
    p = p.astype(np.float64)
    if not np.isfinite(p).all() or (p < 0).any():
        raise ValueError("probabilities must be finite and not negative")
    off = np.abs(p.sum(1) - 1)
    if off.max() > MOST_OFF:
        raise ValueError(
            f"each row of probabilities must sum to 1, row {off.argmax()} sums to "
            f"{p[off.argmax()].sum():.6g}"
        )
    total: Array = p.sum(1, keepdims=True)
    return np.asarray(p / total)


def checked_labels(value: Any) -> Array:
    """Labels as int64 class numbers from 0."""
    y: Array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if y.ndim != 1 or not len(y):
        raise ValueError(f"labels must be a list of class numbers, got shape {y.shape}")
    if y.dtype.kind == "f" and np.isfinite(y).all() and (y == np.round(y)).all():
        y = y.astype(np.int64)
    if y.dtype.kind not in "iu":
        raise ValueError(f"labels must be whole numbers, got type {y.dtype}")
    if y.min() < 0:
        raise ValueError(f"labels must not be negative, got {y.min()}")
    return y.astype(np.int64)
