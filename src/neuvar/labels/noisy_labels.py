"""Noisy labels: flips by a transition matrix, the same on every machine."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar import _validate
from neuvar._validate import integer, number

Array = np.ndarray[Any, Any]
Integers = Tensor | np.ndarray[Any, Any] | Sequence[int]
"""Labels as a tensor, an array or a list."""

MAX_CLASSES = 10_000
"""Limits the memory for the confusion matrix, to 800 MB in float64."""
UNIT = 10**9
"""Expected numbers of labels are integers in units of 1 / UNIT labels. So they are the same on
every machine, and 28.999999999999996 labels count as 29."""


@dataclass(frozen=True, eq=False)
class NoisyLabels:
    """Noisy labels, and what is known about the noise.

    If the clean labels are unknown, ``clean``, ``mask``, ``counts``, ``matrix`` and ``rate`` are
    None.

    Attributes:
        noisy: the labels to train on, int64.
        clean: the labels without noise, int64.
        mask: True where noisy and clean labels differ.
        counts: number of labels of each clean class (row) with each noisy class (column), int64.
        matrix: ``counts`` divided by its row sums, float64; zeros for a class without labels.
        rate: actual share of labels that differ.
        provenance: how the labels were made, as plain numbers and strings, with the SHA-256 of
            clean and noisy labels.
        hash: SHA-256 of the provenance; the same for the same labels made in the same way.
    """

    noisy: Tensor
    clean: Tensor | None
    mask: Tensor | None
    counts: Tensor | None
    matrix: Tensor | None
    rate: float | None
    provenance: dict[str, Any]
    hash: str

    def __len__(self) -> int:
        return len(self.noisy)

    def __repr__(self) -> str:
        wrong = "" if self.mask is None else f", {int(self.mask.sum())} of them wrong"
        return f"NoisyLabels({len(self)} labels{wrong}, hash {self.hash[:8]})"


def make_result(noisy: Tensor, clean: Tensor | None, classes: int, **facts: Any) -> NoisyLabels:
    """Compare noisy with clean labels; ``facts`` say how they were made, for the provenance."""
    mask = counts = matrix = rate = None
    if clean is not None:
        mask = noisy != clean
        counts = (clean * classes + noisy).bincount(minlength=classes**2).view(classes, classes)
        matrix = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
        rate = int(mask.sum()) / len(mask)
    facts |= {
        "classes": classes,
        "count": len(noisy),
        "clean_sha256": None if clean is None else tensor_sha256(clean),
        "noisy_sha256": tensor_sha256(noisy),
    }
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return NoisyLabels(noisy, clean, mask, counts, matrix, rate, facts, digest)


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's shape, dtype and elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checked_labels(name: str, labels: Integers, classes: int) -> Tensor:
    """A copy of the labels as int64, each from 0 to classes - 1."""
    try:
        if isinstance(labels, Tensor):
            result = labels.detach()
        else:
            array = np.asarray(labels)
            integers = array.dtype.kind in "iu"  # torch does not support all of NumPy's integers
            result = torch.from_numpy(array.astype(np.int64) if integers else array)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a list of integers, got {labels!r:.60}") from error
    if result.dim() != 1 or not len(result):
        raise ValueError(f"{name} must have the shape (n,) with n > 0, got {tuple(result.shape)}")
    if result.dtype == torch.bool or result.is_floating_point() or result.is_complex():
        raise ValueError(f"{name} must be integers, got {result.dtype}")
    result = result.to(torch.int64, copy=True)
    outside = result[(result < 0) | (result >= classes)]
    if len(outside):
        raise ValueError(
            f"{name} must be from 0 to {classes - 1} for {classes} classes, got {int(outside[0])}"
        )
    return result


def checked_classes(classes: object) -> int:
    """The number of classes, at least 2."""
    return integer("classes", classes, low=2, high=MAX_CLASSES)


def checked_rate(rate: object) -> float:
    """A noise rate: at least 0 and less than 1."""
    return number("rate", rate, low=0, below=1)


def flip(labels: Integers, matrix: Any, *, seed: int, exact: bool = True) -> NoisyLabels:
    r"""Flip labels by a transition matrix.

    .. math:: T_{ij} = P(\text{noisy} = j \mid \text{clean} = i)

    By default counts are exact: it is random which labels change, but not how many. The total
    number of wrong labels is its expectation, rounded. The numbers for each class and for each pair
    of classes differ from their expectations by less than one (largest remainder method).

    Patrini et al., "Making Deep Neural Networks Robust to Label Noise", CVPR 2017.

    Args:
        labels: clean labels, a tensor, an array or a list of integers; not modified.
        matrix: row-stochastic, one row and one column for each class.
        seed: an integer from 0 to 2**32 - 1.
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
    """Flip labels by a valid transition matrix; ``facts`` are for the provenance."""
    classes, seed = len(transition), _validate.seed(seed)
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
    """A number of labels in units of 1 / UNIT, rounded to whole labels."""
    return (share + UNIT // 2) // UNIT


def apportion(shares: Array, total: int, order: Array, behind: Array | None = None) -> Array:
    """Round shares to whole labels that sum to a total, by the largest remainder method.

    Args:
        shares: in units of 1 / UNIT; each is rounded down or up.
        total: number of labels, possible with this rounding.
        order: breaks ties; the lowest is rounded up.
        behind: breaks ties before ``order``: units that each entry has lost by rounding in earlier
            calls; the largest is rounded up.
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

    The order does not depend on the counts. So if each class has one target, labels that are wrong
    at a low rate are also wrong at a higher rate.
    """
    classes = len(counts)
    order = np.argsort(random_words(seed, "order", len(y)), kind="stable")
    order = order[np.argsort(y[order], kind="stable")]
    noisy = np.empty_like(y)
    # Targets of each class in cyclic order; the class itself is last.
    targets = (np.arange(classes)[:, None] + 1 + np.arange(classes)) % classes
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
    """Random uint64 that depend only on the seed and the purpose.

    NumPy guarantees the same raw integers of PCG64 in all versions, but not the same results of its
    ``Generator`` (``permutation``, ``normal``).
    """
    key = hashlib.blake2b(f"labels/{purpose}/{seed}".encode(), digest_size=16).digest()
    raw: Array = np.random.PCG64(int.from_bytes(key, "little")).random_raw(count)
    return raw


def random_uniforms(seed: int, purpose: str, count: int) -> Array:
    """Random float64 in the open interval (0, 1), odd multiples of 2⁻⁵³."""
    words = random_words(seed, purpose, count)
    u: Array = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return u
