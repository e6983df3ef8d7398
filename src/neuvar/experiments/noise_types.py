"""6: Gaussian noise is best, uniform noise least sensitive to b."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Case, Panel, Result, Role, Table, Verdict, gain, judge
from neuvar.experiments.images import GRID, TRIALS, compared_run, recipe
from neuvar.experiments.run_spec import Run

ROLES: dict[str, Role] = {"gaussian": "nvrm", "laplace": "third", "uniform": "fourth"}
CHANCE = 0.1
"""Accuracy of guessing one of ten classes."""
LEARNED = 0.15
"""Below this accuracy at every b, a small range is not robustness: the network learned nothing."""
UNIFORM = (0.08,)
"""Uniform noise has a smaller standard deviation at the same b, so it gets a larger b too."""


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """SGD, and NVRM-SGD with three families of noise for a grid of b."""
    grid = GRID[1:3] if scale == "smoke" else GRID
    specs: list[Run] = []
    for seed in range(trials or TRIALS[scale]):
        specs.append(compared_run(scale, 0.0, seed))
        for noise in ROLES:
            wider = UNIFORM if noise == "uniform" and scale != "smoke" else ()
            specs += [compared_run(scale, b, seed, noise=noise) for b in (*grid, *wider)]
    return specs


def noisy_results(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each family of noise."""
    noisy = query.with_noise(results)
    return {noise: query.matching(noisy, noise=noise) for noise in ROLES}


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy against b, and against the standard deviation."""
    metric, y_label = "test_accuracy", "test accuracy, last epoch"
    by_b, by_deviation = [], []
    for noise, trials in noisy_results(results).items():
        name = f"NVRM-SGD, {noise.capitalize() if noise != 'uniform' else noise} noise"
        line = query.against(trials, "b", query.values(trials, "b"), metric, name, ROLES[noise])
        by_b.append(line)
        by_deviation.append(replace(line, x=tuple(_deviation(noise, b) for b in line.x)))
    plots = []
    for title, x_label, lines in (
        ("Against b", "b", by_b),
        ("Against the standard deviation", "standard deviation of the noise", by_deviation),
    ):
        every = [x for line in lines for x in line.x]
        plain = query.flat(query.group(results, b=0.0), every, metric, "SGD")
        plots.append(Panel(title, x_label, y_label, (plain, *lines), log_x=True))
    return plots


def _deviation(noise: str, b: float) -> float:
    from neuvar.noise import std_from_b  # imports torch

    return std_from_b(noise, b)


def table(results: Sequence[Result]) -> Table:
    """Every family and b."""
    rows = [(("none (SGD)", "–", "–"), query.group(results, b=0.0))]
    for noise, trials in noisy_results(results).items():
        for b in query.values(trials, "b"):
            words = (noise, f"{b:g}{query.mark(trials, b)}", f"{_deviation(noise, b):.3f}")
            rows.append((words, query.shown(trials, b)))
    return query.make_table(("noise", "b", "standard deviation"), rows, query.LABEL_COLUMNS)


def check(results: Sequence[Result]) -> Verdict:
    """Whether Gaussian noise is best, each at its chosen b, and uniform least sensitive to b."""
    gaussian, laplace, uniform = kinds = list(noisy_results(results).values())
    grid = [b for b in GRID if any(query.matching(kind, b=b) for kind in kinds)]
    cases = [
        query.compare("Gaussian against Laplace", gaussian, laplace, "test_accuracy"),
        query.compare("Gaussian against uniform", gaussian, uniform, "test_accuracy"),
    ]
    for name, other in (("Gaussian", gaussian), ("Laplace", laplace)):
        lost = sum(not r.finished and r.run.b in GRID for r in (*uniform, *other))
        gains = gain(_spread(other, grid), _spread(uniform, grid))
        lost += sum(not math.isfinite(x) for x in gains)
        gains = tuple(x for x in gains if math.isfinite(x))
        cases.append(Case(f"range over b, uniform against {name}", gains, lost, lower=True))
    return judge("Test accuracy at the last epoch, at the b chosen on held-out images", cases)


def _spread(results: Sequence[Result], grid: Sequence[float]) -> dict[int, float]:
    """The range of the test accuracy over b, by seed, for the seeds that have every b.

    A run that diverged has the accuracy of chance. NaN where no b learned anything, or where an
    accuracy is missing.
    """
    scores: dict[int, list[float]] = {}
    for result in results:
        if result.run.b in grid and not result.for_choice:
            score = result.last("test_accuracy") if result.finished else CHANCE
            scores.setdefault(result.run.seed, []).append(score)
    whole = {seed: x for seed, x in scores.items() if len(x) == len(grid) > 1}
    learned = {s: math.isfinite(sum(x)) and max(x) > LEARNED for s, x in whole.items()}
    return {s: max(x) - min(x) if learned[s] else math.nan for s, x in whole.items()}


EXPERIMENT = Experiment(
    name="noise-types",
    number="6",
    title="Types of noise",
    sentence="With a proper variability scale b, NVRM Gaussian outperforms NVRM Uniform and NVRM "
    "Laplace by nearly one point, while NVRM Uniform is more robust to the variability scale.",
    source="section 4, experiment 6",
    runs=runs,
    settings=lambda scale: (
        f"40 % of the labels are moved to the next class. {recipe(scale)}The same b means "
        "different standard deviations: b for Gaussian, √2·b for Laplace, b/√3 for uniform noise. "
        "The figure shows both."
    ),
    panels=panels,
    table=table,
    check=check,
)
