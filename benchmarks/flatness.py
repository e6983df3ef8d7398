"""How flat are the minima that each way of training finds?

    python benchmarks/flatness.py            # five seeds of each method, about half an hour
    python benchmarks/flatness.py --table    # run nothing, print the table

Networks, data, methods and training are those of ``moved_weights.py``, with the setting that has
the best accuracy on held-out images, without any disturbance. Measured on the training images are
the largest scale of weight noise that raises the loss by at most 0.1, absolute and relative to each
filter. Only the relative one stays the same if a layer is multiplied by ten and the next one
divided by ten. One line per run in results/flatness_methods.jsonl; finished runs are skipped.
``make report`` writes the table into docs/results.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.nn.functional import cross_entropy

from moved_weights import METHODS, Line, arguments, chosen, images, key, run_missing, train
from neuvar import largest_b
from neuvar.engine import Results
from neuvar.engine.job import provenance
from neuvar.measures import generalization_gap
from spread import difference, spread

RESULTS = Path(__file__).parents[1] / "results"
SEEDS, DELTA, DRAWS = 5, 0.1, 16
COMPARED = (
    "Adam",
    "weight decay (AdamW)",
    "dropout",
    "SAM, half the epochs",
    "SAM",
    "IVON",
    "NVRM-Adam",
    "NVRM-Adam, relative to filters",
    "dropout + NVRM-Adam",
)
MEASURES = {
    "b": "largest b",
    "relative_b": "largest b, relative to filters",
    "train": "training accuracy",
    "test": "test accuracy",
}
RELATIVE: dict[str, Any] = {"relative_to": "filter"}


def run_one(run: Line) -> Line:
    began, parts = time.process_time(), images()
    model = train(METHODS[run["method"]], run["setting"], parts["train"], run["seed"])
    about: dict[str, Any] = {"delta": DELTA, "draws": DRAWS, "seed": run["seed"]}
    measured = (model, cross_entropy, parts["train"])
    gap = generalization_gap(*measured, parts["test"])
    assert gap.test_accuracy is not None
    last = {
        "b": largest_b(*measured, resolution=0.02, **about).b,
        "relative_b": largest_b(*measured, resolution=0.02, **about, **RELATIVE).b,
        "test": gap.test_accuracy.mean,
        "train": gap.train_accuracy,
        "train_loss": gap.train_loss,
    }
    line = {"key": key(run), "run": run, "status": "finished", "reason": None, "last": last}
    return line | {"seconds": round(time.process_time() - began, 1)} | provenance("cpu", 1)


def runs(folder: Path) -> list[Line]:
    """All methods with the first seed, then with the second."""
    choices = list(Results(folder / "moved_weights.jsonl").lines().values())
    settings = {name: chosen(choices, name, "clean") for name in COMPARED}
    return [
        {"method": name, "setting": setting, "seed": seed}
        for seed in range(SEEDS)
        for name, setting in settings.items()
    ]


def values(lines: Sequence[Line], name: str, measure: str) -> dict[int, float]:
    own = [line for line in lines if line["run"]["method"] == name]
    return {line["run"]["seed"]: line["last"][measure] for line in own}


def table(folder: Path) -> list[str]:
    """Every measure of every method, and how the methods differ from NVRM-Adam."""
    lines = list(Results(folder / "flatness_methods.jsonl").lines().values())
    rows = [f"| method | gradients | n | {' | '.join(MEASURES.values())} |"]
    rows.append("| --- | ---: |" + " ---: |" * (1 + len(MEASURES)))
    for name in COMPARED:
        numbers = {m: values(lines, name, m).values() for m in MEASURES}
        if n := len(numbers["b"]):
            cells = (
                spread(numbers["b"], 4),
                spread(numbers["relative_b"], 3),
                *(spread(numbers[m], 1, factor=100, unit=" %") for m in ("train", "test")),
            )
            cost = METHODS[name].cost
            rows.append(f"| {name} | {cost:g} × | {n} | {' | '.join(cells)} |")
    rows += ["", "NVRM-Adam minus the others, paired by seed, with 95 % intervals:", ""]
    rows += ["| minus | largest b | largest b, relative to filters |", "| --- | ---: | ---: |"]
    own = {m: values(lines, "NVRM-Adam", m) for m in MEASURES}
    for name in COMPARED:
        found = {m: values(lines, name, m) for m in MEASURES}
        if "NVRM" not in name and found["b"]:
            cells = tuple(
                difference([own[m][s] - x for s, x in found[m].items() if s in own[m]], digits)
                for m, digits in (("b", 4), ("relative_b", 3))
            )
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    options = arguments(__doc__)
    results = Results(options.results / "flatness_methods.jsonl")
    run_missing(results, () if options.table else runs(options.results), run_one)
    print("\n".join(table(options.results)))


if __name__ == "__main__":
    main()
