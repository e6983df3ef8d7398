"""(b, δ)-neural variability: how much the loss rises under random noise on the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from torch import nn

from neuvar import _validate
from neuvar.measures.estimate import Estimate, limit
from neuvar.measures.landscape import Landscape, Options, lists_options
from neuvar.measures.loss_and_accuracy import Loss, LossAndAccuracy
from neuvar.measures.perturbed import check_draws
from neuvar.measures.plots import plot_band
from neuvar.noise import scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIRST_CHECK = 16
"""Number of samples after which the half-width is first compared with the tolerance."""


@dataclass(frozen=True)
class Variability:
    r"""Neural variability of a model at one scale b.

    The data are fixed: the error comes from the finite number of draws of ε.

    Attributes:
        b: Scale of the noise.
        clean: Loss at the model's own weights, :math:`L(\theta, S)`.
        perturbed: Neural variable risk, :math:`E_\epsilon L(\theta + \epsilon, S)`.
        difference: ``perturbed - clean``, signed.
        delta: Absolute value of ``difference``; biased upwards if ``difference`` is not
            significant.
        stderr: Standard error of ``difference``.
        interval: Contains the true difference with probability ``confidence``.
        upper: With probability ``confidence``, (b, δ)-variability holds for every δ above it.
        draws: Number of perturbed models evaluated.
        stopped: ``"tolerance"`` if it was reached, else ``"budget"``.
        confidence: Confidence level of ``interval`` and ``upper``.
        antithetic: Whether each draw was used as ε and −ε; such a pair is one sample.
        noise: Family of the noise.
        relative_to: Whether b is relative to each ``"tensor"``, ``"filter"`` or ``"weight"``.
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


@lists_options(Options, Landscape)
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
    ε is the same for the whole dataset. The model and its weights are not changed; an optimizer's
    noise is removed during the measurement. In half precision rounding changes the loss too: if δ
    is small, measure a copy in single precision.

    The batch size does not matter: each batch is weighted by its number of targets that are not
    ignored. ``cross_entropy`` and ``nll_loss``, as functions, modules or in a
    ``functools.partial``, ignore ``ignore_index``; if they have class weights, the sum of these is
    used instead of the number. For other losses, targets that equal their attribute
    ``ignore_index`` (-100 without one) count as ignored, and so do negative targets if the outputs
    are logits.

    References:
        Xie et al. 2021, Artificial neural variability for deep learning, definition 1.

    Args:
        model: Any module; it is evaluated in evaluation mode.
        loss: Called as ``loss(outputs, targets)``; returns the mean over the batch.
        data: A pair of tensors, a ``DataLoader``, or an iterable of batches that can be iterated
            many times. A batch is a tuple whose last item is the target, or a dict with a key such
            as ``"labels"``.
        b: Scale of the noise: N(0, b²), Laplace(0, b) or uniform(−b, b).
        draws: Number of perturbed models to evaluate; with ``tolerance``, the maximum. With fewer
            than 32 the interval is too narrow (coverage of 85 to 90 % with 4 to 8). It is also too
            narrow if only a few draws change the loss, as for the 0-1 loss of a robust model.
        tolerance: Stop when the half-width of the interval, in units of the loss, is at most this.
            It is checked after 16, 32, 64, ... samples; early stopping costs about 1 % of coverage.
        confidence: Confidence level of ``interval`` and ``upper``.
        antithetic: Use each draw as ε and −ε, which cancels the odd part of the loss.
        options:
            - ``noise="gaussian"``: or ``"laplace"``, ``"uniform"``.
            - ``relative_to=None``: ``"tensor"`` or ``"filter"`` multiplies b by the root mean
              square of each tensor, or of each slice along its first axis; ``"weight"`` by each
              weight. Raw b is not comparable across architectures.
            - ``parameters=None``: which to perturb, as tensors or by name; all by default.
            - ``seed=0``: of all draws.
            - ``sampler="fresh"``: or ``"table"``, as in the optimizers.
            - ``batchnorm="keep"``: or ``"reestimate"`` its statistics at each set of weights.
            - ``feed=None``: ``feed(model, batch)`` returns outputs and targets of other batches.
            - ``batch_size=1024``: of a pair of tensors.
            - ``vectorize=None``: evaluate several perturbed models at once; by default, if faster.

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


