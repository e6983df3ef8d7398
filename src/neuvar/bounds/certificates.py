"""Bounds for a model, from its training data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from neuvar import _validate
from neuvar._batches import Feed
from neuvar.bounds import formulas
from neuvar.bounds.formulas import Bound, gaussian_kl, prior_sigma
from neuvar.measures.conversion import several
from neuvar.measures.estimate import Estimate
from neuvar.measures.landscape import DataOptions, Landscape, lists_options
from neuvar.measures.loss_and_accuracy import (
    Loss,
    are_classes,
    batch_accuracy,
    check_mean,
    loss_per_example,
)
from neuvar.measures.perturbed import BOUNDS
from neuvar.optim.layout import bare
from neuvar.optim.noisy_parameters import held_clean

Weights = nn.Module | Mapping[str, Tensor]
"""A model or its ``state_dict()``."""


@dataclass(frozen=True)
class Certificate:
    """A bound for a model with Gaussian noise on its weights.

    Attributes:
        bound: The bound; its ``failure`` covers the data, the draws and the choices.
        form: Name of the bound.
        b: Scale of the noise with the lowest bound.
        sigma: Standard deviation of the prior with the lowest bound.
        clean: Loss at the model's own weights.
        perturbed: Mean loss over the draws of noise.
        upper: Upper bound on the mean loss over all noise.
        choices: Number of pairs of b and σ from which the best was chosen.
    """

    bound: Bound
    form: str
    b: float
    sigma: float
    clean: float
    perturbed: Estimate
    upper: float
    choices: int


class BoundOptions(TypedDict, total=False):
    """Options common to the bounds of models; see :func:`pac_bayes`."""

    weight_decay: float | None
    paper_prior: bool
    centre: Weights | None
    loss: Loss
    clamp: float | None
    draws: int
    seed: int
    feed: Feed | None
    batch_size: int


def zero_one(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of wrong classes: a loss with ceiling 1.

    >>> zero_one(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """
    if not are_classes(outputs, targets):
        raise ValueError("the 0-1 loss needs logits as outputs and classes as targets")
    return 1 - batch_accuracy(outputs, targets)


def kl_to_prior(
    model: nn.Module, *, b: float, sigma: float, centre: Weights | None = None
) -> float:
    """KL divergence of a model's noisy weights from a Gaussian prior, in nats.

    Args:
        model: Any module; all its parameters count.
        b: Scale of the Gaussian noise on its weights.
        sigma: Standard deviation of the prior.
        centre: Mean of the prior, for example the weights before training; it must not depend on
            the training data. Zero by default.

    >>> model = nn.Linear(3, 2)
    >>> round(kl_to_prior(model, b=0.1, sigma=0.1, centre=model), 12)
    0.0
    """
    count, distance = _count_and_distance(model, centre)
    return gaussian_kl(count=count, squared_distance=distance, b=b, sigma=sigma)


@torch.no_grad()
def _count_and_distance(model: nn.Module, centre: Weights | None) -> tuple[int, float]:
    """Number of weights, and squared distance of the clean weights from a centre."""
    if isinstance(centre, nn.Module):
        with held_clean(centre.parameters()):
            centre = {name: p.detach().clone() for name, p in bare(centre).named_parameters()}
    total, count = 0.0, 0
    with held_clean(model.parameters()):
        for name, p in bare(model).named_parameters():
            difference = p.detach().double()
            if centre is not None:
                if name not in centre or centre[name].shape != p.shape:
                    raise ValueError(f"centre has no weights of shape {tuple(p.shape)} for {name}")
                difference = difference - centre[name].to(p.device).double()
            total += float(difference.square().sum())
            count += p.numel()
    return count, total


