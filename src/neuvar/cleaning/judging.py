"""From probabilities of classes to a judgement on each label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuvar.cleaning.issues import Array, LabelIssues, NoiseRate, Transition
from neuvar.measures.proportion import normal_quantile, wilson

AT_ONCE = 10_000
"""Examples that are copied at once: a million with a thousand classes are not copied as a whole."""
MOST_OFF = 1e-3
"""By how much probabilities may miss a sum of 1."""


def judge_labels(
    probabilities: Any, labels: Any, *, names: Sequence[str] | None = None, confidence: float = 0.95
) -> LabelIssues:
    """Judge labels by the probability of each class for each example.

    An example is flagged if another class than its label is the most probable one, which is then
    suggested. Its quality is the margin of its label, half of one plus the label's probability less
    that of the most probable other class, which cleanlab calls the normalized margin. The share of
    wrong labels is that of the flagged ones, and the transition matrix is counted as if the most
    probable classes were the true ones; the intervals are Wilson's, for what another sample of
    examples would give.

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
    z = normal_quantile(confidence)
    suggested = p.argmax(1)
    flagged = suggested != y
    rate = float(flagged.mean())
    return LabelIssues(
        labels=y,
        probabilities=p,
        quality=normalized_margin(p, y),
        suggested=suggested,
        flagged=flagged,
        noise_rate=NoiseRate(rate, *wilson(rate, n, z), confidence),
        transition=_transition(suggested, y, classes, z, confidence),
        names=tuple(map(str, names)),
    )


def normalized_margin(p: Array, y: Array) -> Array:
    """Half of one plus the probability of the label less that of the most probable other class.

    >>> normalized_margin(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 0])).round(3).tolist()
    [0.9, 0.2]
    """
    own, other = np.empty(len(y)), np.empty(len(y))
    for start in range(0, len(y), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        some, rows = p[part].copy(), np.arange(len(y[part]))
        own[part] = some[rows, y[part]]
        some[rows, y[part]] = -np.inf
        other[part] = some.max(1)
    return np.asarray((1 + own - other) / 2)


def _transition(true: Array, given: Array, classes: int, z: float, confidence: float) -> Transition:
    """Shares of given labels among the examples of each true class, with Wilson's intervals."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, (true, given), 1)
    sums = counts.sum(1)
    with np.errstate(invalid="ignore"):
        matrix = counts / sums[:, None]
    low, high = np.full_like(matrix, np.nan), np.full_like(matrix, np.nan)
    for i, j in np.argwhere(np.isfinite(matrix)):
        low[i, j], high[i, j] = wilson(float(matrix[i, j]), float(sums[i]), z)
    return Transition(matrix, low, high, confidence)


def checked_probabilities(value: Any) -> Array:
    """Probabilities with rows that sum to 1, as float64 unless they are float32."""
    p: Array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if p.ndim != 2 or p.shape[1] < 2 or not len(p) or p.dtype.kind not in "fiub":
        raise ValueError(
            "probabilities must be numbers of shape (n, classes) with at least 2 classes, "
            f"got shape {p.shape} and type {p.dtype}"
        )
    p = p.astype(np.float32 if p.dtype == np.float32 else np.float64)
    if not np.isfinite(p).all() or (p < 0).any():
        raise ValueError("probabilities must be finite and not negative")
    total = p.sum(1, dtype=np.float64)
    off = np.abs(total - 1)
    if off.max() > MOST_OFF:
        raise ValueError(
            f"each row of probabilities must sum to 1, row {off.argmax()} sums to "
            f"{total[off.argmax()]:.6g}"
        )
    p /= total[:, None]
    return p


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
