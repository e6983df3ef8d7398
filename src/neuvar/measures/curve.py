"""Variability over a range of b, and the largest b that a model bears."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from neuvar.measures.landscape import Landscape, Loss, Options
from neuvar.measures.variability import Plan, Variability, measure
from neuvar.noise import scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Curve:
    """Variability at increasing scales of noise, all from the same draws.

    Attributes:
        points: One measurement for each b.
    """

    points: tuple[Variability, ...]

    @property
    def b(self) -> tuple[float, ...]:
        """The scales."""
        return tuple(point.b for point in self.points)

    def plot(self, ax: Axes | None = None, *, show: str = "loss", label: str | None = None) -> Axes:
        """Draw loss or accuracy at perturbed weights against b, with the interval as a band.

        Args:
            ax: Where to draw; new ones by default.
            show: ``"loss"`` or ``"accuracy"``.
            label: Name of the model, for a legend.
        """
        if show not in ("loss", "accuracy"):
            raise ValueError(f"show must be 'loss' or 'accuracy', got {show!r}")
        if show == "accuracy" and any(point.accuracy is None for point in self.points):
            raise ValueError("there is no accuracy to show: the targets are no classes")
        if ax is None:
            ax = _new_axes()
        mean, low, high = zip(*(_height(point, show) for point in self.points), strict=True)
        (line,) = ax.plot(self.b, mean, marker="o", markersize=3.5, label=label)
        ax.fill_between(self.b, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        first = self.points[0]
        unit = f", relative to each {first.relative_to}" if first.relative_to else ""
        ax.set_xlabel(f"scale b of {first.noise} noise on the weights{unit}")
        ax.set_ylabel(show)
        if label:
            ax.legend(frameon=False)
        return ax


def _new_axes() -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('a plot needs matplotlib: pip install "neuvar[plot]"') from error
    return pyplot.subplots(figsize=(5.5, 3.6), layout="constrained")[1]


def _height(point: Variability, show: str) -> tuple[float, float, float]:
    if show == "loss":
        low, high = point.interval
        return point.perturbed, point.clean + low, point.clean + high
    assert point.accuracy is not None
    return point.accuracy.mean, *point.accuracy.interval


def variability_curve(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    b: Iterable[float],
    draws: int = 32,
    tolerance: float | None = None,
    confidence: float = 0.95,
    antithetic: bool = True,
    **options: Unpack[Options],
) -> Curve:
    r"""Measure loss and accuracy under weight noise over a grid of b.

    The same draws are used at every b, so that the curve is smooth and two scales can be compared.
    Each interval is for its own b.

    References:
        Xie et al. 2021, experiment 1, shows accuracy against the scale of the noise.

    Args:
        model: As for :func:`neural_variability`, like the other arguments.
        loss: Mean loss over a batch.
        data: What to evaluate on.
        b: Scales of the noise.
        draws: How many perturbed models to evaluate at each b; with ``tolerance``, at most.
        tolerance: Half-width of the interval, in units of the loss, that is enough.
        confidence: Of each interval.
        antithetic: Use each draw with both signs.
        options: As for :func:`neural_variability`.

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
        raise ValueError("b must hold at least one scale")
    plan = Plan(draws, tolerance, confidence, antithetic)
    with Landscape(model, loss, data, **options) as landscape:
        return Curve(tuple(measure(landscape, value, plan) for value in scales))


