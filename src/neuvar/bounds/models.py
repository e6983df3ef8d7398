"""Bounds of a model on its training data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuvar._batches import Feed
from neuvar._validate import integer, one_of, probability
from neuvar.bounds.divergence import gaussian_kl, positive
from neuvar.bounds.formulas import (
    Bound,
    forgetting_bound,
    information_bound,
    mcallester_bound,
    seeger_bound,
    variability_bound,
)
from neuvar.bounds.noisy import (
    Risk,
    bounded_loss,
    noisy_landscape,
    one_sigma,
    prior_sigmas,
    risk_under_noise,
    several,
    zero_one,
)
from neuvar.measures.estimate import Estimate
from neuvar.measures.landscape import Loss
from neuvar.optim.layout import bare
from neuvar.optim.noisy_parameters import held_clean

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
    integer("draws", draws, low=2)
    scales, half = several("b", b), probability("failure", failure) / 2
    loss, ceiling = bounded_loss(loss, clamp)
    distance, count = _distance(model, centre)
    found = []
    with noisy_landscape(model, loss, data, seed, feed, batch_size) as landscape:
        m, clean = landscape.examples, min(landscape.clean.loss, ceiling)
        sigmas = prior_sigmas(sigma, weight_decay, paper_prior, m)
        for value in scales:
            risk = risk_under_noise(landscape, value, draws, half / len(scales), ceiling)
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
    risk: Risk,
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
    integer("draws", draws, low=2)
    probability("confidence", confidence)
    loss, ceiling = bounded_loss(loss, clamp)
    distance, count = _distance(model, centre)
    with noisy_landscape(model, loss, data, seed, feed, batch_size) as landscape:
        m, clean = landscape.examples, min(landscape.clean.loss, ceiling)
        (prior,) = prior_sigmas(one_sigma(sigma), weight_decay, paper_prior, m)
        risk = risk_under_noise(landscape, positive("b", b), draws, 1 - confidence, ceiling)
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
    integer("draws", draws, low=2)
    half = probability("failure", failure) / 2
    b = positive("b", b)
    loss, ceiling = bounded_loss(loss, clamp)
    distance, count = _distance(model, centre)
    earlier = before if isinstance(before, nn.Module) else copy.deepcopy(model)
    if isinstance(before, Mapping):
        earlier.load_state_dict(dict(before))
    with noisy_landscape(earlier, loss, data, seed, feed, batch_size) as landscape:
        first = risk_under_noise(landscape, b, draws, half, ceiling)
    with noisy_landscape(model, loss, data, seed, feed, batch_size) as landscape:
        m = landscape.examples
        (prior,) = prior_sigmas(one_sigma(sigma), weight_decay, paper_prior, m)
        second = risk_under_noise(landscape, b, draws, half, ceiling)
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
