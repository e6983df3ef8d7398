"""Bounds of a model on its training data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from neuvar.bounds.formulas import (
    Bound,
    forgetting_bound,
    gaussian_kl,
    information_bound,
    mcallester_bound,
    monte_carlo_risk,
    positive,
    prior_sigma,
    seeger_bound,
    variability_bound,
)
from neuvar.guard import bare
from neuvar.measures.batches import Feed
from neuvar.measures.checks import one_of, probability, whole_number, yes_or_no
from neuvar.measures.estimate import Estimate
from neuvar.measures.generalization import each, refuse_if_no_mean
from neuvar.measures.landscape import BOUNDS, Landscape, Loss
from neuvar.measures.reading import are_classes, hit_rate
from neuvar.optim.weights import held_clean

Weights = nn.Module | Mapping[str, Tensor]
"""A model, or what its ``state_dict()`` gave."""


@dataclass(frozen=True)
class Certificate:
    """A bound for a model whose weights carry Gaussian noise, and what went into it.

    Attributes:
        bound: The bound; its ``failure`` covers the data, the draws and the choices.
        form: Which bound.
        b: Scale of the noise; the best, if several were given.
        sigma: Deviation of the prior; the best, if several were given.
        clean: Loss at the model's own weights, bounded as asked for.
        perturbed: Mean loss over the draws of noise.
        upper: What that mean is at most with noise drawn for ever.
        choices: How many pairs of b and σ the best was chosen from.
    """

    bound: Bound
    form: str
    b: float
    sigma: float
    clean: float
    perturbed: Estimate
    upper: float
    choices: int


def zero_one(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of wrong classes: a loss with ceiling 1.

    >>> zero_one(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """
    if not are_classes(outputs, targets):
        raise ValueError("the 0-1 loss needs scores of classes as outputs and classes as targets")
    return 1 - hit_rate(outputs, targets)


def kl_to_prior(
    model: nn.Module, *, b: float, sigma: float, centre: Weights | None = None
) -> float:
    """Divergence of a model's noisy weights from a Gaussian prior, in nats.

    Args:
        model: Any module; all its parameters count.
        b: Scale of the Gaussian noise on its weights.
        sigma: Deviation of the prior.
        centre: Weights around which the prior lies: those before training, for example. They must
            not depend on the training data. Zero by default.

    >>> model = nn.Linear(3, 2)
    >>> round(kl_to_prior(model, b=0.1, sigma=0.1, centre=model), 12)
    0.0
    """
    distance, count = _distance(model, centre)
    return gaussian_kl(count=count, squared_distance=distance, b=b, sigma=sigma)


@torch.no_grad()
def _distance(model: nn.Module, centre: Weights | None) -> tuple[float, int]:
    """Squared distance of the clean weights from a centre, and how many weights there are."""
    origin = _tensors(centre)
    total, count = 0.0, 0
    with held_clean(model.parameters()):
        for name, p in bare(model).named_parameters():
            difference = p.detach().double()
            if origin is not None:
                if name not in origin or origin[name].shape != p.shape:
                    raise ValueError(f"centre has no weights of shape {tuple(p.shape)} for {name}")
                difference = difference - origin[name].to(p.device).double()
            total += float(difference.square().sum())
            count += p.numel()
    return total, count


def _tensors(weights: Weights | None) -> dict[str, Tensor] | None:
    if weights is None or isinstance(weights, Mapping):
        return None if weights is None else dict(weights)
    with held_clean(weights.parameters()):
        return {name: p.detach().clone() for name, p in bare(weights).named_parameters()}