@dataclass
class Plan:
    """Number of draws and when to stop."""

    draws: int
    tolerance: float | None = None
    confidence: float = 0.95
    antithetic: bool = True

    def __post_init__(self) -> None:
        _validate.probability("confidence", self.confidence)
        self.signs = check_draws(self.draws, self.antithetic, samples=2)
        if self.tolerance is not None:
            _validate.number("tolerance", self.tolerance, above=0)


def measure(
    landscape: Landscape, b: float, plan: Plan, results: Sequence[LossAndAccuracy] = ()
) -> Variability:
    """Measure variability on an open landscape; ``results`` are those of the first draws."""
    results, budget = list(results), plan.draws // len(plan.signs)
    n = budget if plan.tolerance is None else min(FIRST_CHECK, budget)
    while True:
        results += landscape.evaluate_noisy(b, range(len(results) + 1, n + 1), plan.signs)
        differences = np.array([result.loss for result in results]) - landscape.clean.loss
        rise = Estimate.of(differences, plan.confidence)
        low, high = rise.interval
        met = plan.tolerance is not None and (high - low) / 2 <= plan.tolerance
        if met or n == budget:
            break
        n = min(2 * n, budget)
    upper = max(limit(differences, plan.confidence), -limit(differences, 1 - plan.confidence))
    # Rounding affects all draws in the same way, so their spread does not include it.
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


@dataclass(frozen=True)
class Curve:
    """Variability at increasing scales of noise, one point per b, all with the same draws."""

    points: tuple[Variability, ...]

    @property
    def b(self) -> tuple[float, ...]:
        """The scales."""
        return tuple(point.b for point in self.points)

    def plot(self, ax: Axes | None = None, *, show: str = "loss", label: str | None = None) -> Axes:
        """Plot loss or accuracy at perturbed weights against b, with the interval as a band.

        ``show`` is ``"loss"`` or ``"accuracy"``, ``label`` the name in the legend.
        """
        _validate.one_of("show", show, ("loss", "accuracy"))
        heights = []
        for point in self.points:
            if show == "loss":
                heights.append((point.perturbed, *(point.clean + end for end in point.interval)))
            elif point.accuracy is None:
                raise ValueError("there is no accuracy to show: the targets are not classes")
            else:
                heights.append((point.accuracy.mean, *point.accuracy.interval))
        mean, *ends = zip(*heights, strict=True)
        ax = plot_band(ax, self.b, mean, ends, label, marker="o", markersize=3.5)
        first = self.points[0]
        unit = f", relative to each {first.relative_to}" if first.relative_to else ""
        ax.set(xlabel=f"scale b of {first.noise} noise on the weights{unit}", ylabel=show)
        return ax


@lists_options(Options, Landscape)
def variability_curve(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    b: Iterable[float],
    draws: int = 64,
    tolerance: float | None = None,
    confidence: float = 0.95,
    antithetic: bool = True,
    **options: Unpack[Options],
) -> Curve:
    r"""Measure loss and accuracy under weight noise over a grid of b.

    All scales use the same draws, so the curve is smooth. Each interval is for its own b. ``draws``
    is per b; the other arguments are as for :func:`neural_variability`.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> data = torch.randn(20, 3), torch.arange(20) % 2
    >>> curve = variability_curve(model, nn.functional.cross_entropy, data, b=[0, 0.1, 0.2])
    >>> curve.b, curve.points[0].difference
    ((0.0, 0.1, 0.2), 0.0)
    """
    scales = sorted(scale("b", value) for value in b)
    if not scales:
        raise ValueError("b must have at least one scale")
    plan = Plan(draws, tolerance, confidence, antithetic)
    with Landscape(model, loss, data, **options) as landscape:
        return Curve(tuple(measure(landscape, value, plan) for value in scales))


@dataclass(frozen=True)
class LargestB:
    """The largest scale of noise at which the loss changes by at most δ.

    ``b`` is infinite if the difference is below δ up to ``maximum``, and 0 if it is above δ already
    at ``minimum``. ``interval`` contains the true scale with probability ``confidence``; its ends
    may be 0 or infinite for the same reasons. ``measured`` has all measurements by increasing b.
    """

    b: float
    interval: tuple[float, float]
    delta: float
    confidence: float
    measured: tuple[Variability, ...]

    def __str__(self) -> str:
        low, high = self.interval
        return f"b = {self.b:.4g} [{low:.4g}, {high:.4g}] for δ = {self.delta:g}"


