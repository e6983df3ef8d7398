"""Figures: panels side by side in a file, or one by one as SVG for the page.

Lines are means with bands. A method has the same colour in every figure.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from neuvar._atomic import write_files
from neuvar.experiments.findings import Case, Line, Panel, Role, Verdict, interval
from neuvar.pages import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

PALETTE = {
    "plain": "#d55e00",  # SGD, Adam
    "nvrm": "#0072b2",
    "auto": "#56b4e9",
    "psgd": "#009e73",
    "laplace": "#cc79a7",
    "uniform": "#e69f00",
    "dropout": "#882255",
    "ivon": "#aa4499",
    "swa": "#999933",
    "sam": "#ddaa77",
    "ensemble": "#222222",
    "mark": "#737373",  # thresholds, and quantities that are not methods
}
"""One colour per method, in all figures: those of Okabe and Ito, and of Tol for further methods."""
COLOURS: dict[Role, str] = {
    "plain": PALETTE["plain"],
    "nvrm": PALETTE["nvrm"],
    "other": PALETTE["psgd"],
    "third": PALETTE["laplace"],
    "fourth": PALETTE["uniform"],
}
INK, GRID, PAPER = "#222222", "#dddddd", "#ffffff"
B_LIMITS = (0.015, 0.025, 0.04, 0.06)
"""Limits of b between one shade of a colour and the next: the larger b, the darker."""
SHADES = ((PAPER, 0.4), (PAPER, 0.2), (INK, 0.0), (INK, 0.35), (INK, 0.65))
"""The colour that each shade mixes in, and its share."""
SHADE_ORDER = (2, 4, 0, 3, 1)
"""The order in which lines without b, or whose shade is taken, get their shades."""
DASHES: tuple[Any, ...] = (
    (0, (1.2, 1.2)),
    (0, (5, 1.6)),
    "-",
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (9, 2)),
)
MARKERS: dict[Role, str] = {"plain": "o", "nvrm": "s", "other": "^", "third": "D", "fourth": "v"}
B_MARKERS = "<>pPX"
"""Markers of lines with b, and of further lines without b, by shade."""

_INKED = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
SETTINGS: dict[str, Any] = dict.fromkeys(_INKED, INK) | {"grid.color": GRID}
MAX_MARKED_POINTS = 16
"""Lines with at most this many points have a marker at each."""
TITLE_LETTERS, LEGEND_LETTERS, CASE_LETTERS, CAPTION_LETTERS = 11, 15, 15, 19
"""Letters per inch of titles and labels, of legends, of the names of cases, and of captions."""
STEPS = (1, 2, 5, 10)
"""Multiples of a power of ten at which an axis may have ticks."""
SIZES = {1: (4.6, 3.0), 2: (3.6, 2.5), 3: (2.8, 2.2), 4: (2.5, 2.0)}
"""Width and height of a panel in inches, by the number of columns."""
KINDS = ("svg", "png")
DPI = 200


@dataclass(frozen=True)
class Style:
    """Colour by role; shade, dashes and marker by b, or by order."""

    colour: str
    dashes: Any
    marker: str


@contextmanager
def plain_matplotlib(salt: str, settings: Mapping[str, Any] = SETTINGS) -> Iterator[None]:
    """Use matplotlib's defaults and our settings, not the user's; ``salt`` fixes the ids of SVG."""
    try:
        import matplotlib.style
    except ImportError as error:
        raise ImportError('a figure needs matplotlib: pip install "neuvar[plot]"') from error
    ours = Path(__file__).with_name("figures.mplstyle")
    with matplotlib.style.context(["default", ours, {**settings, "svg.hashsalt": salt}]):
        yield


def styles(panels: Sequence[Panel]) -> dict[tuple[str, Role], Style]:
    """A style for each line of a figure, in the order of the legend."""
    roles = list(COLOURS)
    lines = {(line.label, line.role): line for panel in panels for line in panel.lines}
    taken: dict[tuple[str, Role], int] = {}
    for key, line in sorted(lines.items(), key=lambda item: (roles.index(item[0][1]), item[1].b)):
        wanted = [bisect.bisect(B_LIMITS, line.b)] if line.b else []
        used = {
            s for k, s in taken.items() if k[1] == line.role and bool(lines[k].b) == bool(line.b)
        }
        taken[key] = next((s for s in (*wanted, *SHADE_ORDER) if s not in used), SHADE_ORDER[0])
    return {
        key: Style(
            mixed(COLOURS[key[1]], *SHADES[shade]),
            DASHES[shade],
            B_MARKERS[shade] if lines[key].b or shade != SHADE_ORDER[0] else MARKERS[key[1]],
        )
        for key, shade in taken.items()
    }


def mixed(colour: str, other: str, share: float) -> str:
    """A colour with a share of another in it.

    >>> mixed("#d55e00", "#222222", 0), mixed("#000000", "#ffffff", 0.5)
    ('#d55e00', '#808080')
    """
    pairs = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round((1 - share) * a + share * b):02x}" for a, b in pairs)


def spread(line: Line) -> tuple[Array, Array, NDArray[np.int64]]:
    """Mean, standard deviation and number of trials at each x, over the trials that reach it.

    NaN for the mean of no trials, and for the deviation of fewer than two.

    >>> mean, deviation, n = spread(Line("", (1, 2), ((0.2, 0.4), (0.4,))))
    >>> mean.round(6).tolist(), n.tolist()
    ([0.3, 0.4], [2, 1])
    """
    values = np.full((len(line.trials), len(line.x)), np.nan)
    for row, trial in zip(values, line.trials, strict=True):
        known = np.asarray(trial[: len(line.x)], np.float64)
        row[: len(known)] = np.where(np.isfinite(known), known, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about columns without numbers
        mean, deviation = np.nanmean(values, axis=0), np.nanstd(values, axis=0, ddof=1)
    return mean, deviation, np.isfinite(values).sum(axis=0)


def band(line: Line, panel: Panel) -> tuple[Array, Array]:
    """Mean minus and plus one standard deviation, within the values that are possible."""
    mean, deviation, _ = spread(line)
    low, high = mean - deviation, mean + deviation
    if panel.percent:
        high = np.minimum(high, np.maximum(mean, 1.0))
    if panel.percent and not panel.signed:
        low = np.maximum(low, np.minimum(mean, 0.0))
    return (np.where(low > 0, low, mean) if is_log(panel) else low), high


def is_log(panel: Panel) -> bool:
    """Whether y has a logarithmic axis: if asked for, and if all means are positive."""
    return panel.log_y and not any((spread(line)[0] <= 0).any() for line in panel.lines)


def plot(
    axes: Axes,
    panel: Panel,
    line_styles: dict[tuple[str, Role], Style],
    limits: tuple[float, float],
    height: float,
) -> None:
    """Draw one panel; each line is an SVG group with the id ``series-NUMBER``."""
    for group, (key, style) in enumerate(line_styles.items()):
        for line in (line for line in panel.lines if (line.label, line.role) == key):
            mean, deviation, n = spread(line)
            axes.plot(
                line.x,
                mean,
                color=style.colour,
                linestyle=style.dashes,
                marker=style.marker,
                markevery=None if len(line.x) <= MAX_MARKED_POINTS else max(1, len(line.x) // 7),
                markeredgewidth=0,
                gid=f"series-{group}",
            )
            if len(line.x) == 1:
                axes.errorbar(line.x, mean, deviation, color=style.colour, capsize=3)
            elif (n > 1).any():
                axes.fill_between(
                    line.x,
                    *band(line, panel),
                    facecolor=(style.colour, 0.13),
                    edgecolor=(style.colour, 0.4),
                    linewidth=0.5,
                    gid=f"series-{group}-band",
                )
    axes.set_xlabel(printable(panel.x_label))
    if not panel.title.lower().endswith(panel.y_label.lower()):
        axes.set_ylabel(textwrap.fill(printable(panel.y_label), int(TITLE_LETTERS * height)))
    if is_log(panel):
        axes.set_yscale("log")
    axes.set_ylim(*limits)
    _set_ticks(axes, panel)
    if not any((spread(line)[2] > 0).any() for line in panel.lines):
        axes.text(0.5, 0.5, "no finished runs", ha="center", transform=axes.transAxes)


def y_limits(panels: Sequence[Panel]) -> list[tuple[float, float]]:
    """Limits of y for each panel; panels with the same label share them if none becomes flat."""
    own = []  # lowest and highest point of means and bands; their logarithms on a log axis
    for panel in panels:
        drawn = [y for line in panel.lines for y in (spread(line)[0], *band(line, panel))]
        points = np.concatenate([*drawn, np.zeros(0)])
        points = points[np.isfinite(points)]
        points = np.log10(points) if is_log(panel) else points
        low, high = (float(points.min()), float(points.max())) if len(points) else (0.0, 1.0)
        least = 0.01 if panel.percent else 0.02 * max(abs(high), abs(low)) or 1.0
        middle, half_height = (low + high) / 2, max(high - low, least) / 2
        own.append((middle - half_height, middle + half_height))
    keys = [(panel.y_label, panel.percent, is_log(panel)) for panel in panels]
    limits = []
    for extent, key in zip(own, keys, strict=True):
        group = [other for other, its_key in zip(own, keys, strict=True) if its_key == key]
        low, high = min(a for a, _ in group), max(b for _, b in group)
        if min(b - a for a, b in group) < 0.4 * (high - low):
            low, high = extent
        margin = 0.05 * (high - low)
        ends = low - margin, high + margin
        limits.append((10 ** ends[0], 10 ** ends[1]) if key[2] else ends)
    return limits


def _set_ticks(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    xs = sorted({float(x) for line in panel.lines for x in line.x})
    if panel.log_x and xs and xs[-1] > 0:
        if xs[0] > 0:
            axes.set_xscale("log")
        else:  # b = 0 has no logarithm
            smallest = min(x for x in xs if x > 0)
            axes.set_xscale("symlog", linthresh=smallest, linscale=0.5)
    pixels: list[float] = [float(axes.transData.transform((x, 1.0))[0]) for x in xs]
    gaps = [b - a for a, b in itertools.pairwise(pixels)]
    if xs and len(xs) <= 8 and all(gap >= 0.1 * (pixels[-1] - pixels[0]) for gap in gaps):
        axes.xaxis.set_major_locator(FixedLocator(xs))
    elif axes.get_xscale() == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    elif axes.get_xscale() == "linear":
        integers = all(x == int(x) for x in xs)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=integers, steps=STEPS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    low, high = axes.get_ylim()
    if not is_log(panel) or high < 1.5 * low:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    elif high < 30 * low:  # there may be no power of ten
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else range(1, 10)))
    axes.yaxis.set_minor_locator(NullLocator())
    factor, unit = (100, "\u00a0%") if panel.percent else (1, "")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{round(factor * y, 6):g}{unit}"))


def caption(panels: Sequence[Panel]) -> str:
    """What lines and bands are, with the number of trials."""
    counts = [int(n) for panel in panels for line in panel.lines for n in spread(line)[2] if n]
    if not counts:
        return "No run of this figure has finished."
    few, most = min(counts), max(counts)
    if most == 1:
        return "Lines are single trials (n = 1), so there is no band."
    n = str(most) if few == most else f"{few} to {most}"
    return f"Lines are means, bands ± one standard deviation, over n = {n} trials."


def description(panel: Panel) -> str:
    """A panel for readers who cannot see it: the first and the last value of each line."""
    sentences = [f"{panel.y_label} against {panel.x_label}."]
    for line in panel.lines:
        mean = spread(line)[0]
        finite = np.flatnonzero(np.isfinite(mean))
        shown = dict.fromkeys(finite[[0, -1]]) if len(finite) else ()
        values = [f"{100 * y:.1f} %" if panel.percent else f"{y:.3g}" for y in mean]
        at = ", ".join(f"{values[i]} at {line.x[i]:g}" for i in shown)
        sentences.append(f"{line.label}: {at or 'no finished trials'}.")
    return " ".join(sentences)


def draw(panels: Sequence[Panel], path: Path | str) -> Path:
    """Draw panels into an SVG or PNG file; an existing file is replaced at the end.

    Args:
        panels: what to draw.
        path: a file that ends in .svg or .png; its folder is created.

    Returns:
        The path.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> from neuvar.experiments.findings import Line
    >>> line = Line("SGD", (1, 2, 3), ((0.5, 0.7, 0.8), (0.4, 0.6, 0.8)), "plain")
    >>> panel = Panel("CIFAR-10", "epoch", "test accuracy", (line,))
    >>> draw([panel], Path(folder.name) / "figure.svg").exists()
    True
    >>> folder.cleanup()
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise ValueError(f"path must end in .svg or .png, got {str(path)!r}")
    write_files({path: pictures(panels, [kind])[kind]})
    return path


