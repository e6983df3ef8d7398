"""Draw test accuracy against b, with b="auto" beside it, from results/auto.md; nothing is trained.

python tools/draw_which_b.py results/auto.md docs/pictures/which-b.png
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from neuvar.report.figures import PALETTE

mpl.use("Agg")

FIXED, AUTO = PALETTE["nvrm"], PALETTE["auto"]
Mean = tuple[float, float]  # mean and standard deviation


def read(text: str) -> dict[str, tuple[dict[float, Mean], Mean]]:
    """Return, for each problem, the accuracies by b and the accuracy with b="auto"."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    auto = {row[1]: mean(row[5]) for row in rows if len(row) == 9 and "±" in row[5]}
    grids = re.findall(r"^- (.+?): (\d.*)$", text, re.M)
    return {title: (grid_of(points), auto[title]) for title, points in grids}


def grid_of(text: str) -> dict[float, Mean]:
    points = [point.split(": ") for point in text.split(", ")]
    return {float(b): mean(accuracy) for b, accuracy in points}


def mean(text: str) -> Mean:
    value, _, deviation = text.partition(" ± ")
    return float(value), float(deviation)


def draw(problems: dict[str, tuple[dict[float, Mean], Mean]]) -> Figure:
    """One panel per problem."""
    figure = Figure(figsize=(7.4, 5.4), layout="constrained")
    figure.get_layout_engine().set(hspace=0.08)
    panels = figure.subplots(2, 3).flatten()
    for ax, (title, (grid, auto)) in zip(panels, problems.items(), strict=True):
        draw_problem(ax, grid, auto)
        ax.set_title("\n".join(title.rsplit(", ", 1)), fontsize=10)
    for ax in panels[3:]:
        ax.set_xlabel("b")
    for ax in panels[::3]:
        ax.set_ylabel("test accuracy, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def draw_problem(ax: Axes, grid: dict[float, Mean], auto: Mean) -> None:
    means, deviations = zip(*grid.values(), strict=True)
    ax.errorbar(
        list(grid), means, deviations, color=FIXED, marker="o", markersize=4, capsize=2,
        label="one b for the whole training (b = 0: plain training)",
    )  # fmt: skip
    ax.axhspan(auto[0] - auto[1], auto[0] + auto[1], color=AUTO, alpha=0.2, linewidth=0)
    ax.axhline(auto[0], color=AUTO, linewidth=1.8, label='b="auto"')
    ax.set_xlim(-0.004, 0.086)
    ax.set_xticks([0, 0.02, 0.04, 0.06, 0.08])
    low, high = ax.get_ylim()
    middle, half = (low + high) / 2, max((high - low) / 2, 5)  # small differences look small
    ax.set_ylim(middle - half, middle + half)
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    figure = draw(read(options.results.read_text(encoding="utf-8")))
    # Without a date or a version in it, the same results give the same file.
    figure.savefig(options.picture, dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    main()
