"""6: Gaussian noise is best, uniform noise least sensitive to b."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Case, Panel, Result, Role, Table, Verdict, gain, judge
from neuvar.experiments.images import GRID, TRIALS, compared_run, recipe
from neuvar.experiments.run_spec import Run

ROLES: dict[str, Role] = {"gaussian": "nvrm", "laplace": "third", "uniform": "fourth"}
UNIFORM = (0.08,)
"""Uniform noise has a smaller standard deviation at the same b, so it gets a larger b too."""


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """SGD, and NVRM-SGD with three families of noise for a grid of b."""
    grid = GRID[1:3] if scale == "smoke" else GRID
    made: list[Run] = []
    for seed in range(trials or TRIALS[scale]):
        made.append(compared_run(scale, 0.0, seed))
        for noise in ROLES:
            wider = UNIFORM if noise == "uniform" and scale != "smoke" else ()
            made += [compared_run(scale, b, seed, noise=noise) for b in (*grid, *wider)]
    return made


def noisy_results(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each family of noise."""
    return {noise: [r for r in query.matching(results, noise=noise) if r.run.b] for noise in ROLES}


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy against b, and against the standard deviation."""
    metric, y_label = "test_accuracy", "test accuracy, last epoch"
    by_b, by_deviation = [], []
    for noise, trials in noisy_results(results).items():
        name = f"NVRM-SGD, {noise.capitalize() if noise != 'uniform' else noise} noise"
        line = query.against(trials, "b", query.values(trials, "b"), metric, name, ROLES[noise])
        by_b.append(line)
        by_deviation.append(replace(line, x=tuple(_deviation(noise, b) for b in line.x)))
    made = []
    for title, x_label, lines in (
        ("Against b", "b", by_b),
        ("Against the standard deviation", "standard deviation of the noise", by_deviation),
    ):
        every = [x for line in lines for x in line.x]
        plain = query.flat(query.group(results, b=0.0), every, metric, "SGD")
        made.append(Panel(title, x_label, y_label, (plain, *lines), log_x=True))
    return made


def _deviation(noise: str, b: float) -> float:
    from neuvar.noise import std_from_b  # imports torch

    return std_from_b(noise, b)


def table(results: Sequence[Result]) -> Table:
    """Every family and b."""
    rows = [(("none (SGD)", "–", "–"), query.group(results, b=0.0))]
    for noise, trials in noisy_results(results).items():
        finished = query.group(trials)
        for b in query.values(finished, "b"):
            mark = " (chosen)" if b == query.chosen(finished, "b") else ""
            words = (noise, f"{b:g}{mark}", f"{_deviation(noise, b):.3f}")
            rows.append((words, query.group(finished, b=b)))
    return query.make_table(("noise", "b", "standard deviation"), rows, query.LABEL_COLUMNS)


def check(results: Sequence[Result]) -> Verdict:
    """Whether Gaussian noise is best, each at its chosen b, and uniform least sensitive to b."""
    kinds = noisy_results(results)
    gaussian, laplace, uniform = map(query.at_chosen, kinds.values())
    spread_of_gaussian, spread_of_laplace, spread_of_uniform = map(_spread, kinds.values())
    name = "range over b, uniform against"
    cases = [
        query.compare("Gaussian against Laplace", gaussian, laplace, "test_accuracy"),
        query.compare("Gaussian against uniform", gaussian, uniform, "test_accuracy"),
        Case(f"{name} Gaussian", gain(spread_of_gaussian, spread_of_uniform), lower=True),
        Case(f"{name} Laplace", gain(spread_of_laplace, spread_of_uniform), lower=True),
    ]
    return judge("Test accuracy at the last epoch, at the b chosen on held-out images", cases)


def _spread(results: Sequence[Result]) -> dict[int, float]:
    """The range of the test accuracy over those b that every family has, by seed."""
    scores: dict[int, list[float]] = {}
    for result in query.group(results):
        if result.run.b in GRID:
            scores.setdefault(result.run.seed, []).append(result.last("test_accuracy"))
    return {seed: max(x) - min(x) for seed, x in scores.items() if len(x) > 1}


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
