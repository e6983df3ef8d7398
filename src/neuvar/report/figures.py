"""Figures for print: panels side by side under one legend."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuvar.experiments.findings import Panel
from neuvar.report.files import put
from neuvar.report.panels import LETTERS, plot, y_limits
from neuvar.report.style import PAPER, plain_matplotlib, styles
from neuvar.report.words import caption, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4
SIZES = {1: (4.6, 3.0), 2: (3.4, 2.5), 3: (2.8, 2.2), 4: (2.5, 2.0)}
"""Inches of a panel, by the number of columns."""

KINDS = ("svg", "png")
DPI = 200


def draw(panels: Sequence[Panel], path: Path | str) -> Path:
    """Draw panels into a file, SVG or PNG by its name; it is replaced only when all is drawn.

    Args:
        panels: what to draw.
        path: a file that ends in .svg or .png; its folder is made.

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
    put({path: pictures(panels, [kind])[kind]})
    return path


def pictures(panels: Sequence[Panel], kinds: Sequence[str] = KINDS) -> dict[str, bytes]:
    """A figure as the bytes of SVG and PNG files, the same for the same panels."""
    if not panels:
        raise ValueError("panels must hold at least one panel, got none")
    nothing = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    found = {}
    with plain_matplotlib("neuvar"):
        figure = _figure(panels)
        # Finding places for all parts takes as long as drawing them, so it is done once.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for kind in kinds:
            drawn = io.BytesIO()
            figure.savefig(drawn, format=kind, dpi=DPI, facecolor=PAPER, metadata=nothing[kind])
            found[kind] = drawn.getvalue()
    return found


def _figure(panels: Sequence[Panel]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = math.ceil(len(panels) / COLUMNS)
    columns = math.ceil(len(panels) / rows)
    width, height = SIZES[columns]
    looks = styles(panels)
    words = [printable(label) for label, _ in looks]
    beside = max(1, int(columns * width * 13 / (8 + max(map(len, words), default=0))))
    legend_rows = math.ceil(len(words) / beside)
    size = columns * width, rows * height + 0.18 * legend_rows + 0.2
    figure = Figure(figsize=size, layout="constrained")
    for i, (panel, limits) in enumerate(zip(panels, y_limits(panels), strict=True)):
        axes = figure.add_subplot(rows, columns, i + 1)
        title = textwrap.fill(printable(panel.title), int(LETTERS * width))
        axes.set_title(title)
        plot(axes, panel, looks, limits, height)
    handles = [
        Line2D([], [], color=s.colour, linestyle=s.dashes, marker=s.marker) for s in looks.values()
    ]
    if handles:
        # A label that begins with "_" would be left out, so words come afterwards.
        legend = figure.legend(
            handles,
            ["label"] * len(words),
            loc="outside upper left",
            ncols=beside,
            handlelength=3.2,
        )
        for text, word in zip(legend.get_texts(), words, strict=True):
            text.set_text(word)
    figure.supxlabel(caption(panels), fontsize=7, x=0.01, ha="left")
    return figure
