"""Variability over a range of b, and the largest b with at most δ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from neuvar import _validate
from neuvar.measures.landscape import Landscape, Loss, Options
from neuvar.measures.plots import new_axes, plot_curve
from neuvar.measures.variability import Plan, Variability, measure
from neuvar.noise import scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        if show == "accuracy" and any(point.accuracy is None for point in self.points):
            raise ValueError("there is no accuracy to show: the targets are not classes")
        ax = new_axes(5.5, 3.6) if ax is None else ax
        plot_curve(self, ax, show, label)
        return ax


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

    References:
        Xie et al. 2021, experiment 1, shows accuracy against the scale of the noise.

    Examples:
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
    at ``minimum``; so are the ends of ``interval``, which contains the true scale with probability
    ``confidence``. ``measured`` has all measurements by increasing b.
    """

    b: float
    interval: tuple[float, float]
    delta: float
    confidence: float
    measured: tuple[Variability, ...]

    def __str__(self) -> str:
        low, high = self.interval
        return f"b = {self.b:.4g} [{low:.4g}, {high:.4g}] for δ = {self.delta:g}"


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

    A measure of flatness in units of the weights. The difference is assumed to grow with b, as
    around a minimum; otherwise the result is one of its crossings of δ. All scales use the same
    draws. The interval contains every b whose interval of the difference contains δ.

    ``draws`` is per b; ``resolution`` is the relative precision of b, which is searched from
    ``minimum`` to ``maximum``. The other arguments are as for :func:`neural_variability`.

    Examples:
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
    plan = Plan(draws, None, confidence, antithetic)
    with Landscape(model, loss, data, **options) as landscape:
        search = CrossingSearch(
            lambda b: measure(landscape, b, plan), delta, resolution, minimum, maximum
        )
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
            return _log(quantity(self.points[b])) - math.log(self.delta)

        low, high = self._bracket(excess)
        if low == 0 or high == math.inf:
            return low, 0.0 if low == 0 else math.inf, high
        while high / low > 1 + self.resolution:
            middle = _interpolate(low, high, excess(low), excess(high))
            if excess(middle) > 0:
                high = middle
            else:
                low = middle
        return low, _interpolate(low, high, excess(low), excess(high)), high

    def _bracket(self, excess: Callable[[float], float]) -> tuple[float, float]:
        """Scales at most a factor of 2 apart between which δ is crossed."""
        known = sorted(self.points) or [min(max(0.01, self.minimum), self.maximum)]
        first = next((n for n, value in enumerate(known) if excess(value) > 0), len(known))
        b = known[max(first - 1, 0)]
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


def _log(value: float) -> float:
    """Logarithm, with -inf at 0 and below, and inf at inf or nan."""
    if value <= 0:
        return -math.inf
    return math.log(value) if math.isfinite(value) else math.inf


def _interpolate(low: float, high: float, below: float, above: float) -> float:
    """Where a straight line in logarithms crosses 0, kept away from the ends."""
    share = 0.5
    if math.isfinite(below) and math.isfinite(above) and above > below:
        share = min(max(-below / (above - below), 0.1), 0.9)
    return low * math.pow(high / low, share)
