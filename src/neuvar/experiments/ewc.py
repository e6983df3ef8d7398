"""4b: NVRM enhances elastic weight consolidation. Permuted MNIST with EWC."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict, gain, interval, judge
from neuvar.experiments.permuted import WORDS, task_run
from neuvar.experiments.reading import (
    by_seed,
    cell,
    compare,
    curve,
    group,
    label_of_b,
    matching,
    number,
    values,
)
from neuvar.experiments.run_spec import Run

FISHERS = {"exact": "exact Fisher", "squared_batch_mean": "squared batch mean"}
STRENGTHS = (30.0, 300.0, 1000.0)
NOISE = (0.0, 0.01, 0.03)
FISHER_IMAGES = 5000
TRIALS: dict[Scale, int] = {"smoke": 1, "cpu": 3, "paper": 10}


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """Both kinds of Fisher information, every strength, every b."""
    seeds = range(trials or TRIALS[scale])
    strengths = STRENGTHS[1:2] if scale == "smoke" else STRENGTHS
    noise = NOISE[::2] if scale == "smoke" else NOISE
    few: dict[str, Any] = {"fisher_images": 500 if scale == "smoke" else FISHER_IMAGES}
    return [
        task_run(scale, b, seed, penalty="ewc", fisher=fisher, strength=strength, **few)
        for seed, fisher, strength, b in product(seeds, FISHERS, strengths, noise)
    ]


def settings(scale: Scale) -> str:
    """What was run."""
    return (
        f"As experiment 4a, with EWC: {WORDS[scale]}. The penalty is ½λ Σ F (θ − θ*)², one for "
        "each task, with the diagonal Fisher information of "
        f"{500 if scale == 'smoke' else FISHER_IMAGES:,} images of the task at clean weights: "
        "exact (per-sample gradients, squared, then averaged over the network's own labels), or "
        "the square of each batch's mean gradient, which was common at the time and is far weaker. "
        "The paper says neither which Fisher information nor of how many images."
    )


def panels(results: Sequence[Result]) -> list[Panel]:
    """Mean accuracy of the tasks seen, for each Fisher information and strength."""
    found = []
    for fisher, strength in product(FISHERS, values(results, "strength")):
        trials = group(results, fisher=fisher, strength=strength)
        lines = tuple(
            curve(
                group(trials, b=b),
                "mean_accuracy",
                f"EWC with {label_of_b('Adam', b)}",
                "nvrm" if b else "plain",
            )
            for b in values(trials, "b")
        )
        title = f"{FISHERS[fisher]}, λ = {number(strength)}"
        found.append(Panel(title, "tasks learned", "mean test accuracy", lines))
    return found


def table(results: Sequence[Result]) -> Table:
    """After the last task, with the gain over EWC alone, trial by trial."""
    rows = []
    for fisher, strength in product(FISHERS, values(results, "strength")):
        found = group(results, fisher=fisher, strength=strength)
        plain = by_seed(group(found, b=0.0), "mean_accuracy")
        for b in values(found, "b"):
            trials = group(found, b=b)
            gains = gain(by_seed(trials, "mean_accuracy"), plain) if b else ()
            rows.append(
                (
                    FISHERS[fisher],
                    number(strength),
                    label_of_b("Adam", b),
                    str(len(trials)),
                    cell(trials, "first_task"),
                    cell(trials, "mean_accuracy"),
                    _with_interval(gains),
                )
            )
    columns = ("Fisher information", "λ", "with EWC", "n", "first task", "mean of five", "gain")
    return Table(columns, tuple(rows))


def _with_interval(gains: Sequence[float]) -> str:
    if len(gains) < 2:
        return "–"
    mean, low, high = interval(gains)
    return f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM adds to EWC for every Fisher information, strength and b; says for which."""
    cases = []
    for fisher, strength in product(FISHERS, values(results, "strength")):
        found = matching(results, fisher=fisher, strength=strength)
        for b in filter(None, values(found, "b")):
            name = f"{FISHERS[fisher]}, λ = {number(strength)}, b = {number(b)}"
            plain, noisy = matching(found, b=0.0), matching(found, b=b)
            cases.append(compare(name, noisy, plain, "mean_accuracy"))
    alone = [judge("", [case]).outcome for case in cases]
    words = {"true": "gains", "false": "loses", "undecided": "cannot be told from nothing"}
    counted = ", ".join(f"{words[k]} in {alone.count(k)}" for k in words if k in alone)
    return judge(f"Mean of five tasks, EWC with NVRM against EWC alone: {counted} cases.", cases)


EXPERIMENT = Experiment(
    name="ewc",
    number="4b",
    title="Permuted MNIST with EWC",
    sentence="NVRM enhances EWC effectively.",
    source="section 4, experiment 4, figure of EWC",
    runs=runs,
    settings=settings,
    panels=panels,
    table=table,
    check=check,
)
