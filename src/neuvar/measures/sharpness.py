"""Sharpness: expected, in the worst direction, and from second derivatives of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from neuvar import _validate
from neuvar._batches import Feed
from neuvar.measures.estimate import Estimate, student_quantile
from neuvar.measures.landscape import DataOptions, Landscape, Options, lists_options
from neuvar.measures.loss_and_accuracy import Loss, half_to_float, scalar
from neuvar.measures.perturbed import Parameters
from neuvar.measures.variability import Plan, Variability, measure
from neuvar.noise import pieces, scale
from neuvar.optim.layout import is_sharded


@lists_options(Options, Landscape)
def expected_sharpness(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    sigma: float,
    draws: int = 64,
    confidence: float = 0.95,
    **options: Unpack[Options],
) -> Estimate:
    r"""Expected sharpness: the mean rise of the loss under Gaussian noise of deviation σ.

    .. math:: E_{\nu \sim N(0, \sigma^2 I)}\,L(\theta + \nu, S) - L(\theta, S)

    This is the signed difference of :func:`neural_variability` with b = σ, and has its arguments.

    References:
        Neyshabur et al. 2017, Exploring generalization in deep learning, section 2.4.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> x, y = torch.eye(3), model(torch.eye(3)).detach()
    >>> result = expected_sharpness(model, nn.functional.mse_loss, (x, y), sigma=0.1)
    >>> result.interval[0] < 0.1**2 < result.interval[1]
    True
    """
    if options.get("noise", "gaussian") != "gaussian":
        raise ValueError(f"expected sharpness needs Gaussian noise, got noise={options['noise']!r}")
    b, plan = scale("sigma", sigma), Plan(draws, confidence=confidence)
    with Landscape(model, loss, data, **options) as landscape:
        rise = measure(landscape, b, plan)
    return Estimate(rise.difference, rise.stderr, rise.interval, rise.draws // 2, confidence)


@lists_options(DataOptions, Landscape)
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

    ``probes`` is the number of vectors v. With ``relative_to`` each weight is measured in units
    of the root mean square of its tensor or filter, or of itself. The other arguments are as for
    :func:`neural_variability`; the loss must be twice differentiable.

    References:
        Hutchinson 1989, A stochastic estimator of the trace of the influence matrix.

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
    is the measured difference divided by the predicted one: 1 for small b, nan without curvature.
    ``interval`` contains the true ratio with probability ``confidence``.
    """

    measured: Variability
    predicted: Estimate
    ratio: float
    interval: tuple[float, float]
    confidence: float = 0.95


@lists_options(Options, Landscape)
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
    the ratio is not 1, b is too large for the quadratic approximation, or the gradient is not
    continuous, as with ReLU: the Hessian does not contain its jumps. The arguments are as for
    :func:`neural_variability`, except for ``batchnorm``; the loss must be twice differentiable.

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
            gradients = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)
            for k in range(count):
                v = list(landscape.noise(k + 1, signs_only=signs_only).values())
                slope = _inner(v, gradients)
                if slope.requires_grad:  # else the loss is linear
                    hessian_v = torch.autograd.grad(
                        slope, params, retain_graph=True, materialize_grads=True
                    )
                    forms[k] += share * float(_inner(v, hessian_v))
    return forms


def _inner(v: Sequence[Tensor], w: Sequence[Tensor]) -> Tensor:
    """Inner product in double precision."""
    products = [(x * y).sum(dtype=torch.float64) for x, y in zip(v, w, strict=True)]
    return torch.stack(products).sum()


def gradient(landscape: Landscape) -> dict[Tensor, Tensor]:
    """Gradient of the mean loss over all data at the current weights."""
    total = {p: torch.zeros_like(p, requires_grad=False) for p in landscape.slots}
    with _batch_losses(landscape) as losses:
        for share, loss in losses:
            gradients = torch.autograd.grad(loss, list(total), materialize_grads=True)
            for sum_, g in zip(total.values(), gradients, strict=True):
                sum_.add_(g, alpha=share)
    return total


@contextmanager
def _batch_losses(landscape: Landscape) -> Iterator[Iterator[tuple[float, Tensor]]]:
    """Weight and differentiable loss of each batch; frozen parameters have gradients, too."""
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
            # The loss of a batch of weight 0 may be nan.
            yield ((share, value(batch)) for share, batch in pairs if share)
    finally:
        for p in frozen:
            p.requires_grad_(False)


@dataclass(frozen=True)
class Sharpness:
    r"""Sharpness in the worst direction that the search found.

    ``value`` is :math:`100\,(\max L - L) / (1 + L)` from the ``clean`` and the ``highest`` loss. It
    is a lower bound: more ``steps`` and ``starts`` can only raise it. ``evaluations`` is the number
    of points at which the search computes the loss.
    """

    value: float
    clean: float
    highest: float
    epsilon: float
    subspace: int | None
    evaluations: int


