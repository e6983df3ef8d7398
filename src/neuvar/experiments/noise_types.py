"""6: Gaussian noise is best, uniform noise least sensitive to b."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Case, Line, Panel, Result, Role, Table, Verdict, gain, judge
from neuvar.experiments.images import GRID, TRIALS, compared_run, words
from neuvar.experiments.reading import (
    BATCHNORM,
    against,
    anew,
    at_chosen,
    best,
    cell,
    chosen,
    compare,
    flat,
    group,
    matching,
    number,
    values,
)
from neuvar.experiments.run_spec import Run

ROLES: dict[str, Role] = {"gaussian": "nvrm", "laplace": "third", "uniform": "fourth"}
UNIFORM = (0.08,)
"""Uniform noise has a smaller deviation at the same b, so its grid goes further."""


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """SGD, and NVRM-SGD with three families of noise for a grid of b."""
    grid = GRID[1:3] if scale == "smoke" else GRID
    found: list[Run] = []
    for seed in range(trials or TRIALS[scale]):
        found.append(compared_run(scale, 0.0, seed))
        for noise in ROLES:
            wider = UNIFORM if noise == "uniform" and scale != "smoke" else ()
            found += [compared_run(scale, b, seed, noise=noise) for b in (*grid, *wider)]
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
        replace(line, x=tuple(_deviation(line.label.lower(), b) for b in line.x)) for line in lines
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


def _deviation(noise: str, b: float) -> float:
    from neuvar.noise import std_from_b  # imports torch

    return std_from_b(noise, b)


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
                    f"{_deviation(noise, b):.3f}".removeprefix("0"),
                    str(len(found)),
                    cell(found, "test_accuracy"),
                    best(found, "test_accuracy"),
                    anew(found),
                    cell(found, "memorized"),
                )
            )
    plain = [r for r in group(results) if not r.run.b]
    ends = (
        cell(plain, "test_accuracy"),
        best(plain, "test_accuracy"),
        anew(plain),
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
        BATCHNORM,
        "memorized, last",
    )
    return Table(columns, tuple(rows))


def check(results: Sequence[Result]) -> Verdict:
    """Whether Gaussian noise is best, each at its chosen b, and uniform least sensitive to b."""
    kinds = {noise: [r for r in matching(results, noise=noise) if r.run.b] for noise in ROLES}
    picked = {noise: at_chosen(found) for noise, found in kinds.items()}
    spread = {noise: _spread(found) for noise, found in kinds.items()}
    cases = [
        compare(f"Gaussian against {other}", picked["gaussian"], picked[other], "test_accuracy")
        for other in ("laplace", "uniform")
    ]
    cases += [
        Case(
            f"uniform's range over b smaller than {other}'s", gain(spread[other], spread["uniform"])
        )
        for other in ("gaussian", "laplace")
    ]
    return judge("Test accuracy at the last epoch, b chosen on held-out images.", cases)


def _spread(results: Sequence[Result]) -> dict[int, float]:
    """How far the test accuracy moves over those b that every family has, by seed."""
    found: dict[int, list[float]] = {}
    for result in group(results):
        if result.run.b in GRID:
            found.setdefault(result.run.seed, []).append(result.last("test_accuracy"))
    return {seed: max(x) - min(x) for seed, x in found.items() if len(x) > 1}


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
