"""Label noise by name: pair, symmetric, semantic and superclass flips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from neuvar._validate import one_of
from neuvar.labels.instance_noise import instance
from neuvar.labels.result import (
    MAX_CLASSES,
    Integers,
    NoisyLabels,
    checked_classes,
    checked_labels,
    checked_rate,
)
from neuvar.labels.transition import Array, flip_by

CIFAR10_CONFUSIONS = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}
"""truck → automobile, bird → airplane, deer → horse, cat ↔ dog."""


def symmetric(
    labels: Integers, rate: float, *, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Flip labels to every other class with equal probability.

    .. math:: T_{ij} = \frac{\text{rate}}{K-1} \quad (i \neq j)

    So ``rate`` is the share of wrong labels. For papers that draw from all classes, including the
    true one, use :func:`symmetric_including_self`.

    Args:
        labels: clean labels, integers from 0.
        rate: share of labels to flip, in [0, 1).
        classes: number of classes.
        seed: any integer.
        exact: True for exact counts, False to flip every label independently; see :func:`flip`.

    >>> symmetric([0, 1, 2] * 100, 0.4, classes=3, seed=0).counts
    tensor([[60, 20, 20],
            [20, 60, 20],
            [20, 20, 60]])
    """
    k, r = checked_classes(classes), checked_rate(rate)
    transition = np.full((k, k), r / (k - 1))
    np.fill_diagonal(transition, 1 - r)
    return _flip("symmetric", labels, transition, r, seed, exact)