@dataclass
class _Problem:
    """A model, its training data and the options of a bound, validated."""

    model: nn.Module
    data: Any
    sigma: float | Sequence[float] | None
    weight_decay: float | None = None
    paper_prior: bool = False
    centre: Weights | None = None
    loss: Loss = zero_one
    clamp: float | None = None
    draws: int = 200
    seed: int = 0
    feed: Feed | None = None
    batch_size: int = 1024

    def __post_init__(self) -> None:
        self.draws = _validate.integer("draws", self.draws, low=2)
        _validate.boolean("paper_prior", self.paper_prior)
        if (self.sigma is None) == (self.weight_decay is None):
            raise ValueError("pass either sigma or weight_decay")
        if self.sigma is not None and self.paper_prior:
            raise ValueError("paper_prior needs weight_decay, from which it computes sigma")
        self.loss, self.ceiling = _bounded_loss(self.loss, self.clamp)
        self.count, self.distance = _count_and_distance(self.model, self.centre)

    def landscape(self, model: nn.Module) -> Landscape:
        """Landscape of a model; refuses normalization with statistics of the data."""
        norms = [m for m in model.modules() if isinstance(m, _NormBase)]
        if any(isinstance(norm, _BatchNorm) or norm.track_running_stats for norm in norms):
            raise ValueError(
                "the model has batch normalization or a similar layer, whose statistics come from "
                "the data and have no noise, so no PAC-Bayes bound holds; use another normalization"
            )
        options: DataOptions = {"seed": self.seed, "feed": self.feed, "batch_size": self.batch_size}
        return Landscape(model, self.loss, self.data, stream=BOUNDS, **options)

    def sigmas(self, examples: int) -> list[float]:
        """Standard deviations of the priors, from sigma or from weight decay."""
        if self.weight_decay is not None:
            return [prior_sigma(self.weight_decay, examples=None if self.paper_prior else examples)]
        assert self.sigma is not None
        return _positive("sigma", self.sigma)

    def kl(self, b: float, sigma: float) -> float:
        return gaussian_kl(count=self.count, squared_distance=self.distance, b=b, sigma=sigma)

    def risk(self, landscape: Landscape, b: float, failure: float) -> _Risk:
        """Loss under noise; each limit fails with probability ``failure``."""
        results = landscape.evaluate_noisy(b, range(1, self.draws + 1), (1,))
        losses = np.array([result.loss for result in results])
        if not np.isfinite(losses).all():
            raise ValueError(f"the loss at weights with noise of scale b={b:g} is not finite")
        ceiling, losses = self.ceiling, losses.clip(0, self.ceiling)  # a mean may be rounded up
        clean, mean = min(landscape.clean.loss, ceiling), float(losses.mean())
        upper, rest = (
            formulas.monte_carlo_risk(value, draws=self.draws, failure=failure, ceiling=ceiling)
            for value in (mean, ceiling - mean)
        )
        delta = max(upper - clean, clean - (ceiling - rest), 0.0)
        return _Risk(losses, Estimate.of(losses), clean, upper, delta)


class _Risk(NamedTuple):
    """Losses of independent draws, their mean, the clean loss, and upper bounds on mean and δ."""

    losses: np.ndarray
    mean: Estimate
    clean: float
    upper: float
    delta: float


def _bounded_loss(loss: Loss, clamp: float | None) -> tuple[Loss, float]:
    """A loss with a ceiling, and the ceiling."""
    if loss is zero_one:
        if clamp is not None:
            raise ValueError("the 0-1 loss needs no clamp")
        return loss, 1.0
    if clamp is None:
        raise ValueError(
            "no bound holds for a loss without a ceiling; pass clamp=..., the value to which the "
            "loss of each example is clamped"
        )
    ceiling, checked = _validate.number("clamp", clamp, above=0), False

    def clamped(outputs: Any, targets: Any) -> Tensor:
        nonlocal checked
        losses = loss_per_example(loss, outputs, targets)
        if not checked:  # once, at the clean weights; later calls may be vectorized
            check_mean(loss(outputs, targets), losses)
            checked = True
        return losses.clamp(0, ceiling).mean()

    return clamped, ceiling


def _positive(name: str, value: float | Sequence[float]) -> list[float]:
    """One or several numbers above 0, as a list."""
    return [_validate.number(name, x, above=0) for x in several(name, value)]


@lists_options(BoundOptions, _Problem)
def pac_bayes(
    model: nn.Module,
    data: Any,
    *,
    b: float | Sequence[float],
    sigma: float | Sequence[float] | None = None,
    form: str = "seeger",
    failure: float = 0.05,
    **options: Unpack[BoundOptions],
) -> Certificate:
    r"""Bound the risk of a model with noise on its weights, from its training data alone.

    The bound is for the network with fresh Gaussian noise on its weights, not for the clean one.
    Half of ``failure`` is for the Monte Carlo estimate of the risk (:func:`monte_carlo_risk`), half
    for the bound itself. Several b share the first half, several σ the second. They must be fixed
    before the data are seen.

    Args:
        model: Any module without batch normalization, for which no such bound holds.
        data: The training data, as for :func:`neuvar.neural_variability`.
        b: Scale of the noise, or several.
        sigma: Standard deviation of the prior, or several.
        form: ``"seeger"``, ``"mcallester"`` (lemma 1) or ``"variability"`` (theorem 1).
        failure: Probability that the bound does not hold.
        options:
            - ``weight_decay=None``: gives σ instead, by :func:`prior_sigma`.
            - ``paper_prior=False``: use the paper's :math:`\sigma^2 = 1/\lambda`.
            - ``centre=None``: see :func:`kl_to_prior`; weights before training are best.
            - ``loss=zero_one``: a loss that returns the mean over the batch.
            - ``clamp=None``: for other losses, the ceiling of the loss of each example.
            - ``draws=200``: number of perturbed models to evaluate, all independent.
            - ``seed=0``: of the draws; use another one than for choosing b.
            - ``feed=None``: ``feed(model, batch)`` returns outputs and targets of other batches.
            - ``batch_size=1024``: of a pair of tensors.

    >>> model = nn.Linear(2, 2)
    >>> data = torch.randn(400, 2), torch.arange(400) % 2
    >>> result = pac_bayes(model, data, b=0.1, sigma=[0.1, 1.0], draws=20, centre=model)
    >>> result.sigma, result.bound.kl, result.bound.value <= 1
    (0.1, 0.0, True)
    """
    _validate.one_of("form", form, ("seeger", "mcallester", "variability"))
    scales, half = _positive("b", b), _validate.probability("failure", failure) / 2
    problem = _Problem(model, data, sigma, **options)
    with problem.landscape(model) as landscape:
        sigmas = problem.sigmas(landscape.examples)
        risks = [problem.risk(landscape, value, half / len(scales)) for value in scales]
    certificates = []
    for (value, risk), prior in itertools.product(zip(scales, risks, strict=True), sigmas):
        numbers: dict[str, Any] = {
            "kl": problem.kl(value, prior),
            "examples": landscape.examples,
            "failure": half,
            "choices": len(sigmas),
            "ceiling": problem.ceiling,
        }
        if form == "variability":
            bound = formulas.variability_bound(risk.clean, risk.delta, **numbers)
        else:
            formula = formulas.seeger_bound if form == "seeger" else formulas.mcallester_bound
            bound = formula(risk.upper, **numbers)
        bound, choices = replace(bound, failure=failure), len(scales) * len(sigmas)
        measured = risk.clean, risk.mean, risk.upper
        certificates.append(Certificate(bound, form, value, prior, *measured, choices))
    return min(certificates, key=lambda certificate: certificate.bound.value)