@lists_options(Options, Landscape)
def largest_b(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    delta: float,
    draws: int = 64,
    confidence: float = 0.95,
    antithetic: bool = True,
    resolution: float = 0.01,
    minimum: float = 1e-7,
    maximum: float = 1e3,
    **options: Unpack[Options],
) -> LargestB:
    r"""Find the largest b at which a model has (b, δ)-neural variability.

    .. math:: \sup\,\{b : |E_\epsilon\,L(\theta + \epsilon, S) - L(\theta, S)| \le \delta\}

    The difference is assumed to grow with b, as around a minimum; otherwise the result is one of
    the scales at which it crosses δ. All scales use the same draws. ``interval`` contains every b
    at which the interval of the difference contains δ.

    ``draws`` is per b; ``resolution`` is the relative precision of b, which is searched from
    ``minimum`` to ``maximum``. The other arguments are as for :func:`neural_variability`.

    >>> import torch
    >>> model = nn.Linear(3, 1, bias=False)
    >>> x, y = torch.eye(3), model(torch.eye(3)).detach()
    >>> result = largest_b(model, nn.functional.mse_loss, (x, y), delta=0.04)
    >>> result.interval[0] < 0.2 < result.interval[1]  # the difference is b²
    True
    """
    delta = _validate.number("delta", delta, above=0)
    _validate.number("resolution", resolution, low=1e-6, high=1)
    if not 0 < scale("minimum", minimum) < scale("maximum", maximum):
        raise ValueError(
            f"0 < minimum < maximum must hold, got minimum={minimum!r}, maximum={maximum!r}"
        )
    plan, limits = Plan(draws, None, confidence, antithetic), (resolution, minimum, maximum)
    with Landscape(model, loss, data, **options) as landscape:
        search = CrossingSearch(lambda b: measure(landscape, b, plan), delta, *limits)
        _, b, _ = search.crossing(lambda point: point.delta)
        lower, _, _ = search.crossing(lambda point: max(point.interval[1], -point.interval[0]))
        _, _, upper = search.crossing(lambda point: max(point.interval[0], -point.interval[1]))
    measured = tuple(search.points[value] for value in sorted(search.points))
    return LargestB(b, (lower, upper), delta, confidence, measured)


@dataclass
class CrossingSearch:
    """Search for the b at which a quantity, 0 at b = 0, crosses δ; measurements are reused."""

    measure: Callable[[float], Variability]
    delta: float
    resolution: float
    minimum: float
    maximum: float
    points: dict[float, Variability] = field(default_factory=dict)

    def crossing(self, quantity: Callable[[Variability], float]) -> tuple[float, float, float]:
        """Lower end of the bracket around the crossing, best estimate, upper end."""

        def excess(b: float) -> float:
            if b not in self.points:
                self.points[b] = self.measure(b)
            ratio = quantity(self.points[b]) / self.delta
            if 0 < ratio < math.inf:
                return math.log(ratio)
            return -math.inf if ratio <= 0 else math.inf  # nan counts as too large

        low, high = self._bracket(excess)
        if low == 0 or high == math.inf:
            return low, 0.0 if low == 0 else math.inf, high
        while True:
            below, above, share = excess(low), excess(high), 0.5
            if math.isfinite(below) and math.isfinite(above):
                # Where a straight line in logarithms crosses 0, kept away from the ends.
                share = min(max(below / (below - above), 0.1), 0.9)
            b = low * (high / low) ** share
            if high / low <= 1 + self.resolution:
                return low, b, high
            if excess(b) > 0:
                high = b
            else:
                low = b

    def _bracket(self, excess: Callable[[float], float]) -> tuple[float, float]:
        """Scales at most a factor of 2 apart between which δ is crossed."""
        scales = sorted(self.points) or [min(max(0.01, self.minimum), self.maximum)]
        first = next((n for n, value in enumerate(scales) if excess(value) > 0), len(scales))
        b = scales[max(first - 1, 0)]
        while excess(b) > 0:
            if b <= self.minimum:
                return 0.0, b
            b = max(b / 2, self.minimum)
        while b < self.maximum:
            above = min((value for value in self.points if value > b), default=math.inf)
            b_next = min(2 * b, above, self.maximum)
            if excess(b_next) > 0:
                return b, b_next
            b = b_next
        return b, math.inf
