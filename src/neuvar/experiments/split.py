"""4c: NVRM forgets less when classes come one after another. Split MNIST."""

from __future__ import annotations

from collections.abc import Sequence

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Cell, Panel, Result, Table, Verdict, judge
from neuvar.experiments.permuted import EPOCHS, PANELS, PAPER_B, WORDS, task_run
from neuvar.experiments.reading import cell, compare, curve, group, label_of_b, matching, values
from neuvar.experiments.run_spec import Run

TRIALS: dict[Scale, int] = {"smoke": 3, "cpu": 3, "paper": 10}
NOISE = (0.0, PAPER_B, 0.01, 0.05)


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """Adam and NVRM-Adam, a new one for each task."""
    noise = NOISE[:2] if scale == "smoke" else NOISE
    return [
        task_run(scale, b, seed, stream="split", weight_decay=0.0, keep_optimizer=False)
        for seed in range(trials or TRIALS[scale])
        for b in noise
    ]


def settings(scale: Scale) -> str:
    """What was run."""
    sizes = WORDS[scale].replace(" a task", "").replace("1024-10,", "1024 with five heads of two,")
    sizes = sizes[0].upper() + sizes[1:]
    return (
        "Five tasks of two digits each: 0 and 1, 2 and 3, and so on, with a head for each task; "
        f"the other heads are frozen. {sizes}, no weight decay, a "
        f"new optimizer for each task, {EPOCHS[scale]} a task. The task is known when it is "
        "tested: this is task-incremental learning, though the paper calls it incremental class "
        "learning."
    )


def panels(results: Sequence[Result]) -> list[Panel]:
    """Both accuracies by task."""
    return [
        Panel(
            title,
            "tasks learned",
            "test accuracy",
            tuple(
                curve(group(results, b=b), name, label_of_b("Adam", b), "nvrm" if b else "plain")
                for b in values(results, "b")
            ),
        )
        for name, title in PANELS
    ]


def table(results: Sequence[Result]) -> Table:
    """After the last task, for each b."""
    rows: list[tuple[str | Cell, ...]] = []
    for b in values(results, "b"):
        trials = group(results, b=b)
        metrics = ("first_task", "mean_accuracy", "new_task")
        cells = (cell(trials, metric) for metric in metrics)
        rows.append((label_of_b("Adam", b), str(len(trials)), *cells))
    columns = ("method", "n", "first task", "mean of five", "the task just learned")
    return Table(columns, tuple(rows))


def check(results: Sequence[Result]) -> Verdict:
    """Whether both curves at the paper's b end above Adam's."""
    cases = [
        compare(title.lower(), matching(results, b=PAPER_B), matching(results, b=0.0), metric)
        for metric, title in PANELS
    ]
    return judge("After five tasks, NVRM-Adam at b = .03 against Adam.", cases)


EXPERIMENT = Experiment(
    name="split",
    number="4c",
    title="Split MNIST",
    sentence="NVRM also enhances robustness to catastrophic forgetting in the setting of … "
    "incremental class learning. … The NVRM curves consistently outperform the counterpart curves.",
    source="appendix, supplementary results",
    runs=runs,
    settings=settings,
    panels=panels,
    table=table,
    check=check,
)
