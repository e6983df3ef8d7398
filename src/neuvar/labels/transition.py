"""Flip labels by a transition matrix, with random numbers that are the same on every machine."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar._validate import integer
from neuvar.labels.result import (
    MAX_CLASSES,
    Integers,
    NoisyLabels,
    checked_labels,
    make_result,
    tensor_sha256,
)

Array = np.ndarray[Any, Any]

UNIT = 10**9
"""Shares of labels are integer multiples of 1 / UNIT: equal shares are equal on every machine, and
28.999999999999996 labels are 29."""


def flip(labels: Integers, matrix: Any, *, seed: int, exact: bool = True) -> NoisyLabels:
    r"""Flip labels by a transition matrix.

    .. math:: T_{ij} = P(\text{noisy} = j \mid \text{clean} = i)

    By default counts are exact: which labels change is random, how many is not. The total number of
    wrong labels is its expectation, rounded. The numbers for each class, and for each pair of
    classes, differ from their expectations by less than one (largest remainder method).

    Patrini et al., "Making Deep Neural Networks Robust to Label Noise", CVPR 2017.

    Args:
        labels: clean labels, a tensor, an array or a list of integers; not modified.
        matrix: row-stochastic, one row and one column for each class.
        seed: any integer.
        exact: True for exact counts, False to flip every label independently.

    >>> result = flip([0] * 10 + [1] * 10, [[0.7, 0.3], [0.1, 0.9]], seed=0)
    >>> result.counts, result.rate
    (tensor([[7, 3], [1, 9]]), 0.2)
    """
    transition = _checked_matrix(matrix)
    facts = {"kind": "matrix", "matrix_sha256": tensor_sha256(torch.from_numpy(transition))}
    return flip_by(transition, labels, seed, exact, **facts)


def flip_by(
    transition: Array, labels: Integers, seed: int, exact: bool, **facts: Any
) -> NoisyLabels:
    """Flip labels by a valid transition matrix; the facts are for the provenance."""
    classes, seed = len(transition), integer("seed", seed)
    clean = checked_labels("labels", labels, classes)
    y = clean.cpu().numpy()
    if exact:
        counts = _target_counts(np.bincount(y, minlength=classes), transition, seed)
        noisy = _exact_flips(y, counts, seed)
    else:
        noisy = _independent_flips(y, transition, seed)
    facts |= {"seed": seed, "exact": bool(exact)}
    return make_result(torch.from_numpy(noisy).to(clean.device), clean, classes, **facts)


def _checked_matrix(matrix: Any) -> Array:
    """The transition matrix in float64 with rows that sum to one."""
    values = matrix.detach().cpu().double().numpy() if isinstance(matrix, Tensor) else matrix
    try:
        t: Array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"matrix must be a square of numbers, got {matrix!r:.60}") from error
    if t.ndim != 2 or t.shape[0] != t.shape[1] or len(t) < 2:
        raise ValueError(f"matrix must be square, 2×2 or larger, got the shape {t.shape}")
    if len(t) > MAX_CLASSES:
        raise ValueError(f"matrix must have at most {MAX_CLASSES} classes, got {len(t)}")
    valid = (t >= 0) & (t <= 1)
    if not valid.all():
        raise ValueError(f"matrix must have entries in [0, 1], got {float(t[~valid][0])!r}")
    sums = np.array([math.fsum(row) for row in t])  # correctly rounded on every processor
    worst = int(np.argmax(np.abs(sums - 1)))
    if abs(sums[worst] - 1) > 1e-6:
        raise ValueError(
            f"matrix must have rows that sum to 1, got {sums[worst]:.6g} in row {worst}"
        )
    t /= sums[:, None]
    return t


def _target_counts(sizes: Array, transition: Array, seed: int) -> Array:
    """Exact number of labels of each class (row) that become each class (column)."""
    classes = len(sizes)
    shares = np.rint(sizes[:, None] * transition * UNIT).astype(np.int64)
    np.fill_diagonal(shares, 0)
    order = random_words(seed, "ties", classes**2 + classes)
    wrong = shares.sum(1)
    per_class = apportion(wrong, rounded(int(wrong.sum())), order[:classes])
    counts: Array = np.zeros_like(shares)
    for i, others in enumerate(order[classes:].reshape(classes, classes)):
        behind = shares[: i + 1].sum(0) - counts[:i].sum(0) * UNIT
        counts[i] = apportion(shares[i], int(per_class[i]), others, behind)
    np.fill_diagonal(counts, sizes - per_class)
    return counts


def rounded(share: int) -> int:
    """The nearest number of labels to a share in units."""
    return (share + UNIT // 2) // UNIT


def apportion(shares: Array, total: int, order: Array, behind: Array | None = None) -> Array:
    """Divide a total by largest remainders: each share is rounded down or up.

    Ties go to the largest ``behind``, then to the lowest ``order``. The total must lie between the
    sum of shares rounded down and the sum of shares rounded up.
    """
    counts: Array = shares // UNIT
    left = total - int(counts.sum())
    remainder = shares % UNIT
    assert 0 <= left <= np.count_nonzero(remainder)
    keys = (order, -(remainder if behind is None else behind), -remainder)
    counts[np.lexsort(keys)[:left]] += 1
    return counts


def _exact_flips(y: Array, counts: Array, seed: int) -> Array:
    """Flip the first members of each class, in random order.

    The order does not depend on the counts: with one target for each class, the labels that are
    wrong at a low rate are also wrong at a higher one.
    """
    classes = len(counts)
    order = np.argsort(random_words(seed, "order", len(y)), kind="stable")
    order = order[np.argsort(y[order], kind="stable")]
    noisy = np.empty_like(y)
    targets = (np.arange(classes)[:, None] + 1 + np.arange(classes)) % classes  # itself comes last
    noisy[order] = np.repeat(targets.ravel(), np.take_along_axis(counts, targets, 1).ravel())
    return noisy


def _independent_flips(y: Array, transition: Array, seed: int) -> Array:
    """Draw each label from its row of the matrix."""
    levels = np.cumsum(transition, axis=1)
    levels /= levels[:, -1:]
    u = random_uniforms(seed, "independent", len(y))
    noisy = np.empty_like(y)
    for i, row in enumerate(levels):
        members = y == i
        noisy[members] = np.searchsorted(row, u[members], side="right")
    return noisy


def random_words(seed: int, purpose: str, count: int) -> Array:
    """Random uint64 that depend on the seed and the purpose alone.

    NumPy guarantees the raw integers of PCG64 across versions, but not what its ``Generator`` makes
    of them (``permutation``, ``normal``).
    """
    key = hashlib.blake2b(f"labels/{purpose}/{seed}".encode(), digest_size=16).digest()
    raw: Array = np.random.PCG64(int.from_bytes(key, "little")).random_raw(count)
    return raw


def random_uniforms(seed: int, purpose: str, count: int) -> Array:
    """Random float64 in the open interval (0, 1), odd multiples of 2⁻⁵³."""
    words = random_words(seed, purpose, count)
    u: Array = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return u