def keskar_sharpness(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    epsilon: float = 1e-3,
    subspace: int | None = None,
    steps: int = 20,
    starts: int = 1,
    parameters: Parameters | None = None,
    seed: int = 0,
    feed: Feed | None = None,
    batch_size: int = 1024,
) -> Sharpness:
    r""":math:`(C_\epsilon, A)`-sharpness: the highest loss in a box around the weights.

    .. math::

        \frac{\max_{y \in C_\epsilon} L(\theta + A y) - L(\theta)}{1 + L(\theta)} \cdot 100,
        \qquad C_\epsilon = \{y : |y_i| \le \epsilon\,(|(A^+\theta)_i| + 1)\}

    A is the identity, or has ``subspace`` random columns with standard Gaussian entries. The
    search takes ``steps`` of projected ascent along the sign of the gradient from ``starts`` random
    points; the paper used L-BFGS-B. The other arguments are as for :func:`neural_variability`.

    References:
        Keskar et al. 2017, On large-batch training for deep learning, metric 2.1.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> x = torch.ones(1, 1)
    >>> data = x, model(x).detach()
    >>> result = keskar_sharpness(model, nn.functional.mse_loss, data, epsilon=0.1)
    >>> abs(result.value - (0.1 * (abs(model.weight.item()) + 1))**2 * 100) < 1e-3
    True
    """
    epsilon = scale("epsilon", epsilon)
    steps = _validate.integer("steps", steps, low=1)
    starts = _validate.integer("starts", starts, low=1)
    if subspace is not None:
        subspace = _validate.integer("subspace", subspace, low=1)
    with Landscape(
        model, loss, data, parameters=parameters, seed=seed, feed=feed, batch_size=batch_size
    ) as landscape:
        space = _WholeSpace(landscape) if subspace is None else _Subspace(landscape, subspace)
        width = epsilon * (space.coordinates.abs() + 1)
        generator = torch.Generator().manual_seed(seed)
        clean = highest = landscape.clean.loss
        for _ in range(starts):
            start = width * (2 * torch.rand(width.shape, generator=generator).to(width) - 1)
            highest = max(highest, _ascend(landscape, space, start, width, steps))
    value, evaluations = 100 * (highest - clean) / (1 + clean), starts * (steps + 1)
    return Sharpness(value, clean, highest, epsilon, subspace, evaluations)


def _ascend(
    landscape: Landscape, space: _WholeSpace, y: Tensor, width: Tensor, steps: int
) -> float:
    """Highest loss on an ascent inside the box."""
    highest = -math.inf
    for step in range(steps + 1):
        landscape.move(space.to_weights(y))
        loss = landscape.evaluate().loss
        if not math.isfinite(loss):
            return math.inf
        highest = max(highest, loss)
        if step < steps:
            # The first step can cross the box; later ones are shorter, to find maxima inside it.
            stride = 2.0 / (1 + step) ** 0.5 * width
            direction = space.to_coordinates(gradient(landscape)).sign()
            y = (y + stride * direction).clamp(-width, width)
    return highest


class _WholeSpace:
    """Coordinates y of all weights, in one row: A is the identity."""

    def __init__(self, landscape: Landscape) -> None:
        self.landscape = landscape
        self.coordinates = self.to_coordinates({p: p.detach() for p in landscape.slots})

    def to_weights(self, y: Tensor) -> dict[Tensor, Tensor]:
        """A y for each parameter."""
        params = list(self.landscape.slots)
        parts = y.split([p.numel() for p in params])
        return {p: part.view(p.shape).to(p.device) for p, part in zip(params, parts, strict=True)}

    def to_coordinates(self, values: dict[Tensor, Tensor]) -> Tensor:
        """Aᵀ times values of all weights; for a gradient, this is the gradient in y."""
        rows = [g.reshape(-1) for g in values.values()]
        return torch.cat([row.to(rows[0].device) for row in rows])


class _Subspace(_WholeSpace):
    """Coordinates y in a random subspace; the columns of A are drawn again at every use."""

    def __init__(self, landscape: Landscape, dimension: int) -> None:
        weights = sum(p.numel() for p in landscape.slots)
        if dimension > weights:
            raise ValueError(f"subspace must be at most the {weights} weights, got {dimension}")
        self.dimension = dimension
        super().__init__(landscape)
        gram = torch.zeros(dimension, dimension, dtype=torch.float64)
        for p in landscape.slots:
            for _, _, z in self._columns(p):
                gram += (z @ z.T).double().cpu()
        self.coordinates = torch.linalg.solve(gram, self.coordinates)

    def _columns(self, p: Tensor) -> Iterable[tuple[int, int, Tensor]]:
        """Blocks of rows of A that belong to a parameter, transposed."""
        slot = self.landscape.slots[p]
        draws = (self.landscape.draw._replace(number=k + 1) for k in range(self.dimension))
        for parts in zip(*(pieces(slot, draw, p.device) for draw in draws), strict=True):
            yield parts[0][0], parts[0][1], torch.stack([z for _, _, z in parts])

    def to_weights(self, y: Tensor) -> dict[Tensor, Tensor]:
        shift = {}
        for p in self.landscape.slots:
            rows = [y.to(z) @ z for _, _, z in self._columns(p)]
            shift[p] = torch.cat(rows).view(p.shape) if rows else torch.zeros_like(p)
        return shift

    def to_coordinates(self, values: dict[Tensor, Tensor]) -> Tensor:
        total = torch.zeros(self.dimension, dtype=torch.float64)
        for p, g in values.items():
            flat = g.reshape(-1)
            for low, high, z in self._columns(p):
                total += (z @ flat[low:high].to(z.dtype)).double().cpu()
        return total