def pac_bayes(
    model: nn.Module,
    data: Any,
    *,
    b: float | Sequence[float],
    sigma: float | Sequence[float] | None = None,
    weight_decay: float | None = None,
    paper_prior: bool = False,
    centre: Weights | None = None,
    loss: Loss = zero_one,
    clamp: float | None = None,
    form: str = "seeger",
    draws: int = 200,
    failure: float = 0.05,
    seed: int = 0,
    feed: Feed | None = None,
    batch_size: int = 1024,
) -> Certificate:
    r"""Bound the risk of a model whose weights carry noise, from its training data alone.

    The bound is for the network with fresh Gaussian noise on its weights, not for the clean one.
    The mean risk over the noise is bounded from finitely many independent draws
    (:func:`monte_carlo_risk`); half of ``failure`` is spent on that, half on the bound itself.

    Several b are tried with the same draws, so each must be bounded with a share of the first
    half; several σ mean several priors, which share the second half. What is tried must be fixed
    before the data are seen.

    Args:
        model: Any module without batch normalisation, whose statistics are learned from the data
            and carry no noise: no bound of this kind holds for it.
        data: The training data, in any form that :func:`neuvar.neural_variability` takes.
        b: Scale of the noise, or several.
        sigma: Deviation of the prior, or several.
        weight_decay: Gives σ instead, by :func:`prior_sigma`.
        paper_prior: With ``weight_decay``, use the paper's :math:`\sigma^2 = 1/\lambda`.
        centre: See :func:`kl_to_prior`. The weights before training bring the bound down most.
        loss: Of outputs and targets, as a mean over the batch; by default the 0-1 loss.
        clamp: Required for any other loss than the 0-1 loss: each example's loss is clamped to
            [0, ``clamp``], and the bound is for the clamped loss.
        form: ``"seeger"``, ``"mcallester"`` (lemma 1) or ``"variability"`` (theorem 1).
        draws: How many independent draws of noise.
        failure: Probability that the bound does not hold.
        seed: Fixes the draws; take another than the one by which b was found.
        feed: ``feed(model, batch)`` returns outputs and targets of unusual batches.
        batch_size: Of a pair of tensors.

    Examples:
        >>> model = nn.Linear(2, 2)
        >>> data = torch.randn(400, 2), torch.arange(400) % 2
        >>> found = pac_bayes(model, data, b=0.1, sigma=[0.1, 1.0], draws=20, centre=model)
        >>> found.sigma, found.bound.kl, found.bound.value <= 1
        (0.1, 0.0, True)
    """
    one_of("form", form, ("seeger", "mcallester", "variability"))
    whole_number("draws", draws, least=2)
    scales, half = _several("b", b), probability("failure", failure) / 2
    loss, ceiling = _bounded(loss, clamp)
    distance, count = _distance(model, centre)
    found = []
    with _noisy(model, loss, data, seed, feed, batch_size) as landscape:
        m, clean = sum(landscape.batch_sizes), min(landscape.clean.loss, ceiling)
        sigmas = _sigmas(sigma, weight_decay, paper_prior, m)
        for value in scales:
            risk = _risk(landscape, value, draws, half / len(scales), ceiling)
            for prior in sigmas:
                kl = gaussian_kl(count=count, squared_distance=distance, b=value, sigma=prior)
                bound = _bound(form, clean, risk, kl, m, half, len(sigmas), ceiling)
                bound = dataclasses.replace(bound, failure=failure)
                found.append(
                    Certificate(
                        bound,
                        form,
                        value,
                        prior,
                        clean,
                        risk.mean,
                        risk.upper,
                        len(scales) * len(sigmas),
                    )
                )
    return min(found, key=lambda certificate: certificate.bound.value)


def _bound(
    form: str,
    clean: float,
    risk: _Risk,
    kl: float,
    examples: int,
    failure: float,
    choices: int,
    ceiling: float,
) -> Bound:
    """A bound by its name."""
    if form == "variability":
        delta = max(risk.upper - clean, clean - risk.lower, 0.0)
        return variability_bound(
            clean, delta, kl, examples=examples, failure=failure, choices=choices, ceiling=ceiling
        )
    formula = seeger_bound if form == "seeger" else mcallester_bound
    return formula(
        risk.upper, kl, examples=examples, failure=failure, choices=choices, ceiling=ceiling
    )


