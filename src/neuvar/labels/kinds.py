"""The kinds of label noise that experiments name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from neuvar.labels.features import instance
from neuvar.labels.flips import flip_as
from neuvar.labels.randomness import Array
from neuvar.labels.result import (
    MOST_CLASSES,
    Integers,
    NoisyLabels,
    checked_classes,
    checked_labels,
    checked_rate,
)

CIFAR10_CONFUSIONS = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}
"""truck → automobile, bird → airplane, deer → horse, cat ↔ dog."""


def pair(
    labels: Integers, rate: float, *, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Flip a share of the labels of each class to the next class, the last class to the first.

    .. math:: T_{i,\,(i+1) \bmod K} = \text{rate}

    Han et al., "Co-teaching", NeurIPS 2018.

    Args:
        labels: clean labels, integers from 0.
        rate: share of labels to flip, in [0, 1).
        classes: how many classes there are.
        seed: any int; the same one gives the same labels on any machine.
        exact: fixed counts, or independent flips; see :func:`neuvar.labels.flip`.

    Returns:
        The labels with noise and its book-keeping.

    >>> pair([0, 1, 2, 2, 1, 0], 0.5, classes=3, seed=0).counts
    tensor([[1, 1, 0],
            [0, 1, 1],
            [1, 0, 1]])
    """
    k = checked_classes(classes)
    confusions = {i: (i + 1) % k for i in range(k)}
    return _flip("pair", labels, _confused(confusions, checked_rate(rate), k), rate, seed, exact)