def pictures(shown: Sequence[Panel] | Verdict, kinds: Sequence[str] = KINDS) -> dict[str, bytes]:
    """A figure as the bytes of SVG and PNG files; the same panels give the same bytes."""
    if not shown:
        raise ValueError("panels must hold at least one panel, got none")
    metadata = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    files = {}
    with plain_matplotlib("neuvar"):
        figure = forest(shown) if isinstance(shown, Verdict) else make_figure(shown)
        # The layout takes as long as drawing, so it is computed once for both files.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for kind in kinds:
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=DPI, facecolor=PAPER, metadata=metadata[kind])
            files[kind] = file.getvalue()
    return files


def make_figure(panels: Sequence[Panel]) -> Figure:
    """A figure with a legend above the panels and a caption below them."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = 2 if len(panels) == 4 else math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / rows)
    width, height = SIZES[columns]
    line_styles = styles(panels)
    words = [printable(label) for label, _ in line_styles]
    letters = sum(10 + len(word) for word in words)
    legend_rows = math.ceil(letters / (LEGEND_LETTERS * columns * width))
    size = columns * width, rows * height + 0.18 * legend_rows + 0.2
    figure = Figure(figsize=size, layout="constrained")
    for i, (panel, limits) in enumerate(zip(panels, y_limits(panels), strict=True)):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.set_title(textwrap.fill(printable(panel.title), int(TITLE_LETTERS * width)))
        plot(axes, panel, line_styles, limits, height)
    handles = [
        Line2D([], [], color=s.colour, linestyle=s.dashes, marker=s.marker)
        for s in line_styles.values()
    ]
    if handles:
        # Labels that begin with "_" would be left out, so the words are set afterwards.
        legend = figure.legend(
            handles,
            ["label"] * len(words),
            loc="outside upper left",
            ncols=math.ceil(len(words) / legend_rows),
            handlelength=2.8,
        )
        for text, word in zip(legend.get_texts(), words, strict=True):
            text.set_text(word)
    figure.supxlabel(caption(panels), fontsize=7, x=0.01, ha="left")
    return figure


WORD_COLOURS = {"better": "#0b6e4f", "worse": "#a33c00"}
UNDECIDED = "#5d5486"
NAMED = "\u00a0=\u00a0"
"""An equals sign that keeps a number on the line of its name."""
WORD_MARKERS = {"better": "o", "worse": "X"}
"""A comparison that decides nothing has a diamond."""


def forest(verdict: Verdict, width: float = 4.6, *, captioned: bool = True) -> Figure:
    """The comparisons of a verdict: mean difference and 95 % interval, one row for each."""
    from matplotlib.figure import Figure

    # Cases with the same unit share an axis.
    units = {
        _unit(case): [c for c in verdict.cases if _unit(c) == _unit(case)] for case in verdict.cases
    }
    names = {
        unit: [
            textwrap.fill(printable(c.name).replace(" = ", NAMED), int(CASE_LETTERS * width))
            for c in cases
        ]
        for unit, cases in units.items()
    }
    heights = [0.7 + sum(0.24 + 0.14 * (1 + n.count("\n")) for n in names[unit]) for unit in units]
    figure = Figure(figsize=(width, sum(heights) + 0.35 * captioned), layout="constrained")
    every = figure.subplots(len(units), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (unit, cases) in zip(every, units.items(), strict=True):
        _plot_cases(axes, unit, cases, names[unit])
    if captioned:
        text = textwrap.fill(forest_caption(verdict), int(CAPTION_LETTERS * width))
        figure.supxlabel(text, fontsize=7, x=0.01, ha="left")
    return figure


def _unit(case: Case) -> str:
    if case.ratio:
        return "ratio, logarithmic axis"
    return "difference in percentage points" if case.percent else "difference"


def _plot_cases(axes: Axes, unit: str, cases: Sequence[Case], names: Sequence[str]) -> None:
    """Draw cases with the same unit, each under its name; y is in inches from the top."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ends, top = [0.0], 0.0
    for case, name in zip(cases, names, strict=True):
        y = top - 0.14 * (1 + name.count("\n")) - 0.1
        colour = WORD_COLOURS.get(case.word, UNDECIDED)
        ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "fontsize": 8, "va": "top"}
        axes.annotate(name, (0, top), bbox=ground, **place)
        if case.differences:
            mean, low, high = interval(case.differences)
            known = [x for x in (low, high) if math.isfinite(x)]
            axes.plot(known, [y] * len(known), color=colour, linewidth=1.8)
            marker = axes.plot(mean, y, marker=WORD_MARKERS.get(case.word, "D"), color=colour)[0]
            if not case.judged:
                marker.set(markerfacecolor=PAPER)
            ends += [mean, *known]
        else:
            axes.text(0, y, f"  {case.word}", color=colour, fontsize=8, va="center")
        top = y - 0.14
    axes.axvline(0, color=INK, linewidth=0.9, zorder=1.5)
    low, high = min(ends), max(ends)
    margin = 0.06 * (high - low) or 0.01
    axes.set(ylim=(top, 0.01), xlim=(low - margin, high + margin), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"{unit}\n← against the claim · for the claim →")
    factor = 100 if cases[0].percent else 1
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _signed(factor * x)))
    if cases[0].ratio:
        ticks = _ratio_ticks(low, high)
        axes.set_xticks([math.log(x) for x in ticks], [f"{x:g}" for x in ticks])