def information(
    model: nn.Module,
    data: Any,
    *,
    b: float,
    sigma: float | None = None,
    weight_decay: float | None = None,
    paper_prior: bool = False,
    centre: Weights | None = None,
    loss: Loss = zero_one,
    clamp: float | None = None,
    draws: int = 64,
    confidence: float = 0.95,
    seed: int = 0,
    feed: Feed | None = None,
    batch_size: int = 1024,
) -> Certificate:
    r"""Estimate the mutual-information bound on the expected generalization gap.

    For any prior, :math:`I(\theta + \epsilon; S) \le E_S\,KL(Q_{nv}\|P)`. One model shows one
    term of that expectation, which stands for all of it here; average over models trained on
    independent data to do better. δ is the upper end of its measured interval. The bound is for
    the mean over training sets, so it certifies no single model.

    Args:
        model: As for :func:`pac_bayes`, like the other arguments.
        data: The training data.
        b: Scale of the noise.
        sigma: Deviation of the prior.
        weight_decay: Gives σ instead, by :func:`prior_sigma`.
        paper_prior: With ``weight_decay``, use the paper's :math:`\sigma^2 = 1/\lambda`.
        centre: See :func:`kl_to_prior`.
        loss: By default the 0-1 loss.
        clamp: Required for other losses. A loss in [0, c] is c/2-sub-Gaussian.
        draws: How many draws of noise.
        confidence: With which δ is bounded.
        seed: Fixes the draws.
        feed: ``feed(model, batch)`` returns outputs and targets of unusual batches.
        batch_size: Of a pair of tensors.

    Examples:
        >>> model = nn.Linear(2, 2)
        >>> data = torch.randn(400, 2), torch.arange(400) % 2
        >>> information(model, data, b=0.1, sigma=0.1, centre=model).bound.kl
        0.0
    """
    whole_number("draws", draws, least=2)
    probability("confidence", confidence)
    loss, ceiling = _bounded(loss, clamp)
    distance, count = _distance(model, centre)
    with _noisy(model, loss, data, seed, feed, batch_size) as landscape:
        m, clean = sum(landscape.batch_sizes), min(landscape.clean.loss, ceiling)
        (prior,) = _sigmas(_one(sigma), weight_decay, paper_prior, m)
        risk = _risk(landscape, positive("b", b), draws, 1 - confidence, ceiling)
    kl = gaussian_kl(count=count, squared_distance=distance, b=b, sigma=prior)
    delta = max(risk.upper - clean, clean - risk.lower, 0.0)
    bound = information_bound(kl, delta, examples=m, sub_gaussian=ceiling / 2)
    bound = dataclasses.replace(bound, failure=1 - confidence)
    return Certificate(bound, "information", float(b), prior, clean, risk.mean, risk.upper, 1)


@dataclass(frozen=True)
class ForgettingCertificate:
    """A bound on the risk at task A of a model that has learned task B since.

    Attributes:
        bound: The bound; its ``failure`` covers the data and the draws.
        delta_ab: By how much task A's training loss rose, both at noisy weights, with its error;
            the same draws are used before and after.
        before: Mean loss on task A's training data, over the noise, after task A.
        after: The same after task B.
        b: Scale of the noise.
        sigma: Deviation of the prior.
    """

    bound: Bound
    delta_ab: Estimate
    before: Estimate
    after: Estimate
    b: float
    sigma: float