@lists_options(BoundOptions, _Problem)
def information(
    model: nn.Module,
    data: Any,
    *,
    b: float,
    sigma: float | None = None,
    confidence: float = 0.95,
    **options: Unpack[BoundOptions],
) -> Certificate:
    r"""Estimate the mutual-information bound on the expected generalization gap.

    For any prior, :math:`I(\theta + \epsilon; S) \le E_S\,KL(Q_{nv}\|P)`. Here the KL of one
    model estimates the expectation; a mean over models trained on independent data is better. The
    bound is for the mean over training sets, not for this one model. δ is an upper bound with
    probability ``confidence``. See :func:`pac_bayes` for the arguments.

    >>> model = nn.Linear(2, 2)
    >>> data = torch.randn(400, 2), torch.arange(400) % 2
    >>> information(model, data, b=0.1, sigma=0.1, centre=model).bound.kl
    0.0
    """
    failure = 1 - _validate.probability("confidence", confidence)
    problem = _Problem(model, data, _one_sigma(sigma), **options)
    b = _validate.number("b", b, above=0)
    with problem.landscape(model) as landscape:
        risk = problem.risk(landscape, b, failure)
    examples, width = landscape.examples, problem.ceiling / 2
    (prior,) = problem.sigmas(examples)
    kl = problem.kl(b, prior)
    bound = formulas.information_bound(kl, risk.delta, examples=examples, sub_gaussian=width)
    bound = replace(bound, failure=failure)
    return Certificate(bound, "information", b, prior, risk.clean, risk.mean, risk.upper, 1)


def _one_sigma(sigma: float | None) -> float | None:
    return None if sigma is None else _validate.number("sigma", sigma, above=0)


@dataclass(frozen=True)
class ForgettingCertificate:
    """A bound on the risk at task A of a model that has then learned task B.

    Attributes:
        bound: The bound; its ``failure`` covers the data and the draws.
        delta_ab: Rise of task A's training loss at noisy weights, with the same draws.
        before: Mean loss on task A's training data, over the noise, after task A.
        after: The same after task B.
        b: Scale of the noise.
        sigma: Standard deviation of the prior.
    """

    bound: Bound
    delta_ab: Estimate
    before: Estimate
    after: Estimate
    b: float
    sigma: float


@lists_options(BoundOptions, _Problem)
def certify_forgetting(
    model: nn.Module,
    before: Weights,
    data: Any,
    *,
    b: float,
    sigma: float | None = None,
    failure: float = 0.05,
    **options: Unpack[BoundOptions],
) -> ForgettingCertificate:
    """Bound the risk at task A after training on task B, by :func:`forgetting_bound`.

    ``model`` is the model after task B, ``before`` the model or its state after task A, ``data``
    the training data of task A. See :func:`pac_bayes` for the other arguments.

    >>> model, after_a = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> data = torch.randn(400, 2), torch.arange(400) % 2
    >>> result = certify_forgetting(model, after_a, data, b=0.1, sigma=1.0, draws=20)
    >>> result.bound.risk >= result.after.mean
    True
    """
    half, b = _validate.probability("failure", failure) / 2, _validate.number("b", b, above=0)
    problem = _Problem(model, data, _one_sigma(sigma), **options)
    if isinstance(before, Mapping):
        weights, before = before, copy.deepcopy(model)
        before.load_state_dict(dict(weights))
    with problem.landscape(before) as landscape:
        first = problem.risk(landscape, b, half)
    with problem.landscape(model) as landscape:
        second = problem.risk(landscape, b, half)
    (prior,), start = problem.sigmas(landscape.examples), first.mean.mean
    bound = formulas.forgetting_bound(
        start,
        second.upper - start,
        problem.kl(b, prior),
        examples=landscape.examples,
        failure=half,
        ceiling=problem.ceiling,
    )
    rise = Estimate.of(second.losses - first.losses)
    bound = replace(bound, failure=failure)
    return ForgettingCertificate(bound, rise, first.mean, second.mean, b, prior)
