"""What verdicts, scales and figures are called, in every form of the report alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from neuvar.experiments.findings import Cell, Line, Panel

VERDICTS = {
    "true": ("✓", "holds"),
    "false": ("✗", "does not hold"),
    "undecided": ("?", "undecided"),
    "": ("–", "not run"),
}
"""A sign and words for each outcome; "" is that of a claim without results."""

SCALES = {
    "paper": "Paper scale: the paper's own settings",
    "cpu": "CPU scale: the same claim, made smaller",
    "smoke": "Smoke scale: seconds, only to see that it runs",
}

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """A text without signs that XML forbids.

    >>> printable("b = .05" + chr(0))
    'b = .05�'
    """
    return _CONTROL.sub("�", text)


def number(cell: str | Cell) -> float | None:
    """What a cell of a table is sorted by, if it is a number.

    >>> number("40 %"), number(".05"), number("SGD"), number(Cell((0.5, 0.7)))
    (40.0, 0.05, None, 0.6)
    """
    if isinstance(cell, Cell):
        return cell.mean if np.isfinite(cell.mean) else None
    try:
        value = float(cell.strip().removesuffix("%").replace("−", "-").replace(",", ""))
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def spread(line: Line) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Mean, standard deviation and number of trials at each x, over the trials that got so far.

    A mean without trials and a deviation of fewer than two are NaN.

    >>> mean, deviation, n = spread(Line("", (1, 2), ((0.2, 0.4), (0.4,))))
    >>> mean.round(6).tolist(), n.tolist()
    ([0.3, 0.4], [2, 1])
    """
    values = np.full((len(line.trials), len(line.x)), np.nan)
    for row, trial in zip(values, line.trials, strict=True):
        known = np.asarray(trial[: len(line.x)], np.float64)
        row[: len(known)] = np.where(np.isfinite(known), known, np.nan)
    there = np.isfinite(values)
    n = there.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(there, values, 0).sum(axis=0) / n
        squares = np.where(there, values - mean, 0) ** 2
        deviation = np.sqrt(np.where(n > 1, squares.sum(axis=0) / (n - 1), np.nan))
    return mean, deviation, n


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
    """A panel for those who cannot see it: where each line begins and ends."""
    said = [f"{panel.y_label} against {panel.x_label}."]
    for line in panel.lines:
        mean = spread(line)[0]
        there = np.flatnonzero(np.isfinite(mean))
        if len(there) == 0:
            said.append(f"{line.label}: no finished trials.")
            continue
        ends = dict.fromkeys((there[0], there[-1]))
        at = [f"{_value(mean[i], panel.percent)} at {line.x[i]:g}" for i in ends]
        said.append(f"{line.label}: {', '.join(at)}.")
    return printable(" ".join(said))


def _value(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.3g}"