def forgetting(
    model: nn.Module,
    before: Weights,
    data: Any,
    *,
    b: float,
    sigma: float | None = None,
    weight_decay: float | None = None,
    paper_prior: bool = False,
    centre: Weights | None = None,
    loss: Loss = zero_one,
    clamp: float | None = None,
    draws: int = 200,
    failure: float = 0.05,
    seed: int = 0,
    feed: Feed | None = None,
    batch_size: int = 1024,
) -> ForgettingCertificate:
    """Bound the risk at task A after training on task B, by :func:`forgetting_bound`.

    Args:
        model: The model after task B.
        before: The model, or its state, after task A.
        data: Training data of task A.
        b: Scale of the noise on the weights of both.
        sigma: Deviation of the prior.
        weight_decay: Gives σ instead, by :func:`prior_sigma`.
        paper_prior: With ``weight_decay``, use the paper's σ² = 1/λ.
        centre: See :func:`kl_to_prior`.
        loss: By default the 0-1 loss.
        clamp: Required for other losses.
        draws: How many independent draws of noise.
        failure: Probability that the bound does not hold.
        seed: Fixes the draws.
        feed: ``feed(model, batch)`` returns outputs and targets of unusual batches.
        batch_size: Of a pair of tensors.

    Examples:
        >>> model, after_a = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> data = torch.randn(400, 2), torch.arange(400) % 2
        >>> found = forgetting(model, after_a, data, b=0.1, sigma=1.0, draws=20)
        >>> found.bound.risk >= found.after.mean
        True
    """
    whole_number("draws", draws, least=2)
    half = probability("failure", failure) / 2
    b = positive("b", b)
    loss, ceiling = _bounded(loss, clamp)
    distance, count = _distance(model, centre)
    earlier = before if isinstance(before, nn.Module) else copy.deepcopy(model)
    if isinstance(before, Mapping):
        earlier.load_state_dict(dict(before))
    with _noisy(earlier, loss, data, seed, feed, batch_size) as landscape:
        first = _risk(landscape, b, draws, half, ceiling)
    with _noisy(model, loss, data, seed, feed, batch_size) as landscape:
        m = sum(landscape.batch_sizes)
        (prior,) = _sigmas(_one(sigma), weight_decay, paper_prior, m)
        second = _risk(landscape, b, draws, half, ceiling)
    kl = gaussian_kl(count=count, squared_distance=distance, b=b, sigma=prior)
    rise = second.upper - first.mean.mean
    bound = forgetting_bound(first.mean.mean, rise, kl, examples=m, failure=half, ceiling=ceiling)
    return ForgettingCertificate(
        bound=dataclasses.replace(bound, failure=failure),
        delta_ab=Estimate.of(second.losses - first.losses),
        before=first.mean,
        after=second.mean,
        b=b,
        sigma=prior,
    )


@dataclass(frozen=True)
class _Risk:
    """Mean loss over independent draws of noise, and what it is at least and at most."""

    losses: np.ndarray
    mean: Estimate
    lower: float
    upper: float


def _risk(landscape: Landscape, b: float, draws: int, failure: float, ceiling: float) -> _Risk:
    readings = landscape.readings(b, range(1, draws + 1), (1,))
    losses = np.array([reading.loss for reading in readings])
    if not np.isfinite(losses).all():
        raise ValueError(f"the loss at weights with noise of scale b={b:g} is not finite")
    losses = losses.clip(0, ceiling)  # rounding of a mean may lead out of it
    mean = float(losses.mean())
    upper = monte_carlo_risk(mean, draws=draws, failure=failure, ceiling=ceiling)
    rest = monte_carlo_risk(ceiling - mean, draws=draws, failure=failure, ceiling=ceiling)
    return _Risk(losses, Estimate.of(losses), ceiling - rest, upper)


def _noisy(
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


def _bounded(loss: Loss, clamp: float | None) -> tuple[Loss, float]:
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


def _several(name: str, value: float | Sequence[float]) -> list[float]:
    given = value if isinstance(value, (Sequence, np.ndarray)) else [value]
    values = [positive(name, x) for x in given]
    if not values:
        raise ValueError(f"{name} must hold at least one value")
    return values


def _one(sigma: float | None) -> float | None:
    return None if sigma is None else positive("sigma", sigma)


def _sigmas(
    sigma: float | Sequence[float] | None,
    weight_decay: float | None,
    paper_prior: bool,
    examples: int,
) -> list[float]:
    if (sigma is None) == (weight_decay is None):
        raise ValueError("give either sigma or weight_decay")
    yes_or_no("paper_prior", paper_prior)
    if sigma is not None and paper_prior:
        raise ValueError("paper_prior says how weight_decay gives sigma; give it with weight_decay")
    if weight_decay is not None:
        return [prior_sigma(weight_decay, examples=None if paper_prior else examples)]
    assert sigma is not None
    return _several("sigma", sigma)
