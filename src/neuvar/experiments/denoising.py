"""5: the denoising step is helpful. NVRM against PSGD, which never removes its noise."""

from __future__ import annotations

from collections.abc import Sequence

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict, judge
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

PSGD_GRID = (0.03, 0.1, 0.3, 1.0)
"""The noise of PSGD is added times the learning rate, so it takes larger b to matter."""
NAMES = {"sgd": "SGD", "psgd": "PSGD", "nvrm-sgd": "NVRM-SGD"}


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """SGD, NVRM-SGD and PSGD, the latter two for a grid of b."""
    nvrm, psgd = (GRID[1:2], PSGD_GRID[1:2]) if scale == "smoke" else (GRID, PSGD_GRID)
    found: list[Run] = []
    for seed in range(trials or TRIALS[scale]):
        found += [compared_run(scale, b, seed) for b in (0.0, *nvrm)]
        found += [compared_run(scale, b, seed, optimizer="psgd") for b in psgd]
    return found


def settings(scale: Scale) -> str:
    """What was run."""
    return (
        f"40 % of the labels are moved to the next class. {words(scale)}PSGD adds noise of scale "
        "learning rate times b after each step and never removes it. Where a method has several "
        "b, the one with the best held-out accuracy is compared."
    )


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy, and wrong labels memorized, against b."""
    every = [b for b in values(results, "b") if b]
    found = []
    for metric, title in (
        ("test_accuracy", "test accuracy, last epoch"),
        ("memorized", "wrong labels memorized"),
    ):
        lines = []
        for name, role in (("nvrm-sgd", "nvrm"), ("psgd", "other")):
            trials = group(results, optimizer=name)
            line = against(trials, "b", values(trials, "b"), metric, NAMES[name], role)  # type: ignore[arg-type]
            lines.append(line)
        lines.append(flat(group(results, optimizer="sgd"), every, metric, "SGD"))
        found.append(Panel(title.capitalize(), "b", title, tuple(lines), log_x=True))
    return found


def table(results: Sequence[Result]) -> Table:
    """Every b of every method."""
    rows = []
    for optimizer, name in NAMES.items():
        of_kind = group(results, optimizer=optimizer)
        for b in values(of_kind, "b"):
            found = group(of_kind, b=b)
            mark = " (chosen)" if b and b == chosen(of_kind, "b") else ""
            rows.append(
                (
                    name,
                    (number(b) if b else "–") + mark,
                    str(len(found)),
                    cell(found, "test_accuracy"),
                    best(found, "test_accuracy"),
                    anew(found),
                    cell(found, "memorized"),
                )
            )
    columns = (
        "method",
        "b",
        "n",
        "test, last epoch",
        "test, best epoch",
        BATCHNORM,
        "memorized, last",
    )
    return Table(columns, tuple(rows))


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM, at its chosen b, tests better than PSGD at its own."""
    picked = {name: at_chosen(matching(results, optimizer=name)) for name in NAMES}
    found = judge(
        "Test accuracy at the last epoch, each at the b chosen on held-out images.",
        [compare("NVRM against PSGD", picked["nvrm-sgd"], picked["psgd"], "test_accuracy")],
    )
    also = judge("", [compare("PSGD against SGD", picked["psgd"], picked["sgd"], "test_accuracy")])
    return Verdict(found.outcome, f"{found.because} Beside it,{also.because}")


EXPERIMENT = Experiment(
    name="denoising",
    number="5",
    title="Is denoising needed?",
    sentence="NVRM can still outperform PSGD significantly for learning with noisy labels.",
    source="section 4, experiment 5",
    runs=runs,
    settings=settings,
    panels=panels,
    table=table,
    check=check,
)
