"""Label noise that depends on the image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar.labels import randomness
from neuvar.labels.flips import UNIT, rounded
from neuvar.labels.result import (
    Integers,
    NoisyLabels,
    account,
    checked_classes,
    checked_labels,
    checked_rate,
    checked_seed,
    tensor_sha256,
)

SPREAD = 0.1
"""Standard deviation, before truncation, of the odds of being flipped from image to image."""


def instance(
    labels: Integers, rate: float, *, features: Any, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Flip labels to classes that depend on the image.

    Image i is flipped with probability :math:`q_i`, a normal number around the rate with standard
    deviation 0.1, and then takes a class by a random linear map, one for each clean class:

    .. math:: P(\text{noisy} = j \mid x, y) = \mathrm{softmax}_{j \neq y}\big(x^\top W_y\big)_j,
              \qquad W_y \sim N(0, 1)^{d \times K}

    The longer the feature vectors, the more the image alone decides which wrong class it gets;
    features with a large common mean favour one wrong class for each true one.
    After Xia et al., "Part-dependent Label Noise", NeurIPS 2020, algorithm 2, with two changes that
    make the rate what it says: :math:`q_i` is truncated symmetrically around the rate, not to
    [0, 1], so that its mean is the rate; and of exact counts exactly the rounded number is flipped,
    chosen with these odds (Pareto sampling, Rosén 1997).

    Args:
        labels: clean labels, integers from 0.
        rate: share of labels to flip, in [0, 1).
        features: one row for each label, numbers of any shape, such as the images.
        classes: how many classes there are.
        seed: any int; the same one gives the same labels on any machine, unless the rounding of
            float64 decides, which it does for one label in about 10¹².
        exact: exact number of flips, or independent flips.

    Returns:
        The labels with noise and its book-keeping.

    >>> x = torch.linspace(-1, 1, 60).view(20, 3)
    >>> instance([0, 1, 2, 3] * 5, 0.4, features=x, classes=4, seed=0).rate
    0.4
    """
    k, r, seed = checked_classes(classes), checked_rate(rate), checked_seed(seed)
    clean = checked_labels("labels", labels, k)
    x = _checked_features(features, len(clean))
    y = clean.cpu()
    noisy = torch.where(_flipped(len(y), r, seed, exact), _wrong_labels(x, y, k, seed), y)
    facts = {"kind": "instance", "rate": r, "seed": seed, "exact": bool(exact)}
    facts["features_sha256"] = tensor_sha256(x)
    return account(noisy.to(clean.device), clean, classes=k, provenance=facts)


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
        raise ValueError("features must be finite real numbers, got others among them")
    return x.flatten(1)


def _flipped(count: int, rate: float, seed: int, exact: bool) -> Tensor:
    """Which labels change: each with its own odds, in exact mode exactly so many."""
    u = randomness.uniforms(seed, "flipped", count)
    q = _odds(count, rate, seed)
    score = (u / (1 - u)) * ((1 - q) / np.maximum(q, 1e-300))  # below 1 where u < q
    if not exact:
        return torch.from_numpy(score < 1)
    flipped = torch.zeros(count, dtype=torch.bool)
    chosen = np.argsort(score, kind="stable")[: rounded(round(rate * count * UNIT))]
    flipped[torch.from_numpy(chosen)] = True
    return flipped


def _odds(count: int, rate: float, seed: int) -> np.ndarray[Any, Any]:
    """Normal numbers around the rate, cut off at equal distances on both sides inside [0, 1]."""
    reach = min(rate, 1 - rate) / SPREAD
    inside = math.erf(reach / math.sqrt(2))
    level = 0.5 + (randomness.uniforms(seed, "odds", count) - 0.5) * inside
    z = torch.special.ndtri(torch.from_numpy(level)).numpy()
    q: np.ndarray[Any, Any] = np.clip(rate + SPREAD * z, 0, 1)
    return q


def _wrong_labels(x: Tensor, y: Tensor, classes: int, seed: int) -> Tensor:
    """The class that each image takes if its label is flipped."""
    u = torch.from_numpy(randomness.uniforms(seed, "target", len(y)))
    wrong = torch.empty_like(y)
    for label in y.unique().tolist():
        members = y == label
        level = randomness.uniforms(seed, f"map/{label}", x.shape[1] * classes)
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
