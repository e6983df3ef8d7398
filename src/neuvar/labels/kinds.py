"""Kinds of label noise: pair, symmetric, semantic, superclass and instance-dependent flips."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar import _validate
from neuvar._validate import one_of, returned
from neuvar.labels.noisy_labels import (
    MAX_CLASSES,
    UNIT,
    Array,
    Integers,
    NoisyLabels,
    checked_classes,
    checked_labels,
    checked_rate,
    flip_by,
    make_result,
    random_uniforms,
    rounded,
    tensor_sha256,
)

CIFAR10_SIMILAR = (0, 1, 0, 5, 7, 3, 6, 7, 8, 1)
"""Target of each class: bird → airplane, cat ↔ dog, deer → horse, truck → automobile."""
SPREAD = 0.1
"""Standard deviation of the flip probabilities of images before truncation."""


def symmetric(
    labels: Integers, rate: float, *, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Flip labels to every other class with equal probability.

    .. math:: T_{ij} = \frac{\text{rate}}{K-1} \quad (i \neq j)

    So ``rate`` is the share of wrong labels. Some papers draw from all classes, including the true
    one: see :func:`symmetric_including_self`.

    Args:
        labels: clean labels, integers from 0.
        rate: share of labels to flip, in [0, 1).
        classes: number of classes.
        seed: an integer from 0 to 2**32 - 1.
        exact: True for exact counts, False to flip every label independently; see :func:`flip`.

    >>> symmetric([0, 1, 2] * 100, 0.4, classes=3, seed=0).counts
    tensor([[60, 20, 20],
            [20, 60, 20],
            [20, 20, 60]])
    """
    k, r = checked_classes(classes), checked_rate(rate)
    transition = np.full((k, k), r / (k - 1))
    np.fill_diagonal(transition, 1 - r)
    return flip_by(transition, labels, seed, exact, kind="symmetric", rate=r)