def _signed(x: float) -> str:
    x = round(x, 6)
    return f"{x:+g}".replace("-", "−") if x else "0"


def _ratio_ticks(low: float, high: float) -> list[float]:
    """At most seven ratios between the exponentials of two numbers, 1 among them."""
    decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    for steps in ((1, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 7, 8, 9), (1, 1.5, 2, 3, 5), (1, 2, 5), (1,)):
        every = sorted({1.0} | {round(step * 10.0**k, 9 - k) for k in decades for step in steps})
        ticks = [x for x in every if low <= math.log(x) <= high]
        if len(ticks) <= 7:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 7)]


def forest_caption(verdict: Verdict) -> str:
    """What a forest plot shows, and how b was chosen."""
    counts = sorted({len(case.differences) for case in verdict.cases if case.differences})
    text = "Points are mean differences over the same seeds, lines 95 % intervals"
    n = "0" if not counts else "–".join(dict.fromkeys(str(x) for x in (counts[0], counts[-1])))
    text += (
        f"; n = {n} trials. Green circles are better, red crosses worse, violet diamonds neither."
    )
    hows = dict.fromkeys(case.choice for case in verdict.cases if case.choice)
    words = [how if how.startswith("no b") else f"b was {how}" for how in hows]
    return text + "".join(f" Where several b were run, {how}." for how in words)