@dataclass(frozen=True)
class LargestB:
    """The largest scale of noise under which the loss stays within δ.

    Attributes:
        b: The estimate: where the measured difference reaches δ. Infinite if
            it does not up to ``maximum``, 0 if it does already at ``minimum``.
        interval: Holds the true scale with probability ``confidence``; its upper end is infinite
            if the difference is not surely above δ at ``maximum``, its lower end is 0 if it is
            not surely below δ at ``minimum``.
        delta: The δ that was asked for.
        confidence: See ``interval``.
        measured: All measurements that were made on the way, by increasing b.
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
    draws: int = 32,
    confidence: float = 0.95,
    antithetic: bool = True,
    resolution: float = 0.01,
    minimum: float = 1e-7,
    maximum: float = 1e3,
    **options: Unpack[Options],
) -> LargestB:
    r"""Find the largest b at which a model has (b, δ)-neural variability.

    .. math:: \sup\,\{b : |E_\epsilon\,L(\theta + \epsilon, S) - L(\theta, S)| \le \delta\}

    It is a measure of flatness in units of the weights: with how much noise on them does the loss
    change by no more than δ? The difference is taken to grow with b, as it does around a minimum;
    where it goes up and down, one of its crossings of δ is found. All scales see the same draws.

    The interval comes from those of the difference: it holds every b at which the measured
    interval admits a difference of δ. Where the difference grows with b, it has the same
    confidence as each of them, because it misses the true b only if the interval there misses δ.

    Args:
        model: As for :func:`neural_variability`, like the other arguments.
        loss: Mean loss over a batch.
        data: What to evaluate on.
        delta: How much the loss may change.
        draws: How many perturbed models to evaluate at each b that is tried.
        confidence: Of the interval.
        antithetic: Use each draw with both signs.
        resolution: Relative precision to which crossings are located.
        minimum: Smallest b to try.
        maximum: Largest b to try.
        options: As for :func:`neural_variability`.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 1, bias=False)
        >>> x, y = torch.eye(3), model(torch.eye(3)).detach()
        >>> found = largest_b(model, nn.functional.mse_loss, (x, y), delta=0.04)
        >>> found.interval[0] < 0.2 < found.interval[1]  # here the difference is b²
        True
    """
    if not scale("delta", delta) > 0:
        raise ValueError(f"delta must be greater than 0, got {delta!r}")
    if not 1e-6 <= scale("resolution", resolution) <= 1:
        raise ValueError(f"resolution must be between 1e-6 and 1, got {resolution!r}")
    if not 0 < scale("minimum", minimum) < scale("maximum", maximum):
        raise ValueError(
            f"0 < minimum < maximum must hold, got minimum={minimum!r}, maximum={maximum!r}"
        )
    plan = Plan(draws, None, confidence, antithetic)
    with Landscape(model, loss, data, **options) as landscape:
        search = _Search(lambda b: measure(landscape, b, plan), delta, resolution, minimum, maximum)
        b = search.crossing(lambda point: point.delta)
        surely = search.crossing(
            lambda point: max(point.interval[1], -point.interval[0]), below=True
        )
        at_most = search.crossing(
            lambda point: max(point.interval[0], -point.interval[1]), above=True
        )
    measured = tuple(search.seen[value] for value in sorted(search.seen))
    return LargestB(b, (surely, at_most), float(delta), confidence, measured)


class _Search:
    """Looks for the b at which a quantity, 0 at b = 0, comes to exceed δ."""

    def __init__(
        self,
        at: Callable[[float], Variability],
        delta: float,
        resolution: float,
        minimum: float,
        maximum: float,
    ) -> None:
        self.at, self.delta, self.resolution = at, delta, resolution
        self.minimum, self.maximum = minimum, maximum
        self.seen: dict[float, Variability] = {}

    def measured(self, b: float) -> Variability:
        if b not in self.seen:
            self.seen[b] = self.at(b)
        return self.seen[b]

    def crossing(
        self,
        quantity: Callable[[Variability], float],
        *,
        below: bool = False,
        above: bool = False,
    ) -> float:
        """Where a quantity crosses δ: the best guess, or the end of the bracket asked for."""

        def excess(b: float) -> float:
            return _log(quantity(self.measured(b))) - math.log(self.delta)

        low, high = self._bracket(excess)
        while low > 0 and high < math.inf and high / low > 1 + self.resolution:
            middle = _between(low, high, excess(low), excess(high))
            if excess(middle) > 0:
                high = middle
            else:
                low = middle
        if below or (low == 0 and not above):
            return low
        if above or high == math.inf:
            return high
        return _between(low, high, excess(low), excess(high))

    def _bracket(self, excess: Callable[[float], float]) -> tuple[float, float]:
        """Neighbouring scales, a factor of two apart or less, between which δ is crossed."""
        known = sorted(self.seen) or [min(max(0.01, self.minimum), self.maximum)]
        first = next((n for n, value in enumerate(known) if excess(value) > 0), len(known))
        b = known[max(first - 1, 0)]
        while excess(b) > 0:
            if b <= self.minimum:
                return 0.0, b
            b = max(b / 2, self.minimum)
        while True:
            above = min((value for value in self.seen if value > b), default=math.inf)
            b_next = min(2 * b, above, self.maximum)
            if b >= self.maximum:
                return b, math.inf
            if excess(b_next) > 0:
                return b, b_next
            b = b_next


def _log(value: float) -> float:
    """Logarithm that admits nothing and everything."""
    if value <= 0:
        return -math.inf
    return math.log(value) if math.isfinite(value) else math.inf


def _between(low: float, high: float, below: float, above: float) -> float:
    """Where a straight line in logarithms crosses 0, kept away from the ends."""
    share = 0.5
    if math.isfinite(below) and math.isfinite(above) and above > below:
        share = min(max(-below / (above - below), 0.1), 0.9)
    return low * math.pow(high / low, share)
