"""6: Gaussian noise is best, uniform noise least sensitive to b."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Line, Panel, Result, Role, Table, Verdict, decide, gain
from neuvar.experiments.images import GRID, TRIALS, flipped_run, words
from neuvar.experiments.reading import (
    against,
    best,
    by_seed,
    cell,
    chosen,
    flat,
    group,
    number,
    values,
)
from neuvar.experiments.runs import Run
from neuvar.noise import std_from_b

ROLES: dict[str, Role] = {"gaussian": "nvrm", "laplace": "third", "uniform": "fourth"}


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """SGD, and NVRM-SGD with three families of noise for a grid of b."""
    grid = GRID[1:3] if scale == "smoke" else GRID
    found: list[Run] = []
    for seed in range(trials or TRIALS[scale]):
        found.append(flipped_run(scale, 0.0, seed))
        found += [flipped_run(scale, b, seed, noise=noise) for noise in ROLES for b in grid]
    return found


def settings(scale: Scale) -> str:
    """What was run."""
    return (
        f"40 % of the labels are moved to the next class. {words(scale)}The same b means different "
        "standard deviations: b for Gaussian, √2·b for Laplace, b/√3 for uniform noise; so results "
        "are drawn against both."
    )


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy against b, and against the standard deviation."""
    noisy = [r for r in results if r.run.b]
    grid = values(noisy, "b")
    metric, title = "test_accuracy", "test accuracy, last epoch"
    lines = [
        against(group(noisy, noise=noise), "b", grid, metric, noise.capitalize(), role)
        for noise, role in ROLES.items()
    ]
    plain = [r for r in results if not r.run.b]
    deviations = [
        replace(line, x=tuple(std_from_b(line.label.lower(), b) for b in line.x)) for line in lines
    ]
    reach = sorted({x for line in deviations for x in line.x})
    return [
        Panel("Against b", "b", title, (*lines, _level(plain, grid, metric)), log_x=True),
        Panel(
            "Against the standard deviation",
            "standard deviation of the noise",
            title,
            (*deviations, _level(plain, reach, metric)),
            log_x=True,
        ),
    ]


def _level(plain: Sequence[Result], at: Sequence[float], metric: str) -> Line:
    return flat(group(plain), at, metric, "SGD")


def table(results: Sequence[Result]) -> Table:
    """Every family and b."""
    rows = []
    for noise in ROLES:
        of_kind = [r for r in group(results, noise=noise) if r.run.b]
        for b in values(of_kind, "b"):
            found = group(of_kind, b=b)
            mark = " (chosen)" if b == chosen(of_kind, "b") else ""
            rows.append(
                (
                    noise,
                    number(b) + mark,
                    f"{std_from_b(noise, b):.3f}".removeprefix("0"),
                    str(len(found)),
                    cell(found, "test_accuracy"),
                    best(found, "test_accuracy"),
                    cell(found, "memorized"),
                )
            )
    plain = [r for r in group(results) if not r.run.b]
    ends = (
        cell(plain, "test_accuracy"),
        best(plain, "test_accuracy"),
        cell(plain, "memorized"),
    )
    rows.append(("none (SGD)", "–", "–", str(len(plain)), *ends))
    columns = (
        "noise",
        "b",
        "deviation",
        "n",
        "test, last epoch",
        "test, best epoch",
        "memorized, last",
    )
    return Table(columns, tuple(rows))


def check(results: Sequence[Result]) -> Verdict:
    """Whether Gaussian noise, at its chosen b, beats both others at theirs."""
    picked = {}
    for noise in ROLES:
        of_kind = [r for r in group(results, noise=noise) if r.run.b]
        picked[noise] = by_seed(group(of_kind, b=chosen(of_kind, "b")), "test_accuracy")
    outcomes, said = [], []
    for other in ("laplace", "uniform"):
        verdict = decide(gain(picked["gaussian"], picked[other]))
        outcomes.append(verdict.outcome)
        said.append(f"against {other} {verdict.because.rstrip('.')}")
    whole = outcomes[0] if len(set(outcomes)) == 1 else "undecided"
    return Verdict(
        whole,
        "Test accuracy at the last epoch, Gaussian noise at its b chosen on held-out images: "
        f"{'; '.join(said)}. {_sensitivity(results)}",
    )


def _sensitivity(results: Sequence[Result]) -> str:
    """How far the mean test accuracy moves over the grid of b, by family."""
    said = []
    for noise in ROLES:
        of_kind = [r for r in group(results, noise=noise) if r.run.b]
        means = [
            statistics.fmean(r.last("test_accuracy") for r in group(of_kind, b=b))
            for b in values(of_kind, "b")
        ]
        if means:
            said.append(f"{noise} {100 * (max(means) - min(means)):.1f}")
    return f"Points between the best and the worst b of the grid: {', '.join(said)}."


EXPERIMENT = Experiment(
    name="noise-types",
    number="6",
    title="Types of noise",
    sentence="With a proper variability scale b, NVRM Gaussian outperforms NVRM Uniform and NVRM "
    "Laplace by nearly one point, while NVRM Uniform is more robust to the variability scale.",
    source="section 4, experiment 6",
    runs=runs,
    settings=settings,
    panels=panels,
    table=table,
    check=check,
)
