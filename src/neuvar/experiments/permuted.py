"""4a: NVRM prevents catastrophic forgetting. Permuted MNIST, five tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict, judge
from neuvar.experiments.run_spec import Run, Tasks

PAPER_B = 0.03
GRID = (0.003, 0.01, 0.02, PAPER_B, 0.05, 0.08)
SHOWN = (0.0, PAPER_B, 0.05)
"""The b whose curves are drawn; the others are in the panels against b."""
TRIALS: dict[Scale, int] = {"smoke": 3, "cpu": 3, "paper": 10}
SIZES: dict[Scale, dict[str, Any]] = {
    "smoke": {"data": "mnist-excerpt", "width": 512, "batch": 64, "epochs": 2},
    "cpu": {"data": "mnist", "images": 20_000},
    "paper": {"data": "mnist"},
}
SIZE_TEXTS: dict[Scale, str] = {
    "smoke": "6,000 images of the MNIST excerpt, two hidden layers of 512 units, batch size 64",
    "cpu": "20,000 MNIST images per task instead of 60,000, three trials instead of ten, "
    "784-1024-1024-10, batch size 256",
    "paper": "60,000 MNIST images per task, 784-1024-1024-10, batch size 256, ten trials, as in "
    "the paper",
}
EPOCHS: dict[Scale, str] = {"smoke": "two epochs", "cpu": "one epoch", "paper": "one epoch"}
PANELS = {
    "first_task": "Accuracy on the first task",
    "mean_accuracy": "Mean accuracy on the tasks so far",
}
COLUMNS = {
    "first task": query.last("first_task"),
    "mean of five tasks": query.last("mean_accuracy"),
    "last task": query.last("new_task"),
}


def task_run(scale: Scale, b: float, seed: int, **others: Any) -> Tasks:
    """Train one network on five tasks, with Adam, or with NVRM-Adam if b is not 0."""
    fields: dict[str, Any] = {
        "optimizer": "nvrm-adam" if b else "adam",
        "lr": 1e-3,
        "b": b,
        "batch": 256,
        "weight_decay": 1e-4,
        "keep_optimizer": True,
        "seed": seed,
    }
    return Tasks(**(fields | SIZES[scale] | others))


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """Adam and NVRM-Adam for a grid of b; then both with a new optimizer for each task."""
    seeds, both = range(trials or TRIALS[scale]), (0.0, PAPER_B)
    if scale == "smoke":
        return [task_run(scale, b, seed) for seed in seeds for b in both]
    kept = [task_run(scale, b, seed) for seed in seeds for b in dict.fromkeys((*both, *GRID))]
    new = [task_run(scale, b, seed, keep_optimizer=False) for seed in seeds for b in both]
    return [*kept, *new]


def panels(results: Sequence[Result]) -> list[Panel]:
    """Both accuracies by task, and after the last task against b."""
    kept = query.group(results, keep_optimizer=True)
    shown = [b for b in query.values(kept, "b") if b in SHOWN]
    plots = []
    for metric, title in PANELS.items():
        lines = query.curves(kept, metric, "Adam", shown)
        plots.append(Panel(title, "tasks learned", "test accuracy", lines, overview=True))
    grid = [b for b in query.values(kept, "b") if b]
    if len(grid) > 1:
        titles = ("First task, after five tasks", "Mean of all tasks, after five tasks")
        for metric, title in zip(PANELS, titles, strict=True):
            lines = (
                query.flat(query.group(kept, b=0.0), grid, metric, "Adam"),
                query.against(kept, "b", grid, metric, f"NVRM-Adam{query.ON_AXIS}", "nvrm"),
            )
            plots.append(Panel(title, "b", "test accuracy", lines, log_x=True))
    return plots


def table(results: Sequence[Result]) -> Table:
    """After the last task, for each b."""
    rows = []
    for keep, words in ((True, "kept"), (False, "new for each task")):
        trials = query.matching(results, keep_optimizer=keep)
        for (method,), own in query.rows_by_b([((), trials)], "Adam", fixed=PAPER_B):
            rows.append(((method, words), own))
    return query.make_table(("method", "optimizer"), rows, COLUMNS)


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM-Adam at the paper's b keeps more of the first task, and of all, than Adam."""
    cases = []
    for keep, words in ((True, "one optimizer kept"), (False, "new optimizer for each task")):
        if trials := query.matching(results, keep_optimizer=keep):
            cases += [
                query.compare_noise(f"{words}, {title.lower()}", trials, metric, fixed=PAPER_B)
                for metric, title in PANELS.items()
            ]
    return judge(f"After five tasks, NVRM-Adam at b = {PAPER_B:g} against Adam", cases)


EXPERIMENT = Experiment(
    name="forgetting",
    number="4a",
    title="Permuted MNIST: forgetting",
    sentence="NVRM forgets the knowledge learned from previous task much slower than standard "
    "Empirical Risk Minimization.",
    source="section 4, experiment 4, and figure “NVRM prevents catastrophic forgetting”",
    runs=runs,
    settings=lambda scale: (
        f"Five tasks, each with its own random permutation of the pixels. {SIZE_TEXTS[scale]}. "
        f"Adam and NVRM-Adam, learning rate 0.001, weight decay 0.0001, {EPOCHS[scale]} per task, "
        "channel normalization. One optimizer is kept for all tasks: the paper mentions new "
        f"optimizers for Split MNIST only. {'' if scale == 'smoke' else 'The table has both. '}"
        "Accuracies are at clean weights."
    ),
    panels=panels,
    table=table,
    check=check,
)