_GROUNDS = {INK: "currentColor", PAPER: "var(--card)"}
CSS_COLOURS = {INK: "currentColor", GRID: "var(--grid)"} | {
    mixed(colour, other, share): f"color-mix(in srgb, var(--{role}), {_GROUNDS[other]} {share:.0%})"
    if share
    else f"var(--{role})"
    for role, colour in COLOURS.items()
    for other, share in SHADES
}
CSS_COLOURS |= {
    WORD_COLOURS["better"]: "var(--green)",
    WORD_COLOURS["worse"]: "var(--rust)",
    UNDECIDED: "var(--violet)",
    PAPER: "var(--card)",
}
"""Our colours as CSS, so that figures on the page follow its theme."""

INLINE = SETTINGS | {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}
_DROPPED = re.compile(
    r"<(metadata|style)\b.*?</\1>|(?<=>)\s+(?=<)|(?<=<g) id=\"(?!series)[^\"]*\"", re.S
)
_SERIES = re.compile(r' id="series-(\d+)[^"]*"')
_ATTRIBUTE = re.compile(r' (style|d|x|y|transform)="[^"]*"')
_COLOUR = re.compile("|".join(CSS_COLOURS))
_FONT = re.compile(r"font-family: [^;]*; ?")
_DECIMALS = re.compile(r"\d+\.\d{3,}")


