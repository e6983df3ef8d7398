"""(b, δ)-neural variability: how much the loss rises when the weights move at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from torch import nn

from neuvar._validate import boolean, integer, probability
from neuvar.measures.estimate import Estimate, limit
from neuvar.measures.landscape import Landscape, Loss, Options
from neuvar.measures.reading import Reading
from neuvar.noise import scale

FIRST_LOOK = 16
"""Independent samples before the half-width is compared with a tolerance for the first time."""


@dataclass(frozen=True)
class Variability:
    r"""Neural variability of a model at one scale b, with its error.

    The data are taken as given: the error is that of averaging over finitely many draws of ε.

    Attributes:
        b: Scale of the noise.
        clean: Loss at the model's own weights, :math:`L(\theta, S)`.
        perturbed: Neural variable risk, :math:`E_\epsilon L(\theta + \epsilon, S)`.
        difference: ``perturbed - clean``, with its sign.
        delta: Absolute value of ``difference``. It is biased upward where the difference is
            small against its error; read ``interval`` there.
        stderr: Standard error of ``difference``.
        interval: Holds the true difference with probability ``confidence``.
        upper: (b, δ)-variability holds for every δ above it, with probability ``confidence``.
        draws: How many perturbed models were evaluated.
        stopped: Why no more were: ``"tolerance"`` was met or the ``"budget"`` was spent.
        confidence: See ``interval`` and ``upper``.
        antithetic: Whether each draw was used with both signs; a pair is one sample.
        noise: Family of the noise.
        relative_to: Whether b is relative to the size of each ``"tensor"`` or ``"filter"``.
        batchnorm: Batch normalisation had its statistics kept (``"keep"``), or estimated anew at
            each set of weights (``"reestimate"``), or is ``"absent"``.
        clean_accuracy: Accuracy at the model's own weights; nan if this is no classification.
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
    ε stays the same over the whole data set, and by default serves twice, as ε and −ε: the odd
    part of the loss, which is most of the noise near a minimum, then cancels.

    The model is left exactly as found. If one of our optimizers has noise on its weights, the
    measure is taken at the clean ones. In half precision the rounding of weights and activations
    moves the loss as well; where δ is small, measure a copy in single precision.

    The batch size does not matter: each batch is weighted by its number of targets. Targets that
    the loss ignores do not count. For ``cross_entropy`` and ``nll_loss``, as functions, as modules
    or in a ``functools.partial``, these are the ones equal to ``ignore_index``, and class weights
    are part of the weight. A loss of your own is taken to ignore its attribute ``ignore_index``,
    by default -100, and negative numbers where there are scores of classes.

    References:
        Xie et al.: Artificial Neural Variability for Deep Learning, Neural Computation 33(8),
        2021, definition 1.

    Args:
        model: Any module; it is evaluated in evaluation mode.
        loss: Called as ``loss(outputs, targets)``; returns the mean over the batch.
        data: A pair of tensors, a ``DataLoader``, or a list or another iterable of batches that
            can be gone through many times. A batch is a tuple, whose last item is the target, or
            a dict with a key such as ``"labels"``.
        b: Scale of the noise: N(0, b²), Laplace(0, b) or uniform(−b, b).
        draws: How many perturbed models to evaluate; with ``tolerance``, at most. With fewer than
            32, the interval holds the truth less often than it says (85 to 90 % with 4 to 8), and
            so it does for losses that few draws change, such as the 0-1 loss of a robust model.
        tolerance: Stop once half the width of the interval is at most this, in units of the loss.
            It is looked at after 16, 32, 64, ... samples, a pair being one; to stop early costs
            about one per cent of coverage.
        confidence: Probability that ``interval`` holds the truth, and that ``upper`` exceeds it.
        antithetic: Use each draw with both signs.
        options: As follows.

            - ``noise="gaussian"``: or ``"laplace"``, ``"uniform"``.
            - ``relative_to=None``: ``"tensor"`` or ``"filter"`` multiplies b with the root mean
              square of each tensor, or of each slice along its first axis (tensors with one axis
              count as one), since raw b is not comparable across architectures. ε then has about
              b times the norm of what it is added to.
            - ``parameters=None``: which to perturb, as tensors or by name; all by default.
            - ``seed=0``: fixes all draws.
            - ``sampler="fresh"``: or ``"table"``, as in the optimizers.
            - ``batchnorm="keep"``: or ``"reestimate"``, anew from the data at each set of weights.
            - ``feed=None``: ``feed(model, batch)`` returns outputs and targets of unusual batches.
            - ``batch_size=1024``: of a pair of tensors.
            - ``vectorize=None``: whether to evaluate several perturbed models at once; by default
              where that is faster.

    Returns:
        The measurement with its error.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 1, bias=False)
        >>> x, y = torch.eye(3), model(torch.eye(3)).detach()
        >>> found = neural_variability(model, nn.functional.mse_loss, (x, y), b=0.1)
        >>> found.interval[0] < 0.1**2 < found.interval[1]  # here it is b², by calculation
        True
    """
    b, plan = scale("b", b), Plan(draws, tolerance, confidence, antithetic)
    with Landscape(model, loss, data, **options) as landscape:
        return measure(landscape, b, plan)


@dataclass(frozen=True)
class Plan:
    """How many draws to make."""

    draws: int
    tolerance: float | None
    confidence: float
    antithetic: bool

    def __post_init__(self) -> None:
        probability("confidence", self.confidence)
        boolean("antithetic", self.antithetic)
        integer("draws", self.draws, low=2 * len(self.signs))
        if self.antithetic and self.draws % 2:
            raise ValueError(f"draws must be even, since they come in pairs, got {self.draws}")
        if self.tolerance is not None and not scale("tolerance", self.tolerance) > 0:
            raise ValueError(f"tolerance must be greater than 0, got {self.tolerance!r}")

    @property
    def signs(self) -> tuple[int, ...]:
        return (1, -1) if self.antithetic else (1,)

    def looks(self) -> list[int]:
        """After how many samples to look at the error."""
        budget, n = self.draws // len(self.signs), FIRST_LOOK
        looks = []
        while self.tolerance is not None and n < budget:
            looks.append(n)
            n *= 2
        return [*looks, budget]


def measure(
    landscape: Landscape, b: float, plan: Plan, readings: Sequence[Reading] = ()
) -> Variability:
    """Measure variability on a landscape that is open, beginning with readings already made."""
    found = list(readings)
    for n in plan.looks():
        found += landscape.readings(b, range(len(found) + 1, n + 1), plan.signs)
        differences = np.array([reading.loss for reading in found]) - landscape.clean.loss
        rise = Estimate.of(differences, plan.confidence)
        half_width = (rise.interval[1] - rise.interval[0]) / 2
        met = plan.tolerance is not None and half_width <= plan.tolerance
        if met:
            break
    low, high = rise.interval
    upper = max(limit(differences, plan.confidence), -limit(differences, 1 - plan.confidence))
    # What arithmetic adds to each reading is common to all draws, and so not in their spread.
    rounding = landscape.rounding if b else 0.0
    accuracies = np.array([reading.accuracy for reading in found])
    classifies = not math.isnan(landscape.clean.accuracy)
    return Variability(
        b=b,
        clean=landscape.clean.loss,
        perturbed=landscape.clean.loss + rise.mean,
        difference=rise.mean,
        delta=abs(rise.mean),
        stderr=rise.stderr,
        interval=(low - rounding, high + rounding),
        upper=upper + rounding,
        draws=len(found) * len(plan.signs),
        stopped="tolerance" if met else "budget",
        confidence=plan.confidence,
        antithetic=plan.antithetic,
        noise=landscape.kind.noise,
        relative_to=landscape.relative_to,
        batchnorm=landscape.batchnorm,
        clean_accuracy=landscape.clean.accuracy,
        accuracy=Estimate.of(accuracies, plan.confidence) if classifies else None,
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

    It is the signed difference of :func:`neural_variability` with b = σ; with
    ``relative_to="tensor"`` or ``"filter"``, σ is relative to the size of the weights.

    References:
        Neyshabur, Bhojanapalli, McAllester, Srebro: Exploring Generalization in Deep Learning,
        NeurIPS 2017, section 2.4.

    Args:
        model: As for :func:`neural_variability`, like the other arguments.
        loss: Mean loss over a batch.
        data: What to evaluate on.
        sigma: Standard deviation of the noise.
        draws: How many perturbed models to evaluate.
        confidence: Of the interval.
        options: As for :func:`neural_variability`; ``noise`` is Gaussian.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 1, bias=False)
        >>> x, y = torch.eye(3), model(torch.eye(3)).detach()
        >>> found = expected_sharpness(model, nn.functional.mse_loss, (x, y), sigma=0.1)
        >>> found.interval[0] < 0.1**2 < found.interval[1]
        True
    """
    if options.get("noise", "gaussian") != "gaussian":
        raise ValueError(f"expected sharpness has Gaussian noise, got noise={options['noise']!r}")
    found = neural_variability(
        model,
        loss,
        data,
        b=scale("sigma", sigma),
        draws=draws,
        confidence=confidence,
        antithetic=True,
        **options,
    )
    return Estimate(found.difference, found.stderr, found.interval, found.draws // 2, confidence)
