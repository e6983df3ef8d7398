"""Matplotlib axes, and a line with its interval as a band."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def new_axes(width: float = 5.5, height: float = 3.6) -> Axes:
    """New axes of this size in inches."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError(
            'plot() needs matplotlib, which is not installed; pip install "neuvar[plot]"'
        ) from None
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def plot_band(
    ax: Axes | None, x: Any, mean: Any, ends: Any, label: str | None, **style: Any
) -> Axes:
    """Plot a line, and its interval as a band; ``ends`` are the lower and the upper ends."""
    ax = new_axes() if ax is None else ax
    (line,) = ax.plot(x, mean, label=label, **style)
    ax.fill_between(x, *ends, color=line.get_color(), alpha=0.2, linewidth=0)
    if label:
        ax.legend(frameon=False)
    return ax
