"""Figures: panels side by side in a file, or one by one as SVG inside of the page."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from neuvar._atomic import write_files
from neuvar.experiments.findings import Panel
from neuvar.report.plot import (
    COLOURS,
    GRID,
    INK,
    LETTERS,
    PAPER,
    SETTINGS,
    SHADES,
    Style,
    caption,
    description,
    mixed,
    plain_matplotlib,
    plot,
    styles,
    y_limits,
)
from neuvar.report.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = {1: (4.6, 3.0), 2: (3.6, 2.5), 3: (2.8, 2.2), 4: (2.5, 2.0)}
"""Width and height of a panel in inches, by the number of columns."""
KINDS = ("svg", "png")
LEGEND = 15
"""Letters of the legend per inch."""
DPI = 200


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


def pictures(panels: Sequence[Panel], kinds: Sequence[str] = KINDS) -> dict[str, bytes]:
    """A figure as the bytes of SVG and PNG files; the same panels give the same bytes."""
    if not panels:
        raise ValueError("panels must hold at least one panel, got none")
    metadata = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    made = {}
    with plain_matplotlib("neuvar"):
        figure = make_figure(panels)
        # The layout takes as long as drawing, so it is computed once for both files.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for kind in kinds:
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=DPI, facecolor=PAPER, metadata=metadata[kind])
            made[kind] = file.getvalue()
    return made


def make_figure(panels: Sequence[Panel]) -> Figure:
    """A figure with a legend above the panels and a caption below them."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = 2 if len(panels) == 4 else math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / rows)
    width, height = SIZES[columns]
    looks = styles(panels)
    words = [printable(label) for label, _ in looks]
    legend_rows = math.ceil(sum(10 + len(word) for word in words) / (LEGEND * columns * width))
    size = columns * width, rows * height + 0.18 * legend_rows + 0.2
    figure = Figure(figsize=size, layout="constrained")
    for i, (panel, limits) in enumerate(zip(panels, y_limits(panels), strict=True)):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.set_title(textwrap.fill(printable(panel.title), int(LETTERS * width)))
        plot(axes, panel, looks, limits, height)
    handles = [
        Line2D([], [], color=s.colour, linestyle=s.dashes, marker=s.marker) for s in looks.values()
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


_GROUNDS = {INK: "currentColor", PAPER: "var(--card)"}
CSS_COLOURS = {INK: "currentColor", GRID: "var(--grid)"} | {
    mixed(colour, other, share): f"color-mix(in srgb, var(--{role}), {_GROUNDS[other]} {share:.0%})"
    if share
    else f"var(--{role})"
    for role, colour in COLOURS.items()
    for other, share in SHADES
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
_STYLE = re.compile(r' style="[^"]*"')
_FONT = re.compile(r"font-family: [^;]*; ?")
_COLOUR = re.compile("|".join(CSS_COLOURS))
_GEOMETRY = re.compile(r' (?:d|x|y|transform)="[^"]*"')
_DECIMALS = re.compile(r"\d+\.\d{3,}")


def inline(panels: Sequence[Panel], name: str) -> list[str]:
    """An SVG element for each panel; ``name`` must be unique on the page."""
    looks = styles(panels)
    # Few panels are shown larger; they must be readable on a phone.
    size = (3.9, 2.5) if len(panels) in (1, 2, 4) else (3.3, 2.35)
    made = []
    for i, (panel, limits) in enumerate(zip(panels, y_limits(panels), strict=True)):
        one = escape(f"{name}-{i}")
        with _drawing(size, f"{name}-{i}") as figure:
            plot(figure.add_subplot(), panel, looks, limits, size[1])
            svg = _svg(figure, f'role="img" aria-labelledby="{one}-title {one}-desc"')
        title, desc = escape(printable(panel.title)), escape(description(panel))
        head, _, content = svg.partition(">")
        words = f'<title id="{one}-title">{title}</title><desc id="{one}-desc">{desc}</desc>'
        made.append(f"{head}>{words}{content}")
    return made


def swatch(look: Style, name: str) -> str:
    """A short piece of a line, for the legend of the page."""
    with _drawing((0.42, 0.13), name) as figure:
        from matplotlib.lines import Line2D

        line = Line2D([0.05, 0.5, 0.95], [0.5] * 3, color=look.colour, linestyle=look.dashes)
        line.set(marker=look.marker, markevery=[1], markeredgewidth=0)
        figure.add_artist(line)
        return _svg(figure, 'aria-hidden="true"')


@contextmanager
def _drawing(size: tuple[float, float], name: str) -> Iterator[Figure]:
    """An empty figure for the page, whose SVG has ids that depend on ``name``."""
    with plain_matplotlib(name, INLINE):
        from matplotlib.figure import Figure

        yield Figure(figsize=size, layout="constrained")


def _svg(figure: Figure, attributes: str) -> str:
    """The SVG element of a figure, with the colours of the page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    content = _DROPPED.sub("", svg[svg.index(">", box.end()) + 1 :])
    content = _SERIES.sub(r' class="series s\1"', content).replace(" xlink:href=", " href=")
    content = _STYLE.sub(_page_style, content)
    content = _GEOMETRY.sub(_rounded, content)
    return f"<svg {box[0]} {attributes}>{content.strip()}"


def _page_style(style: re.Match[str]) -> str:
    return _FONT.sub("", _COLOUR.sub(lambda colour: CSS_COLOURS[colour[0]], style[0]))


def _rounded(geometry: re.Match[str]) -> str:
    return _DECIMALS.sub(lambda number: f"{float(number[0]):.2f}", geometry[0])