def symmetric_including_self(
    labels: Integers, rate: float, *, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Replace a share of the labels by random classes, which may be the true ones.

    .. math:: T_{ij} = \frac{\text{rate}}{K} \quad (i \neq j)

    So :math:`\text{rate} \cdot (K-1)/K` of the labels are wrong. For the arguments see
    :func:`symmetric`.

    >>> symmetric_including_self([0, 1] * 100, 0.4, classes=2, seed=0).rate
    0.2
    """
    k, r = checked_classes(classes), checked_rate(rate)
    transition = np.full((k, k), r / k)
    np.fill_diagonal(transition, 1 - r + r / k)
    return flip_by(transition, labels, seed, exact, kind="symmetric_including_self", rate=r)


def pair(
    labels: Integers, rate: float, *, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Flip labels of each class to the next class, and of the last class to the first.

    .. math:: T_{i,\,(i+1) \bmod K} = \text{rate}

    Han et al., "Co-teaching", NeurIPS 2018. For the arguments see :func:`symmetric`.

    >>> pair([0, 1, 2, 2, 1, 0], 0.5, classes=3, seed=0).counts
    tensor([[1, 1, 0],
            [0, 1, 1],
            [1, 0, 1]])
    """
    k, r = checked_classes(classes), checked_rate(rate)
    transition = _one_target([(i + 1) % k for i in range(k)], r)
    return flip_by(transition, labels, seed, exact, kind="pair", rate=r)


def semantic(
    labels: Integers, rate: float, *, classes: int = 10, seed: int, exact: bool = True
) -> NoisyLabels:
    """Flip labels of CIFAR-10 to a similar class.

    A share ``rate`` of five classes is flipped: truck to automobile, bird to airplane, deer to
    horse, cat to dog and dog to cat. If all classes have the same size, rate / 2 of all labels are
    wrong.

    Patrini et al., "Making Deep Neural Networks Robust to Label Noise", CVPR 2017. For the
    arguments see :func:`symmetric`; ``classes`` must be 10.

    >>> result = semantic(list(range(10)) * 10, 0.4, seed=0)
    >>> result.counts[3, 5].item(), result.counts[5, 3].item(), result.rate
    (4, 4, 0.2)
    """
    if checked_classes(classes) != 10:
        raise ValueError(f"classes must be 10 for the semantic noise of CIFAR-10, got {classes!r}")
    r = checked_rate(rate)
    transition = _one_target(CIFAR10_SIMILAR, r)
    return flip_by(transition, labels, seed, exact, kind="semantic", rate=r)


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
    groups = checked_labels("coarse", coarse, classes=2**31).cpu().numpy()
    highest = int(checked_labels("labels", labels, classes=2**31).max())
    if len(groups) > MAX_CLASSES or len(groups) == len(labels) > highest + 1:
        raise ValueError(
            "coarse must have one superclass for each class, not for each label, "
            f"got {len(groups)} for labels from 0 to {highest}"
        )
    target = np.empty_like(groups)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        if len(members) == 1:
            raise ValueError(
                "coarse must have at least two classes in each superclass, "
                f"got only class {members[0]} in {group}"
            )
        target[members] = np.roll(members, -1)
    r = checked_rate(rate)
    facts = {"kind": "superclass", "rate": r, "coarse": groups.tolist()}
    return flip_by(_one_target(target, r), labels, seed, exact, **facts)


def _one_target(target: Sequence[int] | Array, rate: float) -> Array:
    """Transition matrix that flips a share of each class to its target class."""
    transition = (1 - rate) * np.eye(len(target))
    transition[np.arange(len(target)), target] += rate
    return transition


def instance(
    labels: Integers, rate: float, *, features: Any, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Flip labels to classes that depend on the image.

    Image i is flipped with probability :math:`q_i`, drawn from a normal distribution around the
    rate with standard deviation 0.1. Its wrong class is drawn by a random linear map for each clean
    class:

    .. math:: P(\text{noisy} = j \mid x, y) = \mathrm{softmax}_{j \neq y}\big(x^\top W_y\big)_j,
              \qquad W_y \sim N(0, 1)^{d \times K}

    With larger features, the wrong class is more deterministic. If the features have a large
    common mean, most flips of a class go to one wrong class.

    Xia et al., "Part-dependent Label Noise", NeurIPS 2020, algorithm 2, with two changes that make
    the rate exact. :math:`q_i` is truncated symmetrically around the rate, so its mean is the rate.
    With ``exact``, the number of flipped labels is the rounded expectation, and labels are chosen
    with probabilities proportional to :math:`q_i` (Pareto sampling, Rosén 1997).

    For the other arguments see :func:`symmetric`. ``features`` has one row of any shape for each
    label, such as the images. Rounding may change one label in about 10¹² between machines.

    >>> x = torch.linspace(-1, 1, 60).view(20, 3)
    >>> instance([0, 1, 2, 3] * 5, 0.4, features=x, classes=4, seed=0).rate
    0.4
    """
    k, r, seed = checked_classes(classes), checked_rate(rate), _validate.seed(seed)
    clean = checked_labels("labels", labels, k)
    x = _checked_features(features, len(clean))
    y = clean.cpu()
    noisy = torch.where(_flipped(len(y), r, seed, exact), _wrong_labels(x, y, k, seed), y)
    facts = {"kind": "instance", "rate": r, "features_sha256": tensor_sha256(x)}
    facts |= {"seed": seed, "exact": bool(exact)}
    return make_result(noisy.to(clean.device), clean, k, **facts)


def _checked_features(features: Any, count: int) -> Tensor:
    try:
        x = torch.as_tensor(features).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"features must be numbers, got {features!r:.60}") from error
    if x.dim() < 2 or len(x) != count or not x.numel():
        raise ValueError(
            f"features must have one row for each of {count} labels, got the shape {tuple(x.shape)}"
        )
    if x.is_complex() or not bool(x.isfinite().all()):
        raise ValueError("features must be finite real numbers")
    return x.flatten(1)


def _flipped(count: int, rate: float, seed: int, exact: bool) -> Tensor:
    """Mask of the flipped labels."""
    u = random_uniforms(seed, "flipped", count)
    q = _flip_probabilities(count, rate, seed)
    score = (u / (1 - u)) * ((1 - q) / np.maximum(q, 1e-300))  # below 1 where u < q
    flipped = score < 1
    if exact:
        flipped[:] = False
        flipped[np.argsort(score, kind="stable")[: rounded(round(rate * count * UNIT))]] = True
    return torch.from_numpy(flipped)


def _flip_probabilities(count: int, rate: float, seed: int) -> Array:
    """Normal flip probabilities around the rate, truncated symmetrically to [0, 1]."""
    cutoff = min(rate, 1 - rate) / SPREAD
    inside = math.erf(cutoff / math.sqrt(2))
    level = 0.5 + (random_uniforms(seed, "odds", count) - 0.5) * inside
    z = torch.special.ndtri(torch.from_numpy(level)).numpy()
    q: Array = np.clip(rate + SPREAD * z, 0, 1)
    return q


def _wrong_labels(x: Tensor, y: Tensor, classes: int, seed: int) -> Tensor:
    """The class of each image after a flip."""
    u = torch.from_numpy(random_uniforms(seed, "target", len(y)))
    wrong = torch.empty_like(y)
    for label in y.unique().tolist():
        members = y == label
        level = random_uniforms(seed, f"map/{label}", x.shape[1] * classes)
        w = torch.special.ndtri(torch.from_numpy(level)).view(-1, classes)
        scores = x[members].double() @ w
        if not bool(scores.isfinite().all()):
            raise ValueError(
                "features must be small enough for finite scores in float64, "
                f"got magnitudes up to {float(x[members].double().abs().max()):.3g}"
            )
        scores[:, label] = -math.inf
        levels = scores.softmax(1).cumsum(1)
        levels = levels / levels[:, -1:]
        wrong[members] = (u[members, None] >= levels).sum(1)
    return wrong


KINDS: dict[str, Callable[..., NoisyLabels]] = {
    "pair": pair,
    "symmetric": symmetric,
    "symmetric_including_self": symmetric_including_self,
    "semantic": semantic,
    "superclass": superclass,
    "instance": instance,
}
"""Functions by name, called as ``function(labels, rate, seed=..., exact=..., **options)``. You can
add your own."""


def corrupt(
    kind: str, labels: Integers, rate: float, *, seed: int, exact: bool = True, **options: Any
) -> NoisyLabels:
    """Make label noise by the name of its kind.

    Args:
        kind: one of :data:`KINDS`. For the next four arguments see :func:`symmetric`.
        labels: clean labels.
        rate: share of labels.
        seed: an integer from 0 to 2**32 - 1.
        exact: whether counts are exact.
        options: other arguments of the kind, such as ``classes``, ``coarse`` or ``features``.

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
    result = KINDS[one_of("kind", kind, KINDS)](labels, rate, seed=seed, exact=exact, **options)
    noisy: NoisyLabels
    noisy = returned(f'KINDS["{kind}"]', result, NoisyLabels, "neuvar.labels.NoisyLabels")
    if len(noisy) != len(labels):
        raise ValueError(
            f'KINDS["{kind}"] must return a label for each of {len(labels)}, got {len(noisy)}'
        )
    return noisy