def page_figure(panels: Sequence[Panel], name: str) -> tuple[list[str], list[str]]:
    """SVG elements for the page: the panels, and a piece of each line for the legend.

    Their ids begin with ``name``, which must be unique on the page.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    line_styles = styles(panels)
    # Few panels are shown larger; they must be readable on a phone.
    size = (3.9, 2.5) if len(panels) in (1, 2, 4) else (3.3, 2.35)
    drawn, pieces = [], []
    with plain_matplotlib(name, INLINE):
        for i, (panel, limits) in enumerate(zip(panels, y_limits(panels), strict=True)):
            figure = Figure(figsize=size, layout="constrained")
            plot(figure.add_subplot(), panel, line_styles, limits, size[1])
            drawn.append(_svg(figure, f"{name}-{i}", panel.title, description(panel)))
        for i, style in enumerate(line_styles.values()):
            figure = Figure(figsize=(0.42, 0.13), layout="constrained")
            line = Line2D([0.05, 0.5, 0.95], [0.5] * 3, color=style.colour, linestyle=style.dashes)
            line.set(marker=style.marker, markevery=[1], markeredgewidth=0)
            figure.add_artist(line)
            pieces.append(_svg(figure, f"{name}-swatch-{i}"))
    return drawn, pieces


def page_forest(verdict: Verdict, name: str) -> str:
    """The forest plot of a verdict as an SVG element for the page."""
    with plain_matplotlib(name, INLINE):
        figure = forest(verdict, 3.6, captioned=False)
        described = " ".join(f"{case}." for case in verdict.cases)
        return _svg(figure, f"{name}-verdict", "Comparisons", described)


def _svg(figure: Figure, name: str, title: str | None = None, described: str = "") -> str:
    """The SVG element of a figure, with the colours of the page; its ids begin with ``name``.

    Title and description are for readers who cannot see it; without a title it is decoration.
    """
    import matplotlib

    attributes, words, one = 'aria-hidden="true"', "", escape(name)
    if title is not None:
        attributes = f'role="img" aria-labelledby="{one}-title {one}-desc"'
        words = f'<title id="{one}-title">{escape(printable(title))}</title>'
        words += f'<desc id="{one}-desc">{escape(printable(described))}</desc>'
    matplotlib.rcParams["svg.hashsalt"] = name
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    _, box, content = re.split(r'(viewBox="[^"]*")[^>]*>', file.getvalue(), maxsplit=1)
    content = _DROPPED.sub("", content)
    content = _SERIES.sub(r' class="series s\1"', content).replace(" xlink:href=", " href=")
    content = _ATTRIBUTE.sub(_page_attribute, content)
    return f"<svg {box} {attributes}>{words}{content.strip()}"


def _page_attribute(attribute: re.Match[str]) -> str:
    """An attribute with the colours and the font of the page, and with two decimals."""
    if attribute[1] == "style":
        return _FONT.sub("", _COLOUR.sub(lambda colour: CSS_COLOURS[colour[0]], attribute[0]))
    return _DECIMALS.sub(lambda number: f"{float(number[0]):.2f}", attribute[0])
