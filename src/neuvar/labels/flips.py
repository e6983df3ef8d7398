"""Flip labels by a transition matrix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar.labels import randomness
from neuvar.labels.randomness import Array
from neuvar.labels.result import (
    MOST_CLASSES,
    Integers,
    NoisyLabels,
    account,
    checked_labels,
    checked_seed,
    tensor_sha256,
)

UNIT = 10**9
"""Shares of labels are counted in integer parts of this size: equal shares are equal everywhere,
and 28.999999999999996 labels are 29."""


def flip(labels: Integers, matrix: Any, *, seed: int, exact: bool = True) -> NoisyLabels:
    r"""Flip labels by a transition matrix.

    .. math:: T_{ij} = P(\text{noisy} = j \mid \text{clean} = i)

    Exact counts are the default: which labels change is random, how many is not. The number of
    wrong labels is their expected number, rounded; the number in each class, and from each class
    to each other one, is within one of its expected number (largest remainder; ties fall to the
    class that is furthest behind, then to chance). Independent flips only have these expectations.

    Patrini et al., "Making Deep Neural Networks Robust to Label Noise", CVPR 2017.

    Args:
        labels: clean labels, a tensor, an array or a list of integers; left as they are.
        matrix: row-stochastic, one row and one column for each class.
        seed: any int; the same one gives the same labels on any machine.
        exact: whether the counts are fixed, or every label is flipped independently of the others.

    Returns:
        The labels with noise and its book-keeping.

    >>> found = flip([0] * 10 + [1] * 10, [[0.7, 0.3], [0.1, 0.9]], seed=0)
    >>> found.counts, found.rate
    (tensor([[7, 3], [1, 9]]), 0.2)
    """
    transition = checked_matrix(matrix)
    facts = {"kind": "matrix", "matrix_sha256": tensor_sha256(torch.from_numpy(transition))}
    return flip_as(facts, labels, transition, seed=seed, exact=exact)


def flip_as(
    facts: dict[str, Any], labels: Integers, transition: Array, *, seed: int, exact: bool
) -> NoisyLabels:
    """Flip by a matrix that was checked, and put down the facts that it was made from."""
    classes, seed = len(transition), checked_seed(seed)
    clean = checked_labels("labels", labels, classes)
    y = clean.cpu().numpy()
    if exact:
        counts = target_counts(np.bincount(y, minlength=classes), transition, seed)
        noisy = _exact_flips(y, counts, seed)
    else:
        noisy = _independent_flips(y, transition, seed)
    return account(
        torch.from_numpy(noisy).to(clean.device),
        clean,
        classes=classes,
        provenance={**facts, "seed": seed, "exact": bool(exact)},
    )


def checked_matrix(matrix: Any) -> Array:
    """The transition matrix in float64 with rows that sum to one, if it is one."""
    found = matrix.detach().cpu().double().numpy() if isinstance(matrix, Tensor) else matrix
    try:
        t: Array = np.array(found, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"matrix must be a square of numbers, got {matrix!r:.60}") from error
    if t.ndim != 2 or t.shape[0] != t.shape[1] or len(t) < 2:
        raise ValueError(f"matrix must be square, 2×2 or larger, got the shape {t.shape}")
    if len(t) > MOST_CLASSES:
        raise ValueError(f"matrix must have at most {MOST_CLASSES} classes, got {len(t)}")
    if not ((t >= 0) & (t <= 1)).all():
        bad = t[~((t >= 0) & (t <= 1))][0]
        raise ValueError(f"matrix must have entries in [0, 1], got {float(bad)!r}")
    sums = np.array([math.fsum(row) for row in t])  # correctly rounded, whatever the processor
    far = int(np.argmax(np.abs(sums - 1)))
    if abs(sums[far] - 1) > 1e-6:
        raise ValueError(f"matrix must have rows that sum to 1, got {sums[far]:.6g} in row {far}")
    t /= sums[:, None]
    return t


def target_counts(sizes: Array, transition: Array, seed: int) -> Array:
    """How many labels of each class (row) become each class (column), as exact counts."""
    classes = len(sizes)
    shares = np.rint(sizes[:, None] * transition * UNIT).astype(np.int64)
    np.fill_diagonal(shares, 0)
    chance = randomness.words(seed, "ties", classes**2 + classes)
    wrong = shares.sum(1)
    per_class = apportion(wrong, rounded(int(wrong.sum())), chance[:classes])
    counts: Array = np.zeros_like(shares)
    for i, others in enumerate(chance[classes:].reshape(classes, classes)):
        behind = shares[: i + 1].sum(0) - counts[:i].sum(0) * UNIT
        counts[i] = apportion(shares[i], int(per_class[i]), others, behind)
    np.fill_diagonal(counts, sizes - per_class)
    return counts


def rounded(share: int) -> int:
    """The nearest number of labels to a share in parts of one label."""
    return (share + UNIT // 2) // UNIT


def apportion(shares: Array, total: int, chance: Array, behind: Array | None = None) -> Array:
    """Divide a total by largest remainders: everyone gets his share rounded down or up.

    Ties go to who is furthest ``behind``, then to the lowest ``chance``. The total must lie
    between the sum of shares rounded down and the sum of shares rounded up.
    """
    counts: Array = shares // UNIT
    left = total - int(counts.sum())
    remainder = shares % UNIT
    assert 0 <= left <= np.count_nonzero(remainder)
    keys = (chance, -(remainder if behind is None else behind), -remainder)
    counts[np.lexsort(keys)[:left]] += 1
    return counts


def _exact_flips(y: Array, counts: Array, seed: int) -> Array:
    """Give every class its counts: the first members, in random order, get the other labels.

    The order does not depend on the counts: with one target for each class, the labels that are
    wrong at a low rate are wrong at a higher one, too.
    """
    classes = len(counts)
    order = randomness.permutation(seed, "order", len(y))
    order = order[np.argsort(y[order], kind="stable")]
    noisy = np.empty_like(y)
    targets = (np.arange(classes)[:, None] + 1 + np.arange(classes)) % classes  # itself comes last
    noisy[order] = np.repeat(targets.ravel(), np.take_along_axis(counts, targets, 1).ravel())
    return noisy


def _independent_flips(y: Array, transition: Array, seed: int) -> Array:
    """Draw each label from its row of the matrix."""
    levels = np.cumsum(transition, axis=1)
    levels /= levels[:, -1:]
    u = randomness.uniforms(seed, "independent", len(y))
    noisy = np.empty_like(y)
    for i, row in enumerate(levels):
        members = y == i
        noisy[members] = np.searchsorted(row, u[members], side="right")
    return noisy
