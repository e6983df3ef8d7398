"""4a: NVRM prevents catastrophic forgetting. Permuted MNIST, five tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict, judge
from neuvar.experiments.reading import (
    against,
    cell,
    compare,
    curve,
    flat,
    group,
    label_of_b,
    matching,
    values,
)
from neuvar.experiments.run_spec import Run, Tasks

PAPER_B = 0.03
GRID = (0.003, 0.01, 0.02, PAPER_B, 0.05, 0.08)
TRIALS: dict[Scale, int] = {"smoke": 3, "cpu": 3, "paper": 10}
SIZES: dict[Scale, dict[str, Any]] = {
    "smoke": {"data": "mnist-excerpt", "width": 512, "batch": 64, "epochs": 2},
    "cpu": {"data": "mnist", "images": 20_000},
    "paper": {"data": "mnist"},
}
WORDS: dict[Scale, str] = {
    "smoke": "6,000 images of the MNIST excerpt, two hidden layers of 512 units, batch 64",
    "cpu": "20,000 MNIST images a task instead of 60,000, three trials instead of ten; "
    "784-1024-1024-10, batch 256",
    "paper": "the paper's: 60,000 MNIST images a task, 784-1024-1024-10, batch 256, ten trials",
}
EPOCHS: dict[Scale, str] = {"smoke": "two epochs", "cpu": "one epoch", "paper": "one epoch"}
PANELS = (
    ("first_task", "Accuracy of the first task"),
    ("mean_accuracy", "Mean accuracy of the tasks seen"),
)


def task_run(scale: Scale, b: float, seed: int, **others: Any) -> Tasks:
    """One network on its way through five tasks; with Adam, or with NVRM-Adam if b is not 0."""
    what: dict[str, Any] = {
        "optimizer": "nvrm-adam" if b else "adam",
        "lr": 1e-3,
        "b": b,
        "batch": 256,
        "weight_decay": 1e-4,
        "keep_optimizer": True,
        "seed": seed,
    }
    return Tasks(**(what | SIZES[scale] | others))


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """Adam and NVRM-Adam for a grid of b; then both with a new optimizer for each task."""
    seeds = range(trials or TRIALS[scale])
    if scale == "smoke":
        return [task_run(scale, b, seed) for seed in seeds for b in (0.0, PAPER_B)]
    grid = tuple(dict.fromkeys((0.0, PAPER_B, *GRID)))
    kept = [task_run(scale, b, seed) for seed in seeds for b in grid]
    anew = [
        task_run(scale, b, seed, keep_optimizer=False) for seed in seeds for b in (0.0, PAPER_B)
    ]
    return [*kept, *anew]


def settings(scale: Scale) -> str:
    """What was run."""
    sentence = WORDS[scale][0].upper() + WORDS[scale][1:]
    return (
        f"Five tasks, each with a random permutation of the pixels of its own. {sentence}. "
        f"Adam against NVRM-Adam, learning rate .001, weight decay .0001, {EPOCHS[scale]} a task, "
        "channel normalisation. One optimizer goes through all tasks: the paper speaks of new "
        "optimizers for Split MNIST only; both are in the table. Accuracies at clean weights."
    )


def panels(results: Sequence[Result]) -> list[Panel]:
    """Both accuracies by task, and after the last task against b."""
    kept = group(results, keep_optimizer=True)
    shown = [b for b in values(kept, "b") if b in (0.0, 0.01, PAPER_B, 0.05)]
    found = [
        Panel(
            title,
            "tasks learned",
            "test accuracy",
            tuple(
                curve(group(kept, b=b), name, label_of_b("Adam", b), "nvrm" if b else "plain")
                for b in shown
            ),
        )
        for name, title in PANELS
    ]
    grid = [b for b in values(kept, "b") if b]
    if len(grid) > 1:
        found += [
            Panel(
                f"{title}, after five tasks" if name == "first_task" else "Mean of all five tasks",
                "b",
                "test accuracy",
                (
                    against(kept, "b", grid, name, "NVRM-Adam", "nvrm"),
                    flat(group(kept, b=0.0), grid, name, "Adam"),
                ),
                log_x=True,
            )
            for name, title in PANELS
        ]
    return found


def table(results: Sequence[Result]) -> Table:
    """After the last task, for each b."""
    rows = []
    for keep, words in ((True, "kept"), (False, "new for each task")):
        found = group(results, keep_optimizer=keep)
        for b in values(found, "b"):
            trials = group(found, b=b)
            rows.append(
                (
                    label_of_b("Adam", b),
                    words,
                    str(len(trials)),
                    cell(trials, "first_task"),
                    cell(trials, "mean_accuracy"),
                    cell(trials, "new_task"),
                )
            )
    return Table(
        ("method", "optimizer", "n", "first task", "mean of five", "the task just learned"),
        tuple(rows),
    )


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM-Adam at the paper's b keeps more of the first task, and of all, than Adam."""
    cases = [
        compare(
            f"{words}, {title.lower()}",
            matching(results, keep_optimizer=keep, b=PAPER_B),
            matching(results, keep_optimizer=keep, b=0.0),
            metric,
        )
        for keep, words in ((True, "optimizer kept"), (False, "new for each task"))
        for metric, title in PANELS
    ]
    return judge("After five tasks, NVRM-Adam at b = .03 against Adam.", cases)


EXPERIMENT = Experiment(
    name="forgetting",
    number="4a",
    title="Permuted MNIST: forgetting",
    sentence="NVRM forgets the knowledge learned from previous task much slower than standard "
    "Empirical Risk Minimization.",
    source="section 4, experiment 4, and figure “NVRM prevents catastrophic forgetting”",
    runs=runs,
    settings=settings,
    panels=panels,
    table=table,
    check=check,
)
