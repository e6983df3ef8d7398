"""Figures inside of the page: one SVG for each panel, in colours that follow the page's."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from neuvar.experiments.findings import Panel
from neuvar.report.panels import plot, y_limits
from neuvar.report.style import (
    COLOURS,
    GRID,
    INK,
    PAPER,
    SETTINGS,
    SHADES,
    Style,
    mixed,
    plain_matplotlib,
    styles,
)
from neuvar.report.words import description, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GROUNDS = {INK: "currentColor", PAPER: "var(--card)"}
VARIABLES = {INK: "currentColor", GRID: "var(--grid)"} | {
    mixed(colour, other, share): f"color-mix(in srgb, var(--{role}), {_GROUNDS[other]} {share:.0%})"
    if share
    else f"var(--{role})"
    for role, colour in COLOURS.items()
    for other, share in SHADES
}
"""The page's names for our colours, so that a change of theme reaches the figures."""

INLINE = SETTINGS | {
    "svg.fonttype": "none",  # words stay words, in the page's own type
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}

_COLOUR = re.compile("|".join(VARIABLES))
_FONT = re.compile(r"font-family: [^;]*; ?")
_DECIMALS = re.compile(r"\d+\.\d{3,}")


def inline(panels: Sequence[Panel], name: str) -> list[str]:
    """An SVG element for each panel; ``name`` is one that no other figure of the page has."""
    looks = styles(panels)

    def panel_on(panel: Panel, limits: tuple[float, float]) -> Callable[[Figure], None]:
        return lambda figure: plot(figure.add_subplot(), panel, looks, limits, size[1])

    # Few panels are shown larger, and still have to be read on a phone.
    size = (3.9, 2.5) if len(panels) in (1, 2, 4) else (3.3, 2.35)
    found = []
    for i, (panel, limits) in enumerate(zip(panels, y_limits(panels), strict=True)):
        svg = _svg(size, panel_on(panel, limits), f"{name}-{i}")
        _describe(svg, f"{name}-{i}", panel)
        found.append(ElementTree.tostring(svg, encoding="unicode"))
    return found


def swatch(look: Style, name: str) -> str:
    """A short piece of a line, for the legend."""

    def line_on(figure: Figure) -> None:
        from matplotlib.lines import Line2D

        line = Line2D([0.05, 0.5, 0.95], [0.5] * 3, color=look.colour, linestyle=look.dashes)
        line.set(marker=look.marker, markevery=[1], markeredgewidth=0)
        figure.add_artist(line)

    svg = _svg((0.42, 0.13), line_on, name)
    svg.set("aria-hidden", "true")
    return ElementTree.tostring(svg, encoding="unicode")


def _svg(
    size: tuple[float, float], fill: Callable[[Figure], None], name: str
) -> ElementTree.Element:
    """Draw into a figure and take it apart into what may stand in a page among others."""
    with plain_matplotlib(name, INLINE):
        from matplotlib.figure import Figure

        figure, drawn = Figure(figsize=size, layout="constrained"), io.BytesIO()
        fill(figure)
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = ElementTree.fromstring(drawn.getvalue())  # noqa: S314, because we have just drawn it
    for element in list(svg.iter()):
        element.tag = element.tag.partition("}")[2]
        for child in list(element):
            if child.tag.endswith(("}metadata", "}style")):
                element.remove(child)
        _adapt(element, name)
        element.tail = None
        if element.tag != "text":
            element.text = None
    del svg.attrib["width"], svg.attrib["height"]
    svg.attrib.pop("version", None)
    return svg


def _adapt(element: ElementTree.Element, name: str) -> None:
    """Give an element a name that is the page's only one, variable colours, fewer decimals."""
    for key, value in list(element.attrib.items()):
        if key.startswith("{"):
            del element.attrib[key]
        if key == "id" and value.startswith("series-"):
            del element.attrib[key]
            element.set("class", f"series s{value.split('-')[1]}")
        elif key == "id" and element.tag == "g":
            del element.attrib[key]  # nothing refers to it
        elif key == "id":
            element.set("id", f"{name}-{value}")
        elif key.endswith("href"):
            element.set("href", value.replace("#", f"#{name}-", 1))
        elif key == "style":
            style = _FONT.sub("", value)
            element.set(key, _COLOUR.sub(lambda found: VARIABLES[found[0]], style))
        elif key in ("d", "x", "y", "transform"):
            element.set(key, _DECIMALS.sub(lambda found: f"{float(found[0]):.2f}", value))
        if key == "clip-path":
            element.set(key, value.replace("#", f"#{name}-", 1))


def _describe(svg: ElementTree.Element, name: str, panel: Panel) -> None:
    svg.set("role", "img")
    svg.set("aria-labelledby", f"{name}-title {name}-desc")
    for position, (tag, text) in enumerate(
        (("title", printable(panel.title)), ("desc", description(panel)))
    ):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        element.text = text
        svg.insert(position, element)
