"""What noise is good for: each use, against the best method without noise that costs as much.

``rows`` makes them from the lines of the other benchmarks; ``tools/write_tables.py`` writes the
table into the documents. The baseline is the best of all that were run, on the test set itself,
which favours it. Differences are paired by seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forgetting_methods
import forgetting_table
import moved_weights
import uncertainty
import uncertainty_tables
import wrong_labels_plan
import wrong_labels_tables
from spread import FEW, BySeed, best, difference, interval


@dataclass(frozen=True)
class Use:
    """A comparison: values by seed of the best baseline and of the method with noise."""

    use: str
    measure: str
    baseline: str
    without: BySeed
    method: str
    with_noise: BySeed
    percent: bool = True
    lower_is_better: bool = False

    @property
    def seeds(self) -> list[int]:
        """Seeds that both have."""
        return sorted(self.without.keys() & self.with_noise.keys())

    @property
    def gains(self) -> list[float]:
        """Differences by seed; in points if the measure is a share."""
        factor = 100 if self.percent else 1
        return [factor * (self.with_noise[seed] - self.without[seed]) for seed in self.seeds]

    @property
    def outcome(self) -> str:
        """What the interval says, in words."""
        _, low, high = interval(self.gains)
        if self.lower_is_better:
            low, high = -high, -low
        words = "better" if low > 0 else "worse" if high < 0 else "no difference shown"
        return words if len(self.gains) >= FEW else f"preliminary: {words}"

    def cells(self) -> list[str]:
        return [
            self.measure,
            f"{self.baseline}: {self._mean(self.without)}",
            f"{self.method}: {self._mean(self.with_noise)}",
            difference(self.gains, 1 if self.percent else 3),
            str(len(self.gains)),
            self.outcome,
        ]

    def _mean(self, values: BySeed) -> str:
        mean = statistics.fmean(values[seed] for seed in self.seeds)
        return f"{100 * mean:.1f} %" if self.percent else f"{mean:.3f}"


def moved(results: Path) -> list[Use]:
    """Networks whose weights move."""
    lines, found = read(results / "moved_weights.jsonl"), list[Use]()
    for measure, title in moved_weights.DISTURBANCES.items():
        known = {n: moved_weights.values(lines, n, measure) for n in moved_weights.METHODS}
        equal = {
            n: known[n]
            for n in moved_weights.BASELINES
            if known[n] and moved_weights.METHODS[n].cost <= 1
        }
        noisy = moved_weights.chosen_noise(lines, measure)
        if equal and known[noisy]:
            use, words = "weights that move, MNIST", f"accuracy, {title}"
            found.append(Use(use, words, *best(equal), noisy, known[noisy]))
    return found


NOISY = ("NVRM-SGD", "NVRM-SGD, b = auto", "dropout + NVRM-SGD")


def wrong(results: Path) -> list[Use]:
    """Training on wrong labels, and finding them."""
    lines, found = read(results / "wrong_labels.jsonl"), []
    for name, row in wrong_labels_plan.ROWS.items():
        arms = wrong_labels_tables.trials(lines, name)
        equal = {a: s for a, s in arms.items() if "NVRM" not in a and cost(a) <= 1}
        noisy = {a: s for a, s in arms.items() if a in NOISY}
        if not equal:
            continue
        accuracy: Callable[[Any], float] = lambda line: line["best"]["test"]  # noqa: E731
        rivals = {a: wrong_labels_tables.by_seed(s, accuracy) for a, s in equal.items()}
        ranked = {
            f"{a}, {title}": wrong_labels_tables.by_seed(s, _precision(score))
            for a, s in equal.items()
            for score, title in wrong_labels_tables.SCORES.items()
        }
        for arm, seeds in noisy.items():
            own = wrong_labels_tables.by_seed(seeds, accuracy)
            use = f"training on wrong labels: {row.title}"
            found.append(Use(use, "accuracy, best held-out epoch", *best(rivals), arm, own))
        for arm, seeds in noisy.items():
            own = wrong_labels_tables.by_seed(seeds, _precision("margin of the mean"))
            use = f"finding wrong labels: {row.title}"
            found.append(Use(use, "average precision", *best(ranked), arm, own, percent=False))
    return found


def cost(arm: str) -> float:
    return wrong_labels_plan.ARMS[arm].cost


def _precision(score: str) -> Callable[[Any], float]:
    return lambda line: line["finding"][score]["average_precision"]


def forgetting(results: Path) -> list[Use]:
    """Learning tasks one after the other."""
    lines, found = read(results / "forgetting.jsonl"), list[Use]()
    if not lines:
        return []
    known: dict[str, BySeed] = {}
    for name, method in forgetting_methods.tried(forgetting_methods.METHODS, lines).items():
        setting = forgetting_methods.chosen(method, lines)
        runs = forgetting_table.by_seed(lines, setting, 5)
        known[name] = {seed: run["mean"] for seed, run in runs.items()}
    methods = forgetting_methods.METHODS
    use, measure = "forgetting: five permuted MNIST tasks", "mean accuracy of all tasks"
    simple = {n: v for n, v in known.items() if methods[n].simple and v}
    plain = {n: v for n, v in known.items() if not methods[n].without_noise and v}
    for rivals, names in (
        (simple, ("NVRM-SGD", "NVRM-Adam")),
        (plain, ("NVRM-Adam + EWC", "NVRM-Adam + MAS")),
    ):
        ready = [name for name in names if rivals and known.get(name)]
        found += [Use(use, measure, *best(rivals), name, known[name]) for name in ready]
    return found


def sure(results: Path) -> list[Use]:
    """Predictions averaged over noise."""
    lines, found = read(results / "uncertainty.jsonl"), list[Use]()
    for row in uncertainty.ROWS.values():
        known = uncertainty_tables.reported(lines, row.name)
        for measure in ("log_loss", "calibration_error"):
            values = {
                title: {seed: numbers[measure] for seed, numbers in known[method].items()}
                for method, title in uncertainty_tables.METHODS.items()
                if known[method] and method[0] != "ensemble"  # costs three times as much
            }
            own = values.pop("NVRM, averaged", {})
            rivals = {title: v for title, v in values.items() if "NVRM" not in title}
            if own and rivals:
                use = f"knowing how sure: {row.title}"
                title = uncertainty_tables.PREDICTION_COLUMNS[measure][0]
                made = Use(use, title, *best(rivals, min), "NVRM, averaged", own)
                found.append(replace(made, percent=False, lower_is_better=True))
    return found


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def table(results: Path) -> list[str]:
    """A table of each use, below its name."""
    found = [*moved(results), *wrong(results), *forgetting(results), *sure(results)]
    parts: list[str] = []
    for name in dict.fromkeys(use.use for use in found if use.gains):
        parts += ["", f"**{name[0].upper()}{name[1:]}**", ""]
        parts += rows([use for use in found if use.use == name])
    return parts[1:]


def rows(uses: Sequence[Use]) -> list[str]:
    head = (
        "measure", "best without noise, same cost", "with noise",
        "difference (95 % interval)", "n", "noise is",
    )  # fmt: skip
    made = [f"| {' | '.join(head)} |", "| --- | --- | --- | ---: | ---: | --- |"]
    return made + [f"| {' | '.join(use.cells())} |" for use in uses if use.gains]
