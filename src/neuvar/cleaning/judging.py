"""From probabilities of classes to a judgement on each label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from neuvar.cleaning.issues import Array, LabelIssues, NoiseRate, Transition
from neuvar.measures.estimate import normal_quantile, wilson

AT_ONCE = 10_000
"""Examples that are copied at once: a million with a thousand classes are not copied as a whole."""
MOST_OFF = 1e-3
"""By how much probabilities may miss a sum of 1."""


def judge_labels(
    probabilities: Any, labels: Any, *, names: Sequence[str] | None = None, confidence: float = 0.95
) -> LabelIssues:
    """Judge labels by the probability of each class for each example.

    An example is flagged if another class is more probable than its label, and still is if each
    probability is divided by the mean of what examples with that label have: a class with few
    examples is learned less well than others, and would lose them all. The most probable class is
    suggested. The quality is the margin of the label, half of one plus the label's probability
    less that of the most probable other class, which cleanlab calls the normalized margin. The
    share of wrong labels is that of the flagged ones, and the transition matrix is counted as if
    the labels after cleaning were true; the intervals are Wilson's, for what another sample of
    examples would give, so they do not hold the network's own errors.

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
    own = p[np.arange(n), y].astype(np.float64)
    usual = _means(own, y, classes)
    other = _best_other(p, y)
    flagged = (other > own) & (_best_other(p, y, usual) > own / usual[y])
    suggested = np.where(other > own, p.argmax(1), y)
    rate = float(flagged.mean())
    return LabelIssues(
        labels=y,
        probabilities=p,
        quality=(1 + own - other) / 2,
        suggested=suggested,
        flagged=flagged,
        noise_rate=NoiseRate(rate, *wilson(rate, n, z), confidence),
        transition=_transition(np.where(flagged, suggested, y), y, classes, z, confidence),
        names=tuple(map(str, names)),
        values=np.arange(classes),
    )


def _best_other(p: Array, y: Array, usual: Array | float = 1.0) -> Array:
    """The largest probability of another class than the label, relative to what is usual."""
    found = np.empty(len(y))
    for start in range(0, len(y), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        some = p[part] / usual
        some[np.arange(len(some)), y[part]] = -np.inf
        found[part] = some.max(1)
    return found


def _means(own: Array, y: Array, classes: int) -> Array:
    """Mean of what examples with each label have; 1 for a class that is no label."""
    counts = np.bincount(y, minlength=classes)
    sums = np.bincount(y, weights=own, minlength=classes)
    return np.where(counts, np.maximum(sums / np.maximum(counts, 1), np.finfo(float).tiny), 1.0)


def _transition(true: Array, given: Array, classes: int, z: float, confidence: float) -> Transition:
    """Shares of given labels among the examples of each true class, with Wilson's intervals."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, (true, given), 1)
    sums = counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # nothing is known of an empty class
        matrix = counts / sums
        return Transition(matrix, *wilson(matrix, sums, z), confidence)


def known_of_labels(p: Array, labels: Array) -> tuple[float, float, float]:
    """What probabilities give labels on average, and labels in random order, and how sure that is.

    The last number is by how many standard errors labels have more.
    """
    n = len(labels)
    own = p[np.arange(n), labels].astype(np.float64)
    shares = np.bincount(labels, minlength=p.shape[1]) / n
    by_chance = np.einsum("nk,k->n", p, shares)  # without a copy of p in float64
    gain = own - by_chance
    # Where all classes are equally probable, nothing is left but what was rounded.
    error = float(gain.std()) / math.sqrt(n) + 1e-9
    return float(own.mean()), float(by_chance.mean()), float(gain.mean()) / error


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