def symmetric_including_self(
    labels: Integers, rate: float, *, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Draw a share of the labels again from all classes, including the true one.

    .. math:: T_{ij} = \frac{\text{rate}}{K} \quad (i \neq j)

    So :math:`\text{rate} \cdot (K-1)/K` of the labels are wrong. For the arguments see
    :func:`symmetric`.

    >>> symmetric_including_self([0, 1] * 100, 0.4, classes=2, seed=0).rate
    0.2
    """
    k, r = checked_classes(classes), checked_rate(rate)
    transition = np.full((k, k), r / k)
    np.fill_diagonal(transition, 1 - r + r / k)
    return _flip("symmetric_including_self", labels, transition, r, seed, exact)


def pair(
    labels: Integers, rate: float, *, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Flip labels of each class to the next class, those of the last class to the first.

    .. math:: T_{i,\,(i+1) \bmod K} = \text{rate}

    Han et al., "Co-teaching", NeurIPS 2018. For the arguments see :func:`symmetric`.

    >>> pair([0, 1, 2, 2, 1, 0], 0.5, classes=3, seed=0).counts
    tensor([[1, 1, 0],
            [0, 1, 1],
            [1, 0, 1]])
    """
    k, r = checked_classes(classes), checked_rate(rate)
    transition = _confusion_matrix({i: (i + 1) % k for i in range(k)}, r, k)
    return _flip("pair", labels, transition, r, seed, exact)


def semantic(
    labels: Integers, rate: float, *, classes: int = 10, seed: int, exact: bool = True
) -> NoisyLabels:
    """Flip labels of CIFAR-10 to a similar class.

    Flips a share ``rate`` of five classes: truck to automobile, bird to airplane, deer to horse,
    cat to dog and dog to cat. The other five do not change, so with classes of equal size the share
    of wrong labels is half the rate.

    Patrini et al., "Making Deep Neural Networks Robust to Label Noise", CVPR 2017. For the
    arguments see :func:`symmetric`; ``classes`` must be 10.

    >>> result = semantic(list(range(10)) * 10, 0.4, seed=0)
    >>> result.counts[3, 5].item(), result.counts[5, 3].item(), result.rate
    (4, 4, 0.2)
    """
    if checked_classes(classes) != 10:
        raise ValueError(f"classes must be 10 for the semantic noise of CIFAR-10, got {classes!r}")
    r = checked_rate(rate)
    transition = _confusion_matrix(CIFAR10_CONFUSIONS, r, 10)
    return _flip("semantic", labels, transition, r, seed, exact)


def superclass(
    labels: Integers, rate: float, *, coarse: Integers, seed: int, exact: bool = True
) -> NoisyLabels:
    """Flip labels of each class to the next class of the same superclass.

    The last class of a superclass goes to its first. With the 20 superclasses of CIFAR-100 this is
    the asymmetric noise of Patrini et al., "Making Deep Neural Networks Robust to Label Noise",
    CVPR 2017. ``coarse`` has the superclass of each class; for the other arguments see
    :func:`symmetric`.

    >>> superclass([0, 0, 1, 1, 2, 2, 3, 3], 0.5, coarse=[0, 1, 1, 0], seed=0).counts
    tensor([[1, 0, 0, 1],
            [0, 1, 1, 0],
            [0, 1, 1, 0],
            [1, 0, 0, 1]])
    """
    groups = checked_labels("coarse", coarse, classes=2**31).tolist()
    fine = checked_labels("labels", labels, classes=2**31)
    if len(groups) > MAX_CLASSES or len(groups) == len(fine) > int(fine.max()) + 1:
        raise ValueError(
            "coarse must have one superclass for each class, not for each label, "
            f"got {len(groups)} for labels from 0 to {int(fine.max())}"
        )
    families: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        families.setdefault(group, []).append(i)
    confusions: dict[int, int] = {}
    for group, family in families.items():
        if len(family) == 1:
            raise ValueError(f"coarse must not have {group} for class {family[0]} only")
        confusions |= dict(zip(family, family[1:] + family[:1], strict=True))
    r = checked_rate(rate)
    transition = _confusion_matrix(confusions, r, len(groups))
    return _flip("superclass", labels, transition, r, seed, exact, coarse=groups)


def _confusion_matrix(confusions: Mapping[int, int], rate: float, classes: int) -> Array:
    """Transition matrix that sends a share of some classes to one other class each."""
    transition = np.eye(classes)
    for i, j in confusions.items():
        transition[i, i], transition[i, j] = 1 - rate, rate
    return transition


def _flip(
    kind: str,
    labels: Integers,
    transition: Array,
    rate: float,
    seed: int,
    exact: bool,
    **facts: Any,
) -> NoisyLabels:
    provenance = {"kind": kind, "rate": rate, **facts}
    return flip_by(transition, labels, seed=seed, exact=exact, provenance=provenance)


KINDS: dict[str, Callable[..., NoisyLabels]] = {
    "pair": pair,
    "symmetric": symmetric,
    "symmetric_including_self": symmetric_including_self,
    "semantic": semantic,
    "superclass": superclass,
    "instance": instance,
}
"""Functions by name, called as ``function(labels, rate, seed=..., exact=..., **options)``; you may
add your own."""


def corrupt(
    kind: str, labels: Integers, rate: float, *, seed: int, exact: bool = True, **options: Any
) -> NoisyLabels:
    """Make label noise by the name of its kind.

    Args:
        kind: one of :data:`KINDS`; the other arguments are those of its function.
        labels: clean labels, integers from 0.
        rate: share of labels, in [0, 1).
        seed: any integer.
        exact: True for exact counts, False to flip every label independently.
        options: such as ``classes``, ``coarse`` or ``features``.

    >>> corrupt("pair", [0, 1, 2, 2, 1, 0], 0.5, classes=3, seed=0).rate
    0.5

    Add a kind of your own, here one that flips only class 0:

    >>> from neuvar.labels import flip
    >>> def first_class(labels, rate, **options):
    ...     return flip(labels, [[1 - rate, rate], [0, 1]], **options)
    >>> KINDS["first_class"] = first_class
    >>> corrupt("first_class", [0, 0, 1, 1], 0.5, seed=0).rate
    0.25
    >>> del KINDS["first_class"]
    """
    return KINDS[one_of("kind", kind, KINDS)](labels, rate, seed=seed, exact=exact, **options)
