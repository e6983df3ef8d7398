"""Tables and figures of uncertainty.py, from its lines."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from spread import difference, interval, spread

METHODS = {
    ("plain", "clean"): "plain",
    ("sam", "clean"): "SAM",
    ("swa", "clean"): "SWA",
    ("dropout", "clean"): "dropout, off at test",
    ("dropout", "averaged"): "MC dropout",
    ("ivon", "clean"): "IVON, mean weights",
    ("ivon", "averaged"): "IVON, averaged",
    ("nvrm", "clean"): "NVRM, clean weights",
    ("nvrm", "averaged"): "NVRM, averaged",
    ("ensemble", "mean"): "ensemble of three, 3× the cost",
}
OURS = ("nvrm", "averaged")
PREDICTION_COLUMNS = {
    "accuracy": ("accuracy, %", 100, 1),
    "calibration_error": ("calibration error", 1, 4),
    "log_loss": ("log loss", 1, 3),
    "brier": ("Brier score", 1, 4),
    "scaled_calibration_error": ("calibration error, temperature scaled", 1, 4),
    "scaled_log_loss": ("log loss, temperature scaled", 1, 3),
    "selective_80": ("accuracy at 80 % coverage, %", 100, 1),
    "strange_auroc": ("AUROC, OOD inputs", 1, 3),
    "corrupted": ("accuracy on corrupted images, %", 100, 1),
}
JUDGED = (
    "calibration_error", "log_loss", "scaled_calibration_error", "scaled_log_loss", "strange_auroc"
)  # fmt: skip

Lines = list[dict[str, Any]]
BySeed = dict[tuple[str, str], dict[int, dict[str, Any]]]


def tables(lines: Lines, rows: dict[str, Any]) -> str:
    """All tables as Markdown."""
    parts = [_one(lines, row) for row in rows.values()]
    return "\n".join(part for part in parts if part)


def compared(lines: Lines, rows: dict[str, Any]) -> list[str]:
    """One table of all data sets: calibration error and log loss of each method."""
    columns = [(row, name) for row in rows.values() for name in JUDGED[:2]]
    heads = [f"{row.title.split(',')[0]}, {PREDICTION_COLUMNS[name][0]}" for row, name in columns]
    found = {row.name: reported(lines, row.name) for row in rows.values()}
    text = [f"| method | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for method, title in METHODS.items():
        cells = []
        for row, name in columns:
            own, ours = (found[row.name].get(key, {}) for key in (method, OURS))
            digits = PREDICTION_COLUMNS[name][2]
            cell = spread((own[seed][name] for seed in own), digits)
            gains = [
                ours[seed][name] - own[seed][name] for seed in sorted(ours.keys() & own.keys())
            ]
            cells.append(f"**{cell}**" if len(gains) > 1 and _excludes_zero(gains) else cell)
        text.append(f"| {title} | {' | '.join(cells)} |")
    return text


def reported(lines: Lines, row: str) -> BySeed:
    """Predictions of each method by seed."""
    found: BySeed = defaultdict(dict)
    for line in lines:
        run = line["run"]
        if run["row"] == row and not run["choice"] and line["status"] == "finished":
            for way, numbers in line["predictions"].items():
                found[run["arm"], way][run["seed"]] = numbers
    return found


def _weights(lines: Lines, row: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Numbers of the clean weights of each arm by seed."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        run = line["run"]
        if run["row"] == row and not run["choice"] and "weights" in line:
            found[run["arm"]][run["seed"]] = line["weights"]
    return found


def _one(lines: Lines, row: Any) -> str:
    found = reported(lines, row.name)
    if not found:
        return ""
    counts = sorted({len(own) for own in found.values()})
    n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    if counts[0] < len(row.seeds):
        n += f"; preliminary, {len(row.seeds)} are planned"
    heads = [title for title, _, _ in PREDICTION_COLUMNS.values()]
    text = [
        f"### {row.title}",
        "",
        f"Mean ± standard deviation over seeds, {n}.",
        "",
        f"| method | {' | '.join(heads)} |",
        "| --- |" + " ---: |" * len(heads),
    ]
    for method, title in METHODS.items():
        if own := found.get(method):
            cells = [
                spread((numbers[name] for numbers in own.values()), digits, factor=factor)
                for name, (_, factor, digits) in PREDICTION_COLUMNS.items()
            ]
            text.append(f"| {title} | {' | '.join(cells)} |")
    text += ["", *_differences(found)]
    return "\n".join([*text, *_weights_table(lines, row)])


def _weights_table(lines: Lines, row: Any) -> list[str]:
    found = _weights(lines, row.name)
    if not found:
        return []
    heads = [
        f"PGD, ε = {row.epsilon:.3g}", "4 bits, tensor", "3 bits, tensor", "2 bits, tensor",
        "3 bits, rows", "2 bits, rows", "torch's kernels, 8 bits", "4 bits",
        "bit flips, 0.1 %", "1 %", "analog noise, multiplicative 0.1", "additive 0.1",
    ]  # fmt: skip
    text = [f"| clean weights, accuracy in % | {' | '.join(heads)} |", "| --- |" + " ---: |" * 12]
    columns = {arm: {seed: _stored(w) for seed, w in own.items()} for arm, own in found.items()}
    for arm, title in (
        ("plain", "plain"), ("sam", "SAM"), ("swa", "SWA"), ("dropout", "dropout"),
        ("ivon", "IVON"), ("nvrm", "NVRM"),
    ):  # fmt: skip
        if own := columns.get(arm):
            cells = [spread(values, 1, factor=100) for values in zip(*own.values(), strict=True)]
            text.append(f"| {title} | {' | '.join(cells)} |")
    ours, plain = columns.get("nvrm", {}), columns.get("plain", {})
    both = sorted(ours.keys() & plain.keys())
    if len(both) > 1:
        cells = []
        for values in zip(
            *(zip(ours[seed], plain[seed], strict=True) for seed in both), strict=True
        ):
            gains = [own - other for own, other in values]
            cell = difference(gains, 1, factor=100)
            cells.append(f"**{cell}**" if _excludes_zero(gains) else cell)
        text.append(f"| NVRM minus plain | {' | '.join(cells)} |")
    return [*text, ""]


def _stored(w: dict[str, Any]) -> list[float]:
    """The columns of the table of weights."""
    return [
        w["attacked"],
        *(w["bits"]["tensor"][k] for k in (4, 5, 6)),
        *(w["bits"]["row"][k] for k in (5, 6)),
        *(w["kernels"][bits] for bits in ("8", "4")),
        *w["bit_flips"],
        *(w["analog"][kind] for kind in ("multiplicative", "additive")),
    ]


def _differences(found: BySeed) -> list[str]:
    """NVRM averaged minus each other method, paired by seed."""
    ours = found.get(OURS, {})
    rows = []
    for method, title in METHODS.items():
        theirs = found.get(method, {})
        both = sorted(ours.keys() & theirs.keys())
        if method == OURS or len(both) < 2:
            continue
        cells = []
        for name in JUDGED:
            gains = [ours[seed][name] - theirs[seed][name] for seed in both]
            text = difference(gains, 4)
            cells.append(f"**{text}**" if _excludes_zero(gains) else text)
        rows.append(f"| {title} | {' | '.join(cells)} |")
    if not rows:
        return []
    heads = [PREDICTION_COLUMNS[name][0] for name in JUDGED]
    return [
        "NVRM averaged minus each other method, paired by seed, with the 95 % interval. NVRM is "
        "better if it is negative, for the AUROC if it is positive. Bold: the interval excludes 0.",
        "",
        f"| NVRM averaged minus | {' | '.join(heads)} |",
        "| --- |" + " ---: |" * len(heads),
        *rows,
        "",
    ]


def _excludes_zero(gains: list[float]) -> bool:
    _, low, high = interval(gains)
    return low > 0 or high < 0


def pictures(lines: Lines, rows: dict[str, Any], folder: Path) -> None:
    """Reliability, accuracy against coverage, and accuracy against bits, one file per row."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    for row in rows.values():
        if not reported(lines, row.name):
            continue
        figure = Figure(figsize=(8.6, 3.9), layout="constrained")
        axes = figure.subplots(1, 3)
        _plot_predictions(axes[:2], lines, row.name)
        _plot_rounding(axes[2], lines, row.name)
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.title.set_fontsize("medium")
            ax.locator_params(axis="y", nbins=6)
            ax.tick_params(labelsize="small")
        handles = {
            label: handle
            for ax in (axes[0], axes[2])
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        below = {"loc": "outside lower center", "ncols": 4, "frameon": False, "fontsize": "medium"}
        figure.legend(handles.values(), handles.keys(), **below)
        figure.suptitle(row.title)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"uncertainty-{row.name}.png"
        figure.savefig(path, dpi=160, metadata={"Software": None})


def _styles(lines: Lines, row: str) -> dict[str, dict[str, Any]]:
    """How the lines of each arm look in all panels."""
    from neuvar.report.figures import PALETTE

    runs = [line["run"] for line in lines]
    scales = {
        run["setting"]["b"]
        for run in runs
        if run["row"] == row and "b" in run["setting"] and not run["choice"]
    }
    b = "".join(f", b = {scale:g}" for scale in scales)
    labels = {
        "plain": ("plain", "o"),
        "swa": ("SWA", "s"),
        "sam": ("SAM", "v"),
        "dropout": ("MC dropout", "^"),
        "ivon": ("IVON, averaged", "D"),
        "nvrm": (f"NVRM{b}, averaged", "P"),
        "ensemble": ("ensemble of three", "X"),
    }
    return {
        arm: {"color": PALETTE[arm], "label": label, "marker": marker, "markersize": 4}
        for arm, (label, marker) in labels.items()
    }


def _plot_predictions(axes: Any, lines: Lines, row: str) -> None:
    """Accuracy minus confidence, and accuracy against coverage."""
    found, styles = reported(lines, row), _styles(lines, row)
    for arm, way in (
        ("plain", "clean"), ("swa", "clean"), ("dropout", "averaged"), ("ivon", "averaged"),
        ("nvrm", "averaged"), ("ensemble", "mean"),
    ):  # fmt: skip
        if own := found.get((arm, way)):
            confidence, accuracy = _pooled([numbers["bins"] for numbers in own.values()])
            axes[0].plot(confidence, accuracy - confidence, **styles[arm])
            curve = np.mean([numbers["coverage"] for numbers in own.values()], axis=0)
            axes[1].plot(np.arange(4, 21) / 20, curve, markevery=4, **styles[arm])
    axes[0].axhline(0, color="0.7", linewidth=0.8, zorder=1)
    axes[0].set(xlabel="confidence", ylabel="accuracy − confidence", title="Reliability")
    kept = "share of predictions kept"
    axes[1].set(xlabel=kept, ylabel="accuracy", title="Most confident predictions")


def _plot_rounding(ax: Any, lines: Lines, row: str) -> None:
    """Accuracy of the clean weights, rounded."""
    weights, styles = _weights(lines, row), _styles(lines, row)
    for arm in ("plain", "sam", "dropout", "ivon", "nvrm"):
        if own := weights.get(arm):
            for by, line in (("row", "-"), ("tensor", "--")):
                mean = np.mean([w["bits"][by] for w in own.values()], axis=0)
                label = {} if by == "row" else {"label": None}
                ax.plot((8, 7, 6, 5, 4, 3, 2), mean, line, **styles[arm] | label)
    title = "Rounded rows (dashed: tensors)"
    ax.set(xlabel="bits per weight (clean weights)", ylabel="accuracy", title=title)
    ax.invert_xaxis()


def _pooled(runs: list[list[list[float]]]) -> tuple[Any, Any]:
    """Mean confidence and accuracy of bins by their order, over runs, weighted by examples."""
    size = max(map(len, runs))
    sums = np.zeros((size, 3))
    for bins in runs:
        for k, (confidence, accuracy, count) in enumerate(bins):
            sums[k + size - len(bins)] += np.array([confidence, accuracy, 1]) * count
    return sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2]
