"""4b: NVRM enhances elastic weight consolidation. Permuted MNIST with EWC.

There is an experiment for each way to compute the Fisher information, because the paper does not
say which one it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict, interval, judge
from neuvar.experiments.permuted import PAPER_B, SIZE_TEXTS, task_run
from neuvar.experiments.run_spec import Run, Tasks

FISHER_TEXTS = {
    "exact": "It is exact: per-sample gradients, squared, then averaged over the network's own "
    "labels.",
    "squared_batch_mean": "It is the square of each batch's mean gradient, which was common at the "
    "time and is much weaker than the exact one.",
}
STRENGTHS = (30.0, 300.0, 1000.0)
NOISE = (0.0, 0.01, 0.03)
FISHER_IMAGES: dict[Scale, int] = {"smoke": 500, "cpu": 5000, "paper": 5000}
TRIALS: dict[Scale, int] = {"smoke": 1, "cpu": 3, "paper": 10}


def runs(fisher: str, scale: Scale, trials: int = 0) -> list[Run]:
    """Every strength with every b."""
    seeds = range(trials or TRIALS[scale])
    strengths = STRENGTHS[1:2] if scale == "smoke" else STRENGTHS
    noise = NOISE[::2] if scale == "smoke" else NOISE
    ewc = {"penalty": "ewc", "fisher": fisher, "fisher_images": FISHER_IMAGES[scale]}
    return [
        task_run(scale, b, seed, **ewc, strength=strength)
        for seed, strength, b in product(seeds, strengths, noise)
    ]


def settings(results: Sequence[Result]) -> list[query.Setting]:
    """Each strength of the penalty, and the results with it."""
    return [
        ((f"{strength:g}",), query.matching(results, strength=strength))
        for strength in query.values(results, "strength")
    ]


def panels(results: Sequence[Result]) -> list[Panel]:
    """Mean accuracy over the tasks so far, for each strength."""
    return [
        Panel(
            f"λ = {strength}",
            "tasks learned",
            "mean accuracy with EWC",
            query.curves(query.group(trials), "mean_accuracy", "Adam"),
        )
        for (strength,), trials in settings(results)
    ]


def table(results: Sequence[Result]) -> Table:
    """After the last task, with the gain over EWC alone."""

    def gain(trials: Sequence[Result]) -> str:
        run = trials[0].run if trials else None
        if not isinstance(run, Tasks):
            return "–"
        plain = query.group(results, b=0.0, strength=run.strength)
        gains = query.compare("", trials, plain, "mean_accuracy").differences
        if not run.b or len(gains) < 2:
            return "–"
        mean, low, high = (100 * x for x in interval(gains))
        return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"

    columns = {
        "first task": query.last("first_task"),
        "mean of five tasks": query.last("mean_accuracy"),
        "gain in points (95 % interval)": gain,
    }
    rows = query.rows_by_b(settings(results), "Adam", fixed=PAPER_B)
    return query.make_table(("λ", "EWC with"), rows, columns)


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM at the paper's b improves EWC at every strength."""
    cases = [
        query.compare_noise(f"λ = {strength}", trials, "mean_accuracy", fixed=PAPER_B)
        for (strength,), trials in settings(results)
    ]
    return judge("Mean accuracy of five tasks, EWC with NVRM against EWC alone", cases)


def settings_text(fisher: str, scale: Scale) -> str:
    """Describe the training at a scale."""
    return (
        f"As experiment 4a, with EWC: {SIZE_TEXTS[scale]}. The penalty is ½λ Σ F (θ − θ*)² for "
        f"each task, with the diagonal Fisher information of {FISHER_IMAGES[scale]:,} images of "
        f"the task at clean weights. {FISHER_TEXTS[fisher]} The paper does not say which Fisher "
        "information it uses, or for how many images."
    )


EXACT = Experiment(
    name="ewc",
    number="4b",
    title="Permuted MNIST with EWC",
    sentence="NVRM enhances EWC effectively.",
    source="section 4, experiment 4, figure of EWC",
    runs=partial(runs, "exact"),
    settings=partial(settings_text, "exact"),
    panels=panels,
    table=table,
    check=check,
)
BATCH_MEAN = replace(
    EXACT,
    name="ewc-batch-mean",
    number="4b B",
    title="Permuted MNIST with EWC, batch-mean Fisher",
    runs=partial(runs, "squared_batch_mean"),
    settings=partial(settings_text, "squared_batch_mean"),
)
