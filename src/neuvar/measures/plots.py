"""Plots of measures with matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from neuvar._validate import one_of
from neuvar.measures.estimate import normal_quantile, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from neuvar.measures.calibration import Calibration
    from neuvar.measures.selective import SelectiveAccuracy
    from neuvar.measures.stored_weights import Faults, Rounding
    from neuvar.measures.variability import Curve


def _new_axes(width: float, height: float) -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError(
            'plot() needs matplotlib, which is not installed; pip install "neuvar[plot]"'
        ) from None
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def plot_curve(curve: Curve, ax: Axes | None, show: str, label: str | None) -> Axes:
    """Loss or accuracy against b, with the interval as a band."""
    one_of("show", show, ("loss", "accuracy"))
    heights = []
    for point in curve.points:
        if show == "loss":
            heights.append((point.perturbed, *(point.clean + end for end in point.interval)))
        elif point.accuracy is None:
            raise ValueError("there is no accuracy to show: the targets are not classes")
        else:
            heights.append((point.accuracy.mean, *point.accuracy.interval))
    mean, low, high = zip(*heights, strict=True)
    ax = _new_axes(5.5, 3.6) if ax is None else ax
    (line,) = ax.plot(curve.b, mean, marker="o", markersize=3.5, label=label)
    ax.fill_between(curve.b, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    first = curve.points[0]
    unit = f", relative to each {first.relative_to}" if first.relative_to else ""
    ax.set_xlabel(f"scale b of {first.noise} noise on the weights{unit}")
    ax.set_ylabel(show)
    if label:
        ax.legend(frameon=False)
    return ax


def plot_calibration(calibration: Calibration, ax: Axes | None) -> Axes:
    """Reliability diagram: bins over grey bars over the diagonal."""
    ax = _new_axes(4.8, 4.8) if ax is None else ax
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
    (least, most), count = calibration.interval, len(calibration.bins)
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
    return ax


def plot_selective(result: SelectiveAccuracy, ax: Axes | None, label: str | None) -> Axes:
    """Accuracy against coverage, with Wilson's interval as a band."""
    ax = _new_axes(5.5, 3.6) if ax is None else ax
    # The first few examples say nothing, and their band would hide the rest.
    from_here = result.coverage >= min(0.02, result.coverage[-1])
    x, y = result.coverage[from_here], result.accuracy[from_here]
    z = normal_quantile(result.confidence)
    low, high = wilson(y, result.kept[from_here].astype(float), z)
    (line,) = ax.plot(x, y, label=label)
    ax.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set(xlabel="coverage: share of examples kept, the surest first", ylabel="accuracy")
    if label:
        ax.legend(frameon=False)
    return ax


def plot_rounding(result: Rounding, ax: Axes | None, label: str | None) -> Axes:
    """Accuracy against bits, with Wilson's interval as bars; most bits on the left."""
    ax = _new_axes(5.5, 3.6) if ax is None else ax
    styles = {"tensor": ("--", "s"), "row": ("-", "o"), "torch kernels": ("", "*")}
    color = None
    for by, points in (*result.accuracies.items(), ("torch kernels", result.kernels)):
        if not points:
            continue
        line, marker = styles[by]
        bits, shares = zip(*points.items(), strict=True)
        y = np.array([share.value for share in shares])
        low, high = np.array([share.interval for share in shares]).T
        name = f"{label}, {by}" if label else by
        style: dict[str, Any] = {"linestyle": line, "marker": marker, "capsize": 2, "color": color}
        drawn = ax.errorbar(bits, y, [y - low, high - y], label=name, **style)
        color = drawn.lines[0].get_color()
    if not ax.xaxis_inverted():
        ax.invert_xaxis()
    ax.set(xlabel="bits of a weight", ylabel="accuracy")
    ax.legend(frameon=False, fontsize="small")
    return ax


def plot_faults(result: Faults, ax: Axes | None, label: str | None) -> Axes:
    """Accuracy against the level of faults, with the interval as a band."""
    ax = _new_axes(5.5, 3.6) if ax is None else ax
    mean = [accuracy.mean for accuracy in result.accuracies]
    low, high = zip(*(accuracy.interval for accuracy in result.accuracies), strict=True)
    (line,) = ax.plot(result.levels, mean, marker="o", markersize=3.5, label=label)
    ax.fill_between(result.levels, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if min(result.levels) > 0 and max(result.levels) > 20 * min(result.levels):
        ax.set_xscale("log")
    ax.set(xlabel=result.kind, ylabel="accuracy")
    if label:
        ax.legend(frameon=False)
    return ax
