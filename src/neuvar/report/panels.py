"""One panel: means with bands over axes that can be read."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuvar.experiments import reading
from neuvar.experiments.findings import Line, Panel, Role
from neuvar.report.style import Style
from neuvar.report.words import printable, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 16
"""So many points or fewer each get a marker."""

LETTERS = 11
"""So many letters of a title or a label take an inch."""

STEPS = (1, 2, 5, 10)
"""Ticks are so far apart, times a power of ten."""


def plot(
    axes: Axes,
    panel: Panel,
    looks: dict[tuple[str, Role], Style],
    limits: tuple[float, float],
    height: float,
) -> None:
    """Draw one panel; each line is a group called ``series-`` and its number in the figure."""
    for number, ((label, role), look) in enumerate(looks.items()):
        for line in panel.lines:
            if (line.label, line.role) == (label, role):
                _line(axes, line, look, f"series-{number}")
    axes.set_xlabel(printable(panel.x_label))
    if not panel.title.endswith(panel.y_label):  # which says it already
        axes.set_ylabel(textwrap.fill(printable(panel.y_label), int(LETTERS * height)))
    axes.set_ylim(*limits)
    _ticks(axes, panel)
    if not any((spread(line)[2] > 0).any() for line in panel.lines):
        axes.text(0.5, 0.5, "no finished runs", ha="center", transform=axes.transAxes)


def _line(axes: Axes, line: Line, look: Style, group: str) -> None:
    mean, deviation, n = spread(line)
    every = None if len(line.x) <= FEW else max(1, len(line.x) // 7)
    axes.plot(
        line.x,
        mean,
        color=look.colour,
        linestyle=look.dashes,
        marker=look.marker,
        markevery=every,
        markeredgewidth=0,
        gid=group,
    )
    if len(line.x) == 1:
        axes.errorbar(line.x, mean, deviation, color=look.colour, capsize=3)
    elif (n > 1).any():
        axes.fill_between(
            line.x,
            mean - deviation,
            mean + deviation,
            facecolor=(look.colour, 0.13),
            edgecolor=(look.colour, 0.4),
            linewidth=0.5,
            gid=f"{group}-band",
        )


def y_limits(panels: Sequence[Panel]) -> list[tuple[float, float]]:
    """Limits of y for each panel; those that show the same share them unless one would be flat."""
    own = [_extent(panel) for panel in panels]
    together: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for panel, extent in zip(panels, own, strict=True):
        together.setdefault((panel.y_label, panel.percent), []).append(extent)
    found = []
    for panel, extent in zip(panels, own, strict=True):
        group = together[panel.y_label, panel.percent]
        low, high = min(a for a, _ in group), max(b for _, b in group)
        if min(b - a for a, b in group) < (high - low) / 4:
            low, high = extent
        margin = 0.05 * (high - low)
        found.append((low - margin, high + margin))
    return found


def _extent(panel: Panel) -> tuple[float, float]:
    """Lowest and highest point of means and bands; bands of shares end at 0 and 1."""
    ends: list[float] = []
    for line in panel.lines:
        mean, deviation, n = spread(line)
        half = [d if k > 1 else 0.0 for d, k in zip(deviation, n, strict=True)]
        ends += [m - h for m, h, k in zip(mean, half, n, strict=True) if k]
        ends += [m + h for m, h, k in zip(mean, half, n, strict=True) if k]
    if not ends:
        return 0.0, 1.0
    low, high = min(ends), max(ends)
    if panel.percent:
        low, high = max(low, min(0.0, high)), min(high, max(1.0, low))
    least = 0.01 if panel.percent else 0.02 * max(abs(high), abs(low)) or 1.0
    middle, half_height = (low + high) / 2, max(high - low, least) / 2
    return middle - half_height, middle + half_height


def _ticks(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    places = sorted({float(x) for line in panel.lines for x in line.x})
    if panel.log_x and places and places[-1] > 0:
        if places[0] > 0:
            axes.set_xscale("log")
        else:  # b = 0 has no logarithm
            least = min(x for x in places if x > 0)
            axes.set_xscale("symlog", linthresh=least, linscale=0.5)
    at: list[float] = [float(axes.transData.transform((x, 0.0))[0]) for x in places]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    if places and len(places) <= 8 and all(gap >= 0.09 * (at[-1] - at[0]) for gap in gaps):
        axes.xaxis.set_major_locator(FixedLocator(places))
    elif axes.get_xscale() == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    elif axes.get_xscale() == "linear":
        whole = all(x == int(x) for x in places)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole, steps=STEPS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: reading.number(x)))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    if panel.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{round(100 * y, 6):g}\u00a0%"))
