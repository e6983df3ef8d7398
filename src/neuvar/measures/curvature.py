"""Second derivatives of the loss: the trace of the Hessian, and whether it explains variability."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from neuvar import _validate
from neuvar.measures.estimate import Estimate, student_quantile
from neuvar.measures.landscape import DataOptions, Landscape, Loss, Options
from neuvar.measures.loss_and_accuracy import half_to_float, scalar
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
    **options: Unpack[DataOptions],
) -> Estimate:
    r"""Trace of the Hessian of the loss, by Hutchinson's method.

    .. math:: \mathrm{tr}\,H = E_v\,v^\top H v, \qquad v_i = \pm 1

    ``probes`` is the number of vectors v. With ``relative_to`` weights are measured in units of
    their root mean square. The other arguments are as for :func:`neural_variability`; the loss must
    be twice differentiable.

    References:
        Hutchinson: A stochastic estimator of the trace of the influence matrix for Laplacian
        smoothing splines, Communications in Statistics 18(3), 1989.

    Examples:
        >>> model = nn.Linear(3, 1, bias=False)
        >>> x, y = torch.eye(3), torch.zeros(3, 1)
        >>> round(hessian_trace(model, nn.functional.mse_loss, (x, y)).mean, 5)  # H = 2/3 · 1
        2.0
    """
    if unknown := options.keys() - DataOptions.__annotations__.keys():
        raise TypeError(f"hessian_trace() has no argument {min(unknown)!r}")
    probes = _validate.integer("probes", probes, low=2)
    with Landscape(model, loss, data, noise="uniform", batchnorm="keep", **options) as landscape:
        return Estimate.of(quadratic_forms(landscape, probes, signs_only=True), confidence)


@dataclass(frozen=True)
class CurvatureCheck:
    r"""Measured variability against that of the quadratic approximation.

    ``predicted`` is the mean of :math:`\frac12 \epsilon^\top H \epsilon` over the same draws of ε,
    an estimate of :math:`\frac12 s^2\,\mathrm{tr}\,H` with s the standard deviation of ε. ``ratio``
    is measured over predicted difference: 1 for small b, nan without curvature. ``interval``
    contains it with probability ``confidence``; it is narrow because both share their draws.
    """

    measured: Variability
    predicted: Estimate
    ratio: float
    interval: tuple[float, float]
    confidence: float = 0.95


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

    for Gaussian noise of small b; for other families b is replaced by their standard deviation. If
    the ratio is not 1, b is too large for the loss to be quadratic, or its slope has kinks, as with
    ReLU, which second derivatives do not see. The arguments are as for :func:`neural_variability`,
    except for ``batchnorm``; the loss must be twice differentiable.

    Examples:
        >>> model = nn.Linear(3, 1, bias=False)
        >>> x, y = torch.eye(3), model(torch.eye(3)).detach()
        >>> check = curvature_check(model, nn.functional.mse_loss, (x, y), b=0.1)
        >>> abs(check.ratio - 1) < 1e-4
        True
    """
    if options.get("batchnorm", "keep") != "keep":
        raise ValueError(f"batchnorm must be 'keep' here, got {options['batchnorm']!r}")
    b, plan = _validate.number("b", scale("b", b), above=0), Plan(draws, confidence=confidence)
    with Landscape(model, loss, data, **options) as landscape:
        results = landscape.evaluate_noisy(b, range(1, draws // 2 + 1), plan.signs)
        measured = measure(landscape, b, plan, results)
        rises = np.array([result.loss for result in results]) - landscape.clean.loss
        forms = b**2 / 2 * quadratic_forms(landscape, len(rises))
    predicted = Estimate.of(forms, confidence)
    ratio = half_width = math.nan
    if predicted.mean:
        n, ratio = len(rises), float(rises.mean() / forms.mean())
        error = float((rises - ratio * forms).std(ddof=1) / math.sqrt(n) / abs(forms.mean()))
        half_width = error * student_quantile((1 + confidence) / 2, n - 1)
    interval = ratio - half_width, ratio + half_width
    return CurvatureCheck(measured, predicted, ratio, interval, confidence)


def quadratic_forms(landscape: Landscape, count: int, *, signs_only: bool = False) -> np.ndarray:
    """Products vᵀHv for the first draws v of a landscape, or for their signs."""
    params, forms = list(landscape.slots), np.zeros(count)
    with _batch_losses(landscape) as losses:
        for share, loss in losses:
            slopes = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
            for k in range(count):
                v = landscape.noise(k + 1, signs_only=signs_only)
                along = _inner(v, dict(zip(params, slopes, strict=True)))
                if not along.requires_grad:
                    continue  # the loss is linear here
                bent = torch.autograd.grad(along, params, retain_graph=True, allow_unused=True)
                forms[k] += share * float(_inner(v, dict(zip(params, bent, strict=True))))
    return forms


def _inner(v: Mapping[Tensor, Tensor], slopes: Mapping[Tensor, Tensor | None]) -> Tensor:
    """Inner product in double precision; unused parameters have no slope."""
    terms = [(g * v[p]).sum(dtype=torch.float64) for p, g in slopes.items() if g is not None]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def gradient(landscape: Landscape) -> dict[Tensor, Tensor]:
    """Gradient of the mean loss over all data at the current weights."""
    params = list(landscape.slots)
    total = {p: torch.zeros_like(p, requires_grad=False) for p in params}
    with _batch_losses(landscape) as losses:
        for share, loss in losses:
            slopes = torch.autograd.grad(loss, params, allow_unused=True)
            for p, g in zip(params, slopes, strict=True):
                if g is not None:
                    total[p].add_(g, alpha=share)
    return total


@contextmanager
def _batch_losses(landscape: Landscape) -> Iterator[Iterator[tuple[float, Tensor]]]:
    """Weight and differentiable loss of each batch; frozen parameters are differentiable too."""
    params, weights = list(landscape.slots), landscape.weights[:, 0]
    shares = (weights / weights.sum()).tolist()
    if any(map(is_sharded, params)):
        raise ValueError("derivatives of sharded parameters are not supported; gather them first")

    def value(batch: Any) -> Tensor:
        outputs, targets = landscape.feed(landscape.model, batch)
        loss = scalar(landscape.loss(half_to_float(outputs), targets))
        if not loss.requires_grad:
            raise ValueError("the loss has no derivative with respect to the parameters")
        return loss

    frozen = [p for p in params if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with (
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),  # fast attention has no second derivative
            landscape.batches.one_pass() as batches,
        ):
            pairs = zip(shares, batches, strict=True)
            yield ((share, value(batch)) for share, batch in pairs if share)  # others may be nan
    finally:
        for p in frozen:
            p.requires_grad_(False)
