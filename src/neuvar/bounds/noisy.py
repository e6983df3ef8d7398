"""What the calls on models share: losses with a ceiling, and their mean under noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from neuvar._batches import Feed
from neuvar._validate import boolean
from neuvar.bounds.divergence import monte_carlo_risk, positive, prior_sigma
from neuvar.measures.estimate import Estimate
from neuvar.measures.generalization import each, refuse_if_no_mean
from neuvar.measures.landscape import BOUNDS, Landscape, Loss
from neuvar.measures.reading import are_classes, hit_rate


def zero_one(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of wrong classes: a loss with ceiling 1.

    >>> import torch
    >>> zero_one(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """
    if not are_classes(outputs, targets):
        raise ValueError("the 0-1 loss needs scores of classes as outputs and classes as targets")
    return 1 - hit_rate(outputs, targets)


@dataclass(frozen=True)
class Risk:
    """Mean loss over independent draws of noise, and what it is at least and at most."""

    losses: np.ndarray
    mean: Estimate
    lower: float
    upper: float


def risk_under_noise(
    landscape: Landscape, b: float, draws: int, failure: float, ceiling: float
) -> Risk:
    """Estimate the mean loss under noise; each limit fails with probability ``failure``."""
    readings = landscape.readings(b, range(1, draws + 1), (1,))
    losses = np.array([reading.loss for reading in readings])
    if not np.isfinite(losses).all():
        raise ValueError(f"the loss at weights with noise of scale b={b:g} is not finite")
    losses = losses.clip(0, ceiling)  # rounding of a mean may lead out of it
    mean = float(losses.mean())
    upper = monte_carlo_risk(mean, draws=draws, failure=failure, ceiling=ceiling)
    rest = monte_carlo_risk(ceiling - mean, draws=draws, failure=failure, ceiling=ceiling)
    return Risk(losses, Estimate.of(losses), ceiling - rest, upper)


def noisy_landscape(
    model: nn.Module, loss: Loss, data: Any, seed: int, feed: Feed | None, batch_size: int
) -> Landscape:
    """Landscape of a model all of whose learned numbers carry noise."""
    norms = [m for m in model.modules() if isinstance(m, _NormBase)]
    if any(isinstance(norm, _BatchNorm) or norm.track_running_stats for norm in norms):
        raise ValueError(
            "the model has batch normalisation or the like, whose statistics come from the data "
            "and carry no noise, so that no PAC-Bayes bound holds for it; use another normalisation"
        )
    return Landscape(model, loss, data, seed=seed, feed=feed, batch_size=batch_size, stream=BOUNDS)


def bounded_loss(loss: Loss, clamp: float | None) -> tuple[Loss, float]:
    """A loss that has a ceiling, and the ceiling."""
    if loss is zero_one:
        if clamp is not None:
            raise ValueError("the 0-1 loss needs no clamp")
        return loss, 1.0
    if clamp is None:
        raise ValueError(
            "the loss may have no ceiling, and then no bound holds; give clamp=..., the value "
            "above which an example's loss counts no more"
        )
    ceiling = positive("clamp", clamp)
    seen: list[bool] = []

    def clamped(outputs: Any, targets: Any) -> Tensor:
        losses = each(loss, outputs, targets)
        if not seen:  # once, at the clean weights; later calls may be batched
            refuse_if_no_mean(loss(outputs, targets), losses)
            seen.append(True)
        return losses.clamp(0, ceiling).mean()

    return clamped, ceiling


def several(name: str, value: float | Sequence[float]) -> list[float]:
    """One or several numbers above 0, as a list."""
    given = value if isinstance(value, (Sequence, np.ndarray)) else [value]
    values = [positive(name, x) for x in given]
    if not values:
        raise ValueError(f"{name} must hold at least one value")
    return values


def one_sigma(sigma: float | None) -> float | None:
    """A deviation where only one makes sense, or None."""
    return None if sigma is None else positive("sigma", sigma)


def prior_sigmas(
    sigma: float | Sequence[float] | None,
    weight_decay: float | None,
    paper_prior: bool,
    examples: int,
) -> list[float]:
    """Deviations of the prior, as given or from weight decay."""
    if (sigma is None) == (weight_decay is None):
        raise ValueError("give either sigma or weight_decay")
    boolean("paper_prior", paper_prior)
    if sigma is not None and paper_prior:
        raise ValueError("paper_prior says how weight_decay gives sigma; give it with weight_decay")
    if weight_decay is not None:
        return [prior_sigma(weight_decay, examples=None if paper_prior else examples)]
    assert sigma is not None
    return several("sigma", sigma)
