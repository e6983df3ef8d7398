"""Draw the pictures of the guide to flatness from measured results; nothing is trained here.

python tools/draw_flatness.py results/flatness.json docs/pictures
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from neuvar.report.figures import PALETTE

mpl.use("Agg")

COLOURS = {"Adam": PALETTE["plain"], "NVRM-Adam": PALETTE["nvrm"]}
TITLES = {"Adam": "Adam", "NVRM-Adam": "NVRM-Adam, b = 0.05"}
GREY = PALETTE["mark"]
Run = dict[str, Any]


def idea() -> Figure:
    """A sharp and a flat minimum under the same noise."""
    figure = Figure(figsize=(7.4, 3.1), layout="constrained")
    b, w = 0.3, np.linspace(-1.2, 1.2, 400)
    for ax, curvature, title in zip(
        figure.subplots(1, 2, sharey=True), (9.0, 1.5), ("sharp", "flat"), strict=True
    ):
        rise = curvature * b**2 / 2
        ax.plot(w, curvature * w**2 / 2, color="black", linewidth=1.6)
        ax.fill_between(
            w, 0, 0.9 * np.exp(-((w / b) ** 2) / 2), color=PALETTE["nvrm"], alpha=0.2, linewidth=0
        )
        ax.axhline(rise, color=GREY, linewidth=1.4)
        arrow = {"arrowstyle": "<->", "color": GREY, "shrinkA": 0, "shrinkB": 0}
        arrow["mutation_scale"] = min(10, 60 * rise)
        ax.annotate("", (0.95, rise), (0.95, 0), arrowprops=arrow)
        middle = rise / 2 if rise > 0.2 else rise + 0.09  # beside the arrow, or above the line
        ax.text(1.0, middle, "δ", color=GREY, fontsize=13, va="center")
        ax.text(0, -0.115, "noise of scale b", color=PALETTE["nvrm"], ha="center", fontsize=9)
        ax.set(
            title=f"a {title} minimum\n(grey line: mean loss under noise)",
            ylim=(-0.16, 1.6),
            xlim=(-1.2, 1.2),
            xlabel="weight",
        )
        ax.set_xticks([0], ["θ"])
        ax.set_yticks([0], ["L(θ)"])
        plain(ax)
    return figure


def curves(runs: list[Run]) -> Figure:
    """Loss and accuracy on test images over b: one thin line a network, their mean in bold."""
    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    height: dict[Axes, Callable[[Run], float]] = {
        left: lambda point: point["perturbed"],
        right: lambda point: 100 * point["accuracy"]["mean"],
    }
    for ax, value in height.items():
        for name, colour in COLOURS.items():
            lines = np.array([[value(p) for p in run["curve"]] for run in of(runs, name)])
            b = [p["b"] for p in of(runs, name)[0]["curve"]]
            ax.plot(b, lines.T, color=colour, linewidth=0.7, alpha=0.5)
            ax.plot(b, lines.mean(0), color=colour, linewidth=2.2, marker="o", markersize=4)
            words = TITLES[name].replace(", ", "\n")
            ax.text(b[-1] * 1.02, lines.mean(0)[-1], words, color=colour, va="center", fontsize=9)
        ax.set_xlabel("scale b of Gaussian noise on the weights")
        ax.set_xlim(0, b[-1] * 1.28)
        ax.set_xticks([0, 0.02, 0.04, 0.06, 0.08, 0.1])
        plain(ax)
    left.set(title="loss on test images", yscale="log")
    left.minorticks_off()
    left.set_yticks([0.3, 1, 3], ["0.3", "1", "3"])
    right.set(title="accuracy on test images, %", ylim=(0, 100))
    return figure


def largest(runs: list[Run], delta: float, seed: int = 0) -> Figure:
    """How the largest b is read off: where the measured difference crosses δ."""
    figure = Figure(figsize=(7.4, 3.6), layout="constrained")
    ax, top = figure.subplots(), 0.0
    for name, colour in COLOURS.items():
        (run,) = [run for run in of(runs, name) if run["seed"] == seed]
        found = run["largest_b"]
        points = [p for p in found["measured"] if 0.3 * delta < p["difference"] < 3 * delta]
        top = max(top, *(p["interval"][1] for p in points))
        b, middle = [p["b"] for p in points], [p["difference"] for p in points]
        low, high = zip(*(p["interval"] for p in points), strict=True)
        ax.fill_between(b, low, high, color=colour, alpha=0.22, linewidth=0)
        ax.plot(b, middle, color=colour, linewidth=1.8, marker="o", markersize=4)
        first, last = found["interval"]
        ax.plot([first, last], [0, 0], color=colour, linewidth=7, solid_capstyle="butt")
        ax.plot([found["b"]] * 2, [0, delta], color=colour, linewidth=1, linestyle=(0, (4, 3)))
        ax.text(
            found["b"], -0.01,
            f"{TITLES[name]}\nlargest b: {found['b']:.3f} [{first:.3f}, {last:.3f}]",
            color=colour, ha="center", va="top", fontsize=9,
        )  # fmt: skip
    ax.axhline(delta, color=GREY, linewidth=1)
    ax.text(ax.get_xlim()[0], delta, f" δ = {delta:g}", color=GREY, va="bottom")
    ax.set(xlabel="scale b of the noise", ylabel="rise of the training loss")
    ax.set_ylim(-0.5 * delta, 1.04 * top)
    ax.set_yticks([tick for tick in ax.get_yticks() if 0 <= tick <= top])
    plain(ax)
    return figure


def proved(proofs: list[Run], b: float) -> Figure:
    """What is measured and what is proved about the error."""
    rows: dict[str, Callable[[Run], float]] = {
        "training error": lambda r: r["seeger"]["clean"],
        "test error": lambda r: r["test_error"],
        "training error under noise": lambda r: r["seeger"]["perturbed"]["mean"],
        "Seeger's bound": lambda r: r["seeger"]["bound"]["value"],
        "McAllester's bound (lemma 1)": lambda r: r["mcallester"]["value"],
        "theorem 1": lambda r: r["variability"]["value"],
    }
    figure = Figure(figsize=(7.4, 3.2), layout="constrained")
    ax = figure.subplots()
    ax.axvspan(1, 10, color="0.92", linewidth=0)
    ax.text(1.06, -0.55, "vacuous", color=GREY, fontsize=9, va="center")
    for offset, proof, colour in zip((-0.16, 0.16), proofs, COLOURS.values(), strict=True):
        values = [value(proof) for value in rows.values()]
        places = [row + offset for row in range(len(rows))]
        marker = "o" if offset < 0 else "D"
        ax.scatter(values, places, color=colour, s=34, marker=marker, label=trained_with(proof, b))
        for value, place in zip(values, places, strict=True):
            ax.text(value * 1.09, place, f"{value:.3f}", color=colour, fontsize=8, va="center")
    ax.axhline(2.5, color="0.8", linewidth=0.8)
    ax.text(0.0203, 2.42, "measured", color=GREY, fontsize=9, va="bottom")
    ax.text(0.0203, 2.58, "proved, for weights with noise", color=GREY, fontsize=9, va="top")
    ax.set(xscale="log", xlim=(0.02, 10), ylim=(5.6, -0.9), xlabel="share of wrong predictions")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xticks(
        [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10],
        labels=["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5", "10"],
    )
    ax.minorticks_off()
    ax.legend(frameon=False, loc="lower left")
    plain(ax)
    return figure


def trained_with(proof: Run, b: float) -> str:
    """The optimizer of a proof, with its b."""
    name = proof["optimizer"]
    return f"{name}, b = {b:g}" if "NVRM" in name else name


def of(runs: list[Run], name: str) -> list[Run]:
    return [run for run in runs if run["optimizer"] == name]


def plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    found = json.loads(options.results.read_text(encoding="utf-8"))
    options.folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "flatness-idea": idea(),
        "flatness-curves": curves(found["runs"]),
        "flatness-largest-b": largest(found["runs"], found["delta"]),
        "flatness-proved": proved(found["proofs"], found["b"]),
    }
    for name, figure in pictures.items():
        # Without a date or a version in it, the same results give the same file.
        figure.savefig(options.folder / f"{name}.png", dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    main()
