"""Label noise that depends on the image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar._validate import integer
from neuvar.labels.result import (
    Integers,
    NoisyLabels,
    checked_classes,
    checked_labels,
    checked_rate,
    make_result,
    tensor_sha256,
)
from neuvar.labels.transition import UNIT, Array, random_uniforms, rounded

SPREAD = 0.1
"""Standard deviation, before truncation, of the flip probabilities of single images."""


def instance(
    labels: Integers, rate: float, *, features: Any, classes: int, seed: int, exact: bool = True
) -> NoisyLabels:
    r"""Flip labels to classes that depend on the image.

    Image i is flipped with probability :math:`q_i`, drawn from a normal distribution around the
    rate with standard deviation 0.1. Its wrong class is drawn by a random linear map for each clean
    class:

    .. math:: P(\text{noisy} = j \mid x, y) = \mathrm{softmax}_{j \neq y}\big(x^\top W_y\big)_j,
              \qquad W_y \sim N(0, 1)^{d \times K}

    The longer the feature vectors, the more the image alone decides its wrong class. Features with
    a large common mean favour one wrong class for each true one.

    Xia et al., "Part-dependent Label Noise", NeurIPS 2020, algorithm 2, with two changes that make
    the rate exact: :math:`q_i` is truncated symmetrically around the rate, so its mean is the rate;
    and with ``exact`` the rounded number of labels is flipped, chosen with probabilities
    proportional to :math:`q_i` (Pareto sampling, Rosén 1997).

    Args:
        labels: clean labels, integers from 0.
        rate: share of labels to flip, in [0, 1).
        features: one row of numbers for each label, of any shape, such as the images.
        classes: number of classes.
        seed: any integer. Rounding of float64 may change one label in about 10¹² between machines.
        exact: True for an exact number of flips, False for independent flips.

    >>> x = torch.linspace(-1, 1, 60).view(20, 3)
    >>> instance([0, 1, 2, 3] * 5, 0.4, features=x, classes=4, seed=0).rate
    0.4
    """
    k, r, seed = checked_classes(classes), checked_rate(rate), integer("seed", seed)
    clean = checked_labels("labels", labels, k)
    x = _checked_features(features, len(clean))
    y = clean.cpu()
    noisy = torch.where(_flipped(len(y), r, seed, exact), _wrong_labels(x, y, k, seed), y)
    facts = {"kind": "instance", "rate": r, "seed": seed, "exact": bool(exact)}
    facts["features_sha256"] = tensor_sha256(x)
    return make_result(noisy.to(clean.device), clean, classes=k, provenance=facts)


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
    """True for the labels that change."""
    u = random_uniforms(seed, "flipped", count)
    q = _flip_probabilities(count, rate, seed)
    score = (u / (1 - u)) * ((1 - q) / np.maximum(q, 1e-300))  # below 1 where u < q
    if not exact:
        return torch.from_numpy(score < 1)
    flipped = torch.zeros(count, dtype=torch.bool)
    chosen = np.argsort(score, kind="stable")[: rounded(round(rate * count * UNIT))]
    flipped[torch.from_numpy(chosen)] = True
    return flipped


def _flip_probabilities(count: int, rate: float, seed: int) -> Array:
    """Flip probabilities: normal around the rate, truncated symmetrically to stay in [0, 1]."""
    reach = min(rate, 1 - rate) / SPREAD
    inside = math.erf(reach / math.sqrt(2))
    level = 0.5 + (random_uniforms(seed, "odds", count) - 0.5) * inside
    z = torch.special.ndtri(torch.from_numpy(level)).numpy()
    q: Array = np.clip(rate + SPREAD * z, 0, 1)
    return q


def _wrong_labels(x: Tensor, y: Tensor, classes: int, seed: int) -> Tensor:
    """The wrong class of each image if its label is flipped."""
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
