"""How lines look: the same method in the same colour in every figure, on paper and on the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from neuvar.experiments.findings import Panel, Role

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS: dict[Role, str] = {
    "plain": "#d55e00",
    "nvrm": "#0072b2",
    "other": "#009e73",
    "third": "#cc79a7",
    "fourth": "#e69f00",
}
INK, GRID, PAPER = "#222222", "#dddddd", "#ffffff"
SHADES = ((INK, 0.0), (INK, 0.45), (PAPER, 0.3))
"""What the first, second and third line of a role mix into their colour, and how much of it."""

DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS: dict[Role, str] = {"plain": "o", "nvrm": "s", "other": "^", "third": "D", "fourth": "v"}
FURTHER = "PX*<>"
"""Markers of the second and later lines of a role."""

SETTINGS: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 8,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.xmargin": 0.03,
    "font.size": 8,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a label is one
    "xtick.color": INK,
    "xtick.labelsize": 7.5,
    "ytick.color": INK,
    "ytick.labelsize": 7.5,
}


@dataclass(frozen=True)
class Style:
    """How one line of a figure looks: colour by role; shade, dashes and marker by order."""

    colour: str
    dashes: Any
    marker: str


@contextmanager
def plain_matplotlib(salt: str, settings: Mapping[str, Any] = SETTINGS) -> Iterator[None]:
    """Matplotlib as it comes, with our settings; the user's own are back afterwards.

    With ``salt`` names inside of an SVG are the same each time.
    """
    try:
        import matplotlib.style
    except ImportError as error:
        raise ImportError('a figure needs matplotlib: pip install "neuvar[plot]"') from error
    with matplotlib.style.context(["default", {**settings, "svg.hashsalt": salt}]):
        yield


def styles(panels: Sequence[Panel]) -> dict[tuple[str, Role], Style]:
    """A style for each line of a figure, the same in all its panels."""
    found: dict[tuple[str, Role], Style] = {}
    for line in (line for panel in panels for line in panel.lines):
        if (line.label, line.role) in found:
            continue
        k = sum(role == line.role for _, role in found)
        marker = MARKERS[line.role] if k == 0 else FURTHER[(k - 1) % len(FURTHER)]
        colour = mixed(COLOURS[line.role], *SHADES[k % len(SHADES)])
        found[line.label, line.role] = Style(colour, DASHES[k % len(DASHES)], marker)
    return found


def mixed(colour: str, other: str, share: float) -> str:
    """A colour with a share of another in it.

    >>> mixed("#d55e00", "#222222", 0), mixed("#000000", "#ffffff", 0.5)
    ('#d55e00', '#808080')
    """
    pairs = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round((1 - share) * a + share * b):02x}" for a, b in pairs)
