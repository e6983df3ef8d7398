"""The tables of ``wrong_labels.py``, made from the lines of its results file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from spread import difference, spread, unbroken
from wrong_labels_plan import (
    ARMS,
    CHOICE_SEEDS,
    ROWS,
    Line,
    NotChosenError,
    Setting,
    belongs,
    chosen,
    is_finished,
)

SIMPLE = ("SGD", "weight decay", "dropout")
"""The baselines that anybody would try first."""
STAGES = {"last": "last epoch", "best": "best held-out epoch"}


def table(results: Path) -> str:
    """All tables as Markdown."""
    parts = [
        ["## Training on wrong labels", "", *accuracy_tables(results)],
        ["## Finding wrong labels", "", *finding_tables(results)],
        ["## Differences between methods", "", *pair_tables(results)],
        ["## Settings tried", "", *choice_table(results)],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def read(results: Path, name: str = "wrong_labels.jsonl") -> list[Line]:
    path = results / name
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def trials(lines: Sequence[Line], name: str) -> dict[str, dict[int, Line]]:
    """Finished reported runs of each arm with its chosen setting, by seed."""
    found: dict[str, dict[int, Line]] = {}
    for arm in ARMS:
        try:
            setting = chosen(lines, name, arm)
        except NotChosenError:
            continue
        found[arm] = {
            line["run"]["seed"]: line
            for line in lines
            if belongs(line, name, arm, setting)
            and line["run"]["seed"] not in CHOICE_SEEDS
            and is_finished(line)
        }
    return {arm: seeds for arm, seeds in found.items() if seeds}


Value = Callable[[Line], float]
Candidate = tuple[str, str]
"""An arm, and what is measured of it: a stage or a score."""


def strongest(
    arms: dict[str, dict[int, Line]], values: dict[str, Value]
) -> tuple[Candidate, dict[int, float]] | None:
    """The simple baseline with the highest mean, over the seeds that all of them have."""
    if any(arm not in arms for arm in SIMPLE):
        return None
    seeds = set.intersection(*(set(arms[arm]) for arm in SIMPLE))
    if not seeds:
        return None
    every = {
        (arm, name): {seed: value(arms[arm][seed]) for seed in seeds}
        for arm in SIMPLE
        for name, value in values.items()
    }
    best = max(every, key=lambda candidate: statistics.fmean(every[candidate].values()))
    return best, every[best]


def gain(values: dict[int, float], other: dict[int, float], *, scale: float = 100) -> str:
    """Difference over the seeds that both have, times ``scale``."""
    both = sorted(values.keys() & other.keys())
    gains = [values[seed] - other[seed] for seed in both]
    return unbroken(difference(gains, 1 if scale == 100 else 3, factor=scale))


def number(values: Sequence[float]) -> str:
    return unbroken(spread(values, 3))


def percent(values: Sequence[float]) -> str:
    return unbroken(spread(values, 1, factor=100, unit=" %"))


NAMES = {"dropout": "p", "b": "b", "weight_decay": "λ", "rho": "ρ", "lr": "lr", "hess_init": "h₀",
         "smoothing": "α", "average": "decay"}  # fmt: skip


def titled(arm: str, setting: Setting) -> str:
    words = ", ".join(f"{NAMES[name]} = {value:g}" for name, value in setting.items())
    return f"{arm}, {words}" if words else arm


def counted(lines: Sequence[Line], name: str, arm: str) -> str:
    """Number of finished runs, beside the planned one while some are missing."""
    setting, planned = chosen(lines, name, arm), ROWS[name].seeds
    runs = [
        line
        for line in lines
        if belongs(line, name, arm, setting) and line["run"]["seed"] not in CHOICE_SEEDS
    ]
    finished = sum(map(is_finished, runs))
    text = str(planned) if finished >= planned else f"{finished} of {planned}"
    diverged = len(runs) - finished
    return unbroken(f"{text}, {diverged} diverged" if diverged else text)


def head(*columns: str, text: int = 1) -> list[str]:
    """Head of a table whose first columns are text."""
    rule = " --- |" * text + " ---: |" * (len(columns) - text)
    return [f"| {' | '.join(columns)} |", f"|{rule}"]


def stage_value(stage: str, measure: str = "test") -> Value:
    return lambda line: line[stage][measure]


def score_value(score: str, measure: str) -> Value:
    return lambda line: line["finding"][score][measure]


def column(seeds: dict[int, Line], value: Value) -> list[float]:
    return [value(line) for line in seeds.values()]


def by_seed(seeds: dict[int, Line], value: Value) -> dict[int, float]:
    return {seed: value(line) for seed, line in seeds.items()}


def each_row(results: Path, rows_of: Callable[[list[Line], str], list[str]]) -> list[str]:
    """One table per row of the plan that has runs, each under its title."""
    lines, parts = read(results), []
    for name, row in ROWS.items():
        if trials(lines, name):
            parts += ["", f"**{row.title}**", "", *rows_of(lines, name)]
    return parts[1:]


def accuracy_tables(results: Path) -> list[str]:
    """Test accuracy and memorized labels of each arm, at the last and the best held-out epoch."""
    return each_row(results, accuracy_table)


def accuracy_table(lines: list[Line], name: str) -> list[str]:
    arms = trials(lines, name)
    base = strongest(arms, {stage: stage_value(stage) for stage in STAGES})
    rows = head(
        "method",
        "gradients",
        "n",
        "test, last epoch",
        "test, best held-out epoch",
        "wrong labels memorized, last epoch",
        "at the best held-out epoch",
        "last epoch minus baseline",
        "best held-out epoch minus baseline",
    )
    for arm, seeds in arms.items():
        cells = [
            titled(arm, chosen(lines, name, arm)),
            f"{ARMS[arm].cost} ×",
            counted(lines, name, arm),
        ]
        for measure in ("test", "memorized"):
            cells += [percent(column(seeds, stage_value(stage, measure))) for stage in STAGES]
        for stage in STAGES:
            values = by_seed(seeds, stage_value(stage))
            cells.append(against(base, (arm, stage), values))
        rows.append(f"| {' | '.join(cells)} |")
    if base is not None:
        arm, stage = base[0]
        fitted = percent(column(arms["SGD"], stage_value("last", "fitted")))
        baseline = (
            f"The baseline is {arm} at the {STAGES[stage]}. Of {', '.join(SIMPLE[:-1])} and "
            f"{SIMPLE[-1]}, it has the highest mean test accuracy. SGD fits {fitted} of the given "
            "training labels at the last epoch."
        )
        return [baseline, "", *rows]
    return rows


PAIRS = (
    ("NVRM-SGD", "weight decay"),
    ("NVRM-SGD", "dropout"),
    ("NVRM-SGD, b = auto", "dropout"),
    ("dropout + NVRM-SGD", "dropout"),
    ("dropout + NVRM-SGD", "NVRM-SGD"),
    ("NVRM-SGD", "SAM, half the epochs"),
    ("NVRM-SGD", "SAM"),
    ("NVRM-SGD", "IVON"),
    ("NVRM-SGD", "label smoothing"),
    ("NVRM-SGD", "average of the weights"),
    ("SAM, half the epochs", "SGD, half the epochs"),
)
"""Comparisons that answer whether noise is better than dropout, and whether both are."""


def pair_tables(results: Path) -> list[str]:
    """Paired differences between two methods: accuracy in points, then the rankings."""
    return each_row(results, pair_table)


def pair_table(lines: list[Line], name: str) -> list[str]:
    arms = trials(lines, name)
    stages = [f"test, {title}" for title in STAGES.values()]
    rows = head("difference", "n", *stages, *MEASURES.values())
    for first, second in PAIRS:
        if not (arms.keys() >= {first, second}):
            continue
        one, two = arms[first], arms[second]
        cells = [f"{first} minus {second}", str(len(one.keys() & two.keys()))]
        for stage in STAGES:
            value = stage_value(stage)
            cells.append(gain(by_seed(one, value), by_seed(two, value)))
        for measure in MEASURES:
            scores = (score_value(best_score(seeds, measure), measure) for seeds in (one, two))
            values = (by_seed(seeds, v) for seeds, v in zip((one, two), scores, strict=True))
            cells.append(gain(*values, scale=1))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def against(
    base: tuple[Candidate, dict[int, float]] | None,
    candidate: Candidate,
    values: dict[int, float],
    *,
    scale: float = 100,
) -> str:
    if base is None:
        return "–"
    return "baseline" if candidate == base[0] else gain(values, base[1], scale=scale)


SCORES = {
    "mean probability": "mean probability over epochs",
    "margin of the mean": "margin of the mean probability",
    "AUM": "AUM",
    "last loss": "loss, last epoch",
    "loss at the best held-out epoch": "loss, best held-out epoch",
}
MEASURES = {"auroc": "AUROC", "average_precision": "average precision"}
CLEANLAB = "cleanlab on five folds of SGD, 5 runs"


def finding_tables(results: Path) -> list[str]:
    """AUROC and average precision of each arm by each score."""
    cleaning = read(results, "cleaning.jsonl")

    def rows_of(lines: list[Line], name: str) -> list[str]:
        return finding_table(lines, name, cleaning)

    return each_row(results, rows_of)


def finding_table(lines: list[Line], name: str, cleaning: Sequence[Line]) -> list[str]:
    arms = trials(lines, name)
    bases = {
        measure: strongest(arms, {score: score_value(score, measure) for score in SCORES})
        for measure in MEASURES
    }
    rows = head(
        "method", "n", *SCORES.values(), *(f"{m} minus baseline" for m in MEASURES.values())
    )
    for arm, seeds in arms.items():
        cells = [titled(arm, chosen(lines, name, arm)), counted(lines, name, arm)]
        for score in SCORES:
            pair = (column(seeds, score_value(score, measure)) for measure in MEASURES)
            cells.append("<br>".join(number(values) for values in pair))
        for measure, base in bases.items():
            score = best_score(seeds, measure)
            values = by_seed(seeds, score_value(score, measure))
            cells.append(against(base, (arm, score), values, scale=1))
        rows.append(f"| {' | '.join(cells)} |")
    if found := from_cleaning(cleaning, name, "cleanlab"):
        pair = ([numbers[measure] for numbers in found.values()] for measure in MEASURES)
        own = "<br>".join(number(values) for values in pair)
        # It ranks by the probability that the label has in a network that has not seen it.
        scores = [own if score == "mean probability" else "" for score in SCORES]
        gains = [
            against(base, (CLEANLAB, ""), {s: v[measure] for s, v in found.items()}, scale=1)
            for measure, base in bases.items()
        ]
        rows.append(f"| {' | '.join([CLEANLAB, str(len(found)), *scores, *gains])} |")
    named: dict[Candidate, list[str]] = {}
    for measure, base in bases.items():
        if base is not None:
            named.setdefault(base[0], []).append(f"the {MEASURES[measure]}")
    baselines = [
        f'The baseline for {" and ".join(measures)} is {arm}, with the score "{SCORES[score]}".'
        for (arm, score), measures in named.items()
    ]
    if baselines:
        baselines += ["Each method is compared by its best score."]
        return [" ".join(baselines), "", *rows]
    return rows


def best_score(seeds: dict[int, Line], measure: str) -> str:
    """The score by which an arm ranks best, so that no arm is judged by a weak one."""
    return max(SCORES, key=lambda s: statistics.fmean(column(seeds, score_value(s, measure))))


def from_cleaning(lines: Sequence[Line], name: str, method: str) -> dict[int, dict[str, float]]:
    """Numbers of a method of ``cleaning.py`` on the same labels, by seed."""
    row = ROWS[name]
    same = {"data": row.data, "label_noise": row.kind, "noise_rate": row.rate, "images": row.images}
    return {
        line["run"]["seed"]: line["last"][method]
        for line in lines
        if line["run"].items() >= same.items() and method in line["last"]
    }


def choice_table(results: Path) -> list[str]:
    """Loss and accuracy on held-out labels of every setting that was tried."""
    lines = read(results)
    columns = ("labels", "method", "held-out loss", "held-out accuracy", "chosen")
    rows = head(*columns, text=2)
    for name, row in ROWS.items():
        for arm, spec in ARMS.items():
            for setting in spec.grid[row.data]:
                found = [
                    line
                    for line in lines
                    if belongs(line, name, arm, setting) and line["run"]["seed"] in CHOICE_SEEDS
                ]
                if found:
                    cells = [row.title, titled(arm, setting), *tried(found)]
                    cells.append("yes" if is_chosen(lines, name, arm, setting) else "no")
                    rows.append(f"| {' | '.join(cells)} |")
    return rows


def tried(lines: Sequence[Line]) -> tuple[str, str]:
    if not all(map(is_finished, lines)):
        return "diverged", "diverged"
    losses, accuracies = (
        [line["last"][measure] for line in lines] for measure in ("held_out_loss", "held_out")
    )
    return number(losses), percent(accuracies)


def is_chosen(lines: Sequence[Line], name: str, arm: str, setting: Setting) -> bool:
    try:
        return chosen(lines, name, arm) == setting
    except NotChosenError:
        return False
