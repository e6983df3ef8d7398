"""Plots of measures with matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from neuvar.measures.calibration import Calibration
    from neuvar.measures.curve import Curve
    from neuvar.measures.variability import Variability


def new_axes(width: float, height: float) -> Axes:
    """New axes; a helpful error without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError(
            'plot() needs matplotlib, which is not installed; pip install "neuvar[plot]"'
        ) from None
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def plot_curve(curve: Curve, ax: Axes, show: str, label: str | None) -> None:
    """Loss or accuracy against b, with the interval as a band."""
    mean, low, high = zip(*(_height(point, show) for point in curve.points), strict=True)
    (line,) = ax.plot(curve.b, mean, marker="o", markersize=3.5, label=label)
    ax.fill_between(curve.b, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    first = curve.points[0]
    unit = f", relative to each {first.relative_to}" if first.relative_to else ""
    ax.set_xlabel(f"scale b of {first.noise} noise on the weights{unit}")
    ax.set_ylabel(show)
    if label:
        ax.legend(frameon=False)


def _height(point: Variability, show: str) -> tuple[float, float, float]:
    if show == "loss":
        low, high = point.interval
        return point.perturbed, point.clean + low, point.clean + high
    assert point.accuracy is not None
    return point.accuracy.mean, *point.accuracy.interval


def plot_calibration(calibration: Calibration, ax: Axes) -> None:
    """Reliability diagram: bins over grey bars over the diagonal."""
    x, y = np.array([[b.confidence, b.accuracy] for b in calibration.bins]).T
    low, high = np.array([b.expected for b in calibration.bins]).T
    edge = math.floor(10 * min(x.min(), y.min(), low.min(), 0.9)) / 10
    limits = (edge - 0.02 * (1 - edge), 1 + 0.02 * (1 - edge))
    percent = f"{calibration.confidence * 100:g} %"
    label = f"calibrated model, {percent}"
    ax.vlines(x, low, high, color="0.8", linewidth=5, zorder=1, label=label)
    ax.plot((0, 1), (0, 1), color="0.45", linewidth=1, linestyle=(0, (4, 3)), zorder=2)
    ax.plot(x, y, color="0.25", linewidth=1, zorder=3)
    outside = (y < low) | (y > high)
    style: dict[str, Any] = {"s": 52, "edgecolors": "white", "linewidths": 0.8, "zorder": 4}
    for mask, marker, color, label in (
        (~outside, "o", "#0072B2", "bin within its bar"),
        (outside, "D", "#D55E00", "bin outside its bar"),
    ):
        if mask.any():
            ax.scatter(x[mask], y[mask], marker=marker, c=color, label=label, **style)
    least, most = calibration.interval
    count = len(calibration.bins)
    ax.set_title(
        f"calibration error {calibration.value:.3f}, {percent} interval "
        f"{least:.3f} to {most:.3f}\nby chance alone {calibration.floor:.3f}; "
        f"n = {calibration.n:,}, {count} bin{'s' if count > 1 else ''}",
        fontsize="small",
        loc="left",
    )
    # The legend is on the side of the diagonal with fewer points.
    overconfident = sum(b.count * (b.confidence - b.accuracy) for b in calibration.bins) > 0
    ax.legend(loc="upper left" if overconfident else "lower right", frameon=False, fontsize="small")
    ax.set(xlim=limits, ylim=limits, aspect="equal", xlabel="confidence", ylabel="accuracy")
    ax.spines[["top", "right"]].set_visible(False)
