"""Second derivatives of the loss: their trace, and whether they explain the variability."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from neuvar._batches import Feed
from neuvar._validate import integer
from neuvar.measures.estimate import Estimate, student_quantile
from neuvar.measures.landscape import Landscape, Loss, Options
from neuvar.measures.reading import at_least_single, scalar
from neuvar.measures.variability import Plan, Variability, measure
from neuvar.noise import scale
from neuvar.optim.layout import is_sharded


def hessian_trace(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    probes: int = 32,
    confidence: float = 0.95,
    relative_to: str | None = None,
    parameters: Iterable[Tensor] | Iterable[str] | None = None,
    seed: int = 0,
    feed: Feed | None = None,
    batch_size: int = 1024,
) -> Estimate:
    r"""Trace of the Hessian of the loss, by Hutchinson's method.

    .. math:: \mathrm{tr}\,H = E_v\,v^\top H v, \qquad v_i = \pm 1

    References:
        Hutchinson: A stochastic estimator of the trace of the influence matrix for Laplacian
        smoothing splines, Communications in Statistics 18(3), 1989.

    Args:
        model: Any module whose loss can be differentiated twice; it is left as found.
        loss: Mean loss over a batch.
        data: As for :func:`neural_variability`.
        probes: How many random vectors v.
        confidence: Of the interval.
        relative_to: ``"tensor"`` or ``"filter"`` measures weights in units of their root mean
            square, which makes the trace comparable across architectures.
        parameters: Of which to take the trace; all by default.
        seed: Fixes the vectors.
        feed: ``feed(model, batch)`` returns outputs and targets of unusual batches.
        batch_size: Of a pair of tensors.

    Examples:
        >>> model = nn.Linear(3, 1, bias=False)
        >>> x, y = torch.eye(3), torch.zeros(3, 1)
        >>> round(hessian_trace(model, nn.functional.mse_loss, (x, y)).mean, 5)  # H = 2/3 · 1
        2.0
    """
    integer("probes", probes, low=2)
    landscape = Landscape(
        model,
        loss,
        data,
        noise="uniform",
        relative_to=relative_to,
        parameters=parameters,
        seed=seed,
        feed=feed,
        batch_size=batch_size,
    )
    with landscape:
        return Estimate.of(quadratic_forms(landscape, probes, signs_only=True), confidence)


@dataclass(frozen=True)
class CurvatureCheck:
    r"""Whether a loss is as flat as its second derivatives say.

    Attributes:
        measured: The variability.
        predicted: Mean of :math:`\frac12 \epsilon^\top H \epsilon` over the same draws of ε, which
            estimates :math:`\frac12 s^2\,\mathrm{tr}\,H` with s the standard deviation of ε.
        ratio: Measured difference over predicted one: 1 where b is small enough, nan without any
            curvature.
        interval: Of the ratio, at the same confidence; both means share their draws, so it is far
            narrower than either error would suggest.
    """

    measured: Variability
    predicted: Estimate
    ratio: float
    interval: tuple[float, float]


def curvature_check(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    b: float,
    draws: int = 64,
    confidence: float = 0.95,
    **options: Unpack[Options],
) -> CurvatureCheck:
    r"""Compare the measured variability with that of the quadratic approximation.

    .. math:: E_\epsilon\,L(\theta + \epsilon) - L(\theta) \approx \frac12\,b^2\,\mathrm{tr}\,H

    for Gaussian noise of small b (for other families b is replaced by their deviation). A ratio
    that is not 1 says that b is too large for the loss to be quadratic, or that its slope has
    kinks: second derivatives do not see those of ReLU.

    Args:
        model: As for :func:`neural_variability`, like the other arguments.
        loss: Mean loss over a batch; it is differentiated twice.
        data: What to evaluate on.
        b: Scale of the noise.
        draws: How many perturbed models to evaluate; half as many products with the Hessian.
        confidence: Of the intervals.
        options: As for :func:`neural_variability`; batch normalisation is kept.

    Examples:
        >>> model = nn.Linear(3, 1, bias=False)
        >>> x, y = torch.eye(3), model(torch.eye(3)).detach()
        >>> check = curvature_check(model, nn.functional.mse_loss, (x, y), b=0.1)
        >>> abs(check.ratio - 1) < 1e-4
        True
    """
    if options.get("batchnorm", "keep") != "keep":
        raise ValueError(f"batchnorm must be 'keep' here, got {options['batchnorm']!r}")
    b, plan = scale("b", b), Plan(draws, None, confidence, antithetic=True)
    if b == 0:
        raise ValueError("b must be greater than 0, got 0")
    with Landscape(model, loss, data, **options) as landscape:
        readings = landscape.readings(b, range(1, draws // 2 + 1), plan.signs)
        measured = measure(landscape, b, plan, readings)
        rises = np.array([reading.loss for reading in readings]) - landscape.clean.loss
        forms = b**2 / 2 * quadratic_forms(landscape, len(rises))
    ratio, half_width = _ratio(rises, forms, confidence)
    return CurvatureCheck(
        measured, Estimate.of(forms, confidence), ratio, (ratio - half_width, ratio + half_width)
    )


def _ratio(above: np.ndarray, below: np.ndarray, confidence: float) -> tuple[float, float]:
    """Ratio of two means of paired samples, and half the width of its interval."""
    if below.mean() == 0:
        return math.nan, math.nan
    n, ratio = len(above), float(above.mean() / below.mean())
    error = float((above - ratio * below).std(ddof=1) / math.sqrt(n) / abs(below.mean()))
    return ratio, error * student_quantile((1 + confidence) / 2, n - 1)


def quadratic_forms(landscape: Landscape, count: int, *, signs_only: bool = False) -> np.ndarray:
    """Products vᵀHv for the first draws v of a landscape, or for their signs."""
    params, forms = list(landscape.slots), np.zeros(count)
    with _losses(landscape) as losses:
        for share, value in losses:
            slopes = torch.autograd.grad(value, params, create_graph=True, allow_unused=True)
            for k in range(count):
                v = landscape.direction(k + 1, signs_only=signs_only)
                along = _inner(v, dict(zip(params, slopes, strict=True)))
                if not along.requires_grad:
                    continue  # the loss is linear here
                bent = torch.autograd.grad(along, params, retain_graph=True, allow_unused=True)
                forms[k] += share * float(_inner(v, dict(zip(params, bent, strict=True))))
    return forms


def _inner(v: Mapping[Tensor, Tensor], slopes: Mapping[Tensor, Tensor | None]) -> Tensor:
    """Inner product, summed in double precision; parameters that play no part have no slope."""
    terms = [(g * v[p]).sum(dtype=torch.float64) for p, g in slopes.items() if g is not None]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def gradient(landscape: Landscape) -> Mapping[Tensor, Tensor]:
    """Slope of the mean loss over all data at the weights as they stand."""
    params = list(landscape.slots)
    total = {p: torch.zeros_like(p, requires_grad=False) for p in params}
    with _losses(landscape) as losses:
        for share, value in losses:
            slopes = torch.autograd.grad(value, params, allow_unused=True)
            for p, g in zip(params, slopes, strict=True):
                if g is not None:
                    total[p].add_(g, alpha=share)
    return total


@contextmanager
def _losses(landscape: Landscape) -> Iterator[Iterator[tuple[float, Tensor]]]:
    """Loss of each batch, ready to be differentiated, with its share of the data."""
    params, weights = list(landscape.slots), landscape.weights[:, 0]
    shares = (weights / weights.sum()).tolist()
    if any(map(is_sharded, params)):
        raise ValueError("derivatives of sharded parameters are not supported; gather them first")

    def value(batch: Any) -> Tensor:
        outputs, targets = landscape.feed(landscape.model, batch)
        found = scalar(landscape.loss(at_least_single(outputs), targets))
        if not found.requires_grad:
            raise ValueError("the loss has no derivative with respect to the parameters")
        return found

    with (
        _differentiable(params),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),  # fast attention has no second derivative
        landscape.batches.one_pass() as batches,
    ):
        pairs = zip(shares, batches, strict=True)
        yield ((share, value(batch)) for share, batch in pairs if share)  # others may be nan


@contextmanager
def _differentiable(params: Iterable[Tensor]) -> Iterator[None]:
    """Let frozen parameters have derivatives for a while."""
    frozen = [p for p in params if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
