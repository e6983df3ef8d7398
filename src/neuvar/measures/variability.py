"""(b, δ)-neural variability: how much the loss rises under random noise on the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from torch import nn

from neuvar import _validate
from neuvar.measures.estimate import Estimate, limit
from neuvar.measures.landscape import Landscape, Loss, Options
from neuvar.measures.loss_and_accuracy import LossAndAccuracy
from neuvar.noise import scale

FIRST_CHECK = 16
"""Independent samples before the half-width is first compared with the tolerance."""


@dataclass(frozen=True)
class Variability:
    r"""Neural variability of a model at one scale b.

    The data are fixed: the error comes from the finite number of draws of ε.

    Attributes:
        b: Scale of the noise.
        clean: Loss at the model's own weights, :math:`L(\theta, S)`.
        perturbed: Neural variable risk, :math:`E_\epsilon L(\theta + \epsilon, S)`.
        difference: ``perturbed - clean``, signed.
        delta: Absolute value of ``difference``; biased upward if that is small against its error.
        stderr: Standard error of ``difference``.
        interval: Contains the true difference with probability ``confidence``.
        upper: With probability ``confidence``, (b, δ)-variability holds for every δ above it.
        draws: Number of perturbed models evaluated.
        stopped: ``"tolerance"`` if it was reached, else ``"budget"``.
        confidence: Confidence level of ``interval`` and ``upper``.
        antithetic: Whether each draw was used with both signs; a pair is one sample.
        noise: Family of the noise.
        relative_to: Whether b is relative to the size of each ``"tensor"`` or ``"filter"``.
        batchnorm: ``"keep"``, ``"reestimate"``, or ``"absent"`` without batch normalization.
        clean_accuracy: Accuracy at the model's own weights; nan without classes.
        accuracy: Mean accuracy at perturbed weights, or None.
    """

    b: float
    clean: float
    perturbed: float
    difference: float
    delta: float
    stderr: float
    interval: tuple[float, float]
    upper: float
    draws: int
    stopped: str
    confidence: float
    antithetic: bool
    noise: str
    relative_to: str | None
    batchnorm: str
    clean_accuracy: float
    accuracy: Estimate | None

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"b = {self.b:g}: loss {self.clean:.4g} -> {self.perturbed:.4g}, difference "
            f"{self.difference:.4g} [{low:.4g}, {high:.4g}], δ <= {self.upper:.4g} "
            f"at {self.confidence:.0%} ({self.draws} draws, {self.stopped})"
        )


def neural_variability(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    b: float,
    draws: int = 64,
    tolerance: float | None = None,
    confidence: float = 0.95,
    antithetic: bool = True,
    **options: Unpack[Options],
) -> Variability:
    r"""Measure how much a model's loss rises when its weights are perturbed.

    .. math:: E_\epsilon\,L(\theta + \epsilon, S) - L(\theta, S)

    A model has (b, δ)-neural variability if the absolute value of this is at most δ. Each draw of
    ε is the same for the whole data set. The model and its weights are not changed; an optimizer's
    noise is removed meanwhile. In half precision rounding changes the loss too: if δ is small,
    measure a copy in single precision.

    The batch size does not matter: batches are weighted by their number of targets, without those
    that the loss ignores. ``cross_entropy`` and ``nll_loss``, as functions, modules or in a
    ``functools.partial``, ignore ``ignore_index``, and their class weights are part of the weight.
    Other losses are taken to ignore their attribute ``ignore_index``, by default -100, and negative
    targets if the outputs are scores of classes.

    References:
        Xie et al.: Artificial Neural Variability for Deep Learning, Neural Computation 33(8),
        2021, definition 1.

    Args:
        model: Any module; it is evaluated in evaluation mode.
        loss: Called as ``loss(outputs, targets)``; returns the mean over the batch.
        data: A pair of tensors, a ``DataLoader``, or an iterable of batches that can be iterated
            many times. A batch is a tuple whose last item is the target, or a dict with a key such
            as ``"labels"``.
        b: Scale of the noise: N(0, b²), Laplace(0, b) or uniform(−b, b).
        draws: Number of perturbed models to evaluate; with ``tolerance``, the maximum. With fewer
            than 32 the interval is too narrow (85 to 90 % coverage with 4 to 8), as it is for
            losses that few draws change, such as the 0-1 loss of a robust model.
        tolerance: Stop when the half-width of the interval, in units of the loss, is at most this.
            It is checked after 16, 32, 64, ... samples; early stopping costs about 1 % of coverage.
        confidence: Confidence level of ``interval`` and ``upper``.
        antithetic: Use each draw as ε and −ε, which cancels the odd part of the loss.
        options:
            - ``noise="gaussian"``: or ``"laplace"``, ``"uniform"``.
            - ``relative_to=None``: ``"tensor"`` or ``"filter"`` multiplies b by the root mean
              square of each tensor, or of each slice along its first axis. Raw b is not comparable
              across architectures.
            - ``parameters=None``: which to perturb, as tensors or by name; all by default.
            - ``seed=0``: of all draws.
            - ``sampler="fresh"``: or ``"table"``, as in the optimizers.
            - ``batchnorm="keep"``: or ``"reestimate"`` its statistics at each set of weights.
            - ``feed=None``: ``feed(model, batch)`` returns outputs and targets of other batches.
            - ``batch_size=1024``: of a pair of tensors.
            - ``vectorize=None``: evaluate several perturbed models at once; if faster by default.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 1, bias=False)
        >>> x, y = torch.eye(3), model(torch.eye(3)).detach()
        >>> result = neural_variability(model, nn.functional.mse_loss, (x, y), b=0.1)
        >>> result.interval[0] < 0.1**2 < result.interval[1]  # the true value is b²
        True
    """
    b, plan = scale("b", b), Plan(draws, tolerance, confidence, antithetic)
    with Landscape(model, loss, data, **options) as landscape:
        return measure(landscape, b, plan)


@dataclass(frozen=True)
class Plan:
    """Number of draws and when to stop."""

    draws: int
    tolerance: float | None = None
    confidence: float = 0.95
    antithetic: bool = True

    def __post_init__(self) -> None:
        _validate.probability("confidence", self.confidence)
        _validate.boolean("antithetic", self.antithetic)
        _validate.integer("draws", self.draws, low=2 * len(self.signs))
        if self.antithetic and self.draws % 2:
            raise ValueError(f"draws must be even, since they come in pairs, got {self.draws}")
        if self.tolerance is not None:
            _validate.number("tolerance", self.tolerance, above=0)

    @property
    def signs(self) -> tuple[int, ...]:
        return (1, -1) if self.antithetic else (1,)

    def checks(self) -> list[int]:
        """Numbers of samples after which to check the error."""
        budget, n = self.draws // len(self.signs), FIRST_CHECK
        checks = []
        while self.tolerance is not None and n < budget:
            checks.append(n)
            n *= 2
        return [*checks, budget]


def measure(
    landscape: Landscape, b: float, plan: Plan, results: Sequence[LossAndAccuracy] = ()
) -> Variability:
    """Measure variability on an open landscape; ``results`` are those of the first draws."""
    results = list(results)
    for n in plan.checks():
        results += landscape.evaluate_noisy(b, range(len(results) + 1, n + 1), plan.signs)
        differences = np.array([result.loss for result in results]) - landscape.clean.loss
        rise = Estimate.of(differences, plan.confidence)
        low, high = rise.interval
        met = plan.tolerance is not None and (high - low) / 2 <= plan.tolerance
        if met:
            break
    upper = max(limit(differences, plan.confidence), -limit(differences, 1 - plan.confidence))
    # Rounding is common to all draws, so their spread does not show it.
    rounding = landscape.rounding if b else 0.0
    accuracies = np.array([result.accuracy for result in results])
    has_classes = not math.isnan(landscape.clean.accuracy)
    return Variability(
        b=b,
        clean=landscape.clean.loss,
        perturbed=landscape.clean.loss + rise.mean,
        difference=rise.mean,
        delta=abs(rise.mean),
        stderr=rise.stderr,
        interval=(low - rounding, high + rounding),
        upper=upper + rounding,
        draws=len(results) * len(plan.signs),
        stopped="tolerance" if met else "budget",
        confidence=plan.confidence,
        antithetic=plan.antithetic,
        noise=landscape.draw.noise,
        relative_to=landscape.relative_to,
        batchnorm=landscape.batchnorm,
        clean_accuracy=landscape.clean.accuracy,
        accuracy=Estimate.of(accuracies, plan.confidence) if has_classes else None,
    )


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
        Neyshabur, Bhojanapalli, McAllester, Srebro: Exploring Generalization in Deep Learning,
        NeurIPS 2017, section 2.4.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 1, bias=False)
        >>> x, y = torch.eye(3), model(torch.eye(3)).detach()
        >>> result = expected_sharpness(model, nn.functional.mse_loss, (x, y), sigma=0.1)
        >>> result.interval[0] < 0.1**2 < result.interval[1]
        True
    """
    if options.get("noise", "gaussian") != "gaussian":
        raise ValueError(f"expected sharpness has Gaussian noise, got noise={options['noise']!r}")
    b, plan = scale("sigma", sigma), Plan(draws, confidence=confidence)
    with Landscape(model, loss, data, **options) as landscape:
        rise = measure(landscape, b, plan)
    return Estimate(rise.difference, rise.stderr, rise.interval, rise.draws // 2, confidence)
