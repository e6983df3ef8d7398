"""5: the denoising step is helpful. NVRM against PSGD, which never removes its noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Role, Table, Verdict, judge
from neuvar.experiments.images import GRID, TRIALS, compared_run, recipe
from neuvar.experiments.run_spec import Run

PSGD_GRID = (0.03, 0.1, 0.3, 1.0)
"""PSGD multiplies its noise by the learning rate, so it needs larger b."""
NAMES = {"sgd": "SGD", "psgd": "PSGD", "nvrm-sgd": "NVRM-SGD"}
ROLES: dict[str, Role] = {"nvrm-sgd": "nvrm", "psgd": "other"}


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """SGD, and NVRM-SGD and PSGD for a grid of b."""
    nvrm, psgd = (GRID[1:2], PSGD_GRID[1:2]) if scale == "smoke" else (GRID, PSGD_GRID)
    methods: list[dict[str, Any]] = [{"b": b} for b in (0.0, *nvrm)]
    methods += [{"b": b, "optimizer": "psgd"} for b in psgd]
    seeds = range(trials or TRIALS[scale])
    return [compared_run(scale, seed=seed, **method) for seed in seeds for method in methods]


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy and memorized wrong labels against b."""
    every = [b for b in query.values(results, "b") if b]
    plain = query.group(results, optimizer="sgd")
    plots = []
    for metric, title in (
        ("test_accuracy", "test accuracy, last epoch"),
        ("memorized", "wrong labels memorized, last epoch"),
    ):
        lines = [query.flat(plain, every, metric, "SGD")]
        for name, role in ROLES.items():
            trials = query.group(results, optimizer=name)
            grid = query.values(trials, "b")
            label = NAMES[name] + query.ON_AXIS
            lines.append(query.against(trials, "b", grid, metric, label, role))
        plots.append(Panel(title.capitalize(), "b", title, tuple(lines), log_x=True))
    return plots


def table(results: Sequence[Result]) -> Table:
    """Every b of every method."""
    rows = []
    for optimizer, name in NAMES.items():
        trials = query.matching(results, optimizer=optimizer)
        for b in query.values(trials, "b"):
            words = (name, f"{b:g}{query.mark(trials, b)}" if b else "–")
            rows.append((words, query.shown(trials, b)))
    return query.make_table(("method", "b"), rows, query.LABEL_COLUMNS)


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM, at its chosen b, tests better than PSGD at its own."""
    sgd, psgd, nvrm = (query.matching(results, optimizer=name) for name in NAMES)
    also = "PSGD against SGD (not part of the claim)"
    return judge(
        "Test accuracy at the last epoch, each method at the b chosen on held-out images",
        [
            query.compare("NVRM against PSGD", nvrm, psgd, "test_accuracy"),
            query.compare(also, psgd, sgd, "test_accuracy", judged=False),
        ],
    )


EXPERIMENT = Experiment(
    name="denoising",
    number="5",
    title="Is denoising needed?",
    sentence="NVRM can still outperform PSGD significantly for learning with noisy labels.",
    source="section 4, experiment 5",
    runs=runs,
    settings=lambda scale: (
        f"40 % of the labels are moved to the next class. {recipe(scale)}PSGD adds noise of scale "
        "learning rate times b after each step and never removes it. Where a method has several "
        "b, the one with the best held-out accuracy is compared."
    ),
    panels=panels,
    table=table,
    check=check,
)