def symmetric(
    labels: Integers, rate: float, *, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Flip a share of the labels to another class, each other class alike, never to itself.

    .. math:: T_{ij} = \frac{\text{rate}}{K-1} \quad (i \neq j)

    So ``rate`` is the share of wrong labels. Where a paper draws from all classes, the label's own
    among them, use :func:`symmetric_including_self`.

    Args:
        labels: clean labels, integers from 0.
        rate: share of labels to flip, in [0, 1).
        classes: how many classes there are.
        seed: any int; the same one gives the same labels on any machine.
        exact: fixed counts, or independent flips; see :func:`neuvar.labels.flip`.

    Returns:
        The labels with noise and its book-keeping.

    >>> symmetric([0, 1, 2] * 100, 0.4, classes=3, seed=0).counts
    tensor([[60, 20, 20],
            [20, 60, 20],
            [20, 20, 60]])
    """
    k, r = checked_classes(classes), checked_rate(rate)
    transition = np.full((k, k), r / (k - 1))
    np.fill_diagonal(transition, 1 - r)
    return _flip("symmetric", labels, transition, rate, seed, exact)


def symmetric_including_self(
    labels: Integers, rate: float, *, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Draw a share of the labels anew from all classes, the label's own among them.

    .. math:: T_{ij} = \frac{\text{rate}}{K} \quad (i \neq j)

    Only :math:`\text{rate} \cdot (K-1)/K` of the labels are wrong afterwards.

    Args:
        labels: clean labels, integers from 0.
        rate: share of labels to draw anew, in [0, 1).
        classes: how many classes there are.
        seed: any int; the same one gives the same labels on any machine.
        exact: fixed counts, or independent flips; see :func:`neuvar.labels.flip`.

    Returns:
        The labels with noise and its book-keeping.

    >>> symmetric_including_self([0, 1] * 100, 0.4, classes=2, seed=0).rate
    0.2
    """
    k, r = checked_classes(classes), checked_rate(rate)
    transition = np.full((k, k), r / k)
    np.fill_diagonal(transition, 1 - r + r / k)
    return _flip("symmetric_including_self", labels, transition, rate, seed, exact)


def semantic(
    labels: Integers, rate: float, *, classes: int = 10, seed: int, exact: bool = True
) -> NoisyLabels:
    """Flip labels of CIFAR-10 to a class that looks similar.

    A share ``rate`` of each of five classes: truck to automobile, bird to airplane, deer to horse,
    cat to dog and dog to cat. The other five keep their labels, so with classes of equal size the
    share of wrong labels is half the rate.

    Patrini et al., "Making Deep Neural Networks Robust to Label Noise", CVPR 2017.

    Args:
        labels: clean labels of CIFAR-10 in their official numbering.
        rate: share of labels to flip in each of the five classes, in [0, 1).
        classes: 10; anything else is refused.
        seed: any int; the same one gives the same labels on any machine.
        exact: fixed counts, or independent flips; see :func:`neuvar.labels.flip`.

    Returns:
        The labels with noise and its book-keeping.

    >>> found = semantic(list(range(10)) * 10, 0.4, seed=0)
    >>> found.counts[3, 5].item(), found.counts[5, 3].item(), found.rate
    (4, 4, 0.2)
    """
    if checked_classes(classes) != 10:
        raise ValueError(f"classes must be 10 for the semantic noise of CIFAR-10, got {classes!r}")
    transition = _confused(CIFAR10_CONFUSIONS, checked_rate(rate), 10)
    return _flip("semantic", labels, transition, rate, seed, exact)


def superclass(
    labels: Integers, rate: float, *, coarse: Integers, seed: int, exact: bool = True
) -> NoisyLabels:
    """Flip a share of the labels of each class to the next class of the same superclass.

    The last class of a superclass goes to its first. With the twenty superclasses of CIFAR-100 this
    is the asymmetric noise of Patrini et al., "Making Deep Neural Networks Robust to Label Noise",
    CVPR 2017.

    Args:
        labels: clean labels, integers from 0.
        rate: share of labels to flip, in [0, 1).
        coarse: the superclass of each class, in the order of the classes.
        seed: any int; the same one gives the same labels on any machine.
        exact: fixed counts, or independent flips; see :func:`neuvar.labels.flip`.

    Returns:
        The labels with noise and its book-keeping.

    >>> superclass([0, 0, 1, 1, 2, 2, 3, 3], 0.5, coarse=[0, 1, 1, 0], seed=0).counts
    tensor([[1, 0, 0, 1],
            [0, 1, 1, 0],
            [0, 1, 1, 0],
            [1, 0, 0, 1]])
    """
    groups = checked_labels("coarse", coarse, classes=2**31).tolist()
    fine = checked_labels("labels", labels, classes=2**31)
    if len(groups) > MOST_CLASSES or len(groups) == len(fine) > int(fine.max()) + 1:
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
            raise ValueError(
                f"coarse must give a class a relative, got {group} for class {family[0]} only"
            )
        confusions |= dict(zip(family, family[1:] + family[:1], strict=True))
    transition = _confused(confusions, checked_rate(rate), len(groups))
    return _flip("superclass", labels, transition, rate, seed, exact, coarse=groups)


KINDS: dict[str, Callable[..., NoisyLabels]] = {
    "pair": pair,
    "symmetric": symmetric,
    "symmetric_including_self": symmetric_including_self,
    "semantic": semantic,
    "superclass": superclass,
    "instance": instance,
}


def corrupt(
    kind: str, labels: Integers, rate: float, *, seed: int, exact: bool = True, **needs: Any
) -> NoisyLabels:
    """Make label noise of a kind that is known by its name.

    Args:
        kind: ``"pair"``, ``"symmetric"``, ``"symmetric_including_self"``, ``"semantic"``,
            ``"superclass"`` or ``"instance"``: the function of that name.
        labels: clean labels, integers from 0.
        rate: share of labels, in [0, 1), as that function understands it.
        seed: any int; the same one gives the same labels on any machine.
        exact: fixed counts, or independent flips.
        needs: what else the function takes, such as ``classes``, ``coarse`` or ``features``.

    Returns:
        The labels with noise and its book-keeping.

    >>> corrupt("pair", [0, 1, 2, 2, 1, 0], 0.5, classes=3, seed=0).rate
    0.5
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS[kind](labels, rate, seed=seed, exact=exact, **needs)


def _confused(confusions: Mapping[int, int], rate: float, classes: int) -> Array:
    """Matrix that sends a share of some classes to one other class each."""
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
    facts = {"kind": kind, "rate": float(rate), **facts}
    return flip_as(facts, labels, transition, seed=seed, exact=exact)
