"""4c: NVRM forgets less when classes come one after another. Split MNIST."""

from __future__ import annotations

from collections.abc import Sequence

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict, judge
from neuvar.experiments.permuted import (
    COLUMNS,
    EPOCHS,
    PANELS,
    PAPER_B,
    SIZE_TEXTS,
    TRIALS,
    task_run,
)
from neuvar.experiments.run_spec import Run

NOISE = (0.0, PAPER_B, 0.01, 0.05)


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """Adam and NVRM-Adam, a new one for each task."""
    return [
        task_run(scale, b, seed, stream="split", weight_decay=0.0, keep_optimizer=False)
        for seed in range(trials or TRIALS[scale])
        for b in (NOISE[:2] if scale == "smoke" else NOISE)
    ]


def panels(results: Sequence[Result]) -> list[Panel]:
    """Both accuracies by task."""
    finished = query.group(results)
    return [
        Panel(title, "tasks learned", "test accuracy", query.curves(finished, metric, "Adam"))
        for metric, title in PANELS.items()
    ]


def table(results: Sequence[Result]) -> Table:
    """After the last task, for each b."""
    rows = query.rows_by_b([((), results)], "Adam", fixed=PAPER_B)
    return query.make_table(("method",), rows, COLUMNS)


def check(results: Sequence[Result]) -> Verdict:
    """Whether both accuracies at the paper's b end above Adam's."""
    cases = [
        query.compare_noise(title.lower(), results, metric, fixed=PAPER_B)
        for metric, title in PANELS.items()
    ]
    return judge(f"After five tasks, NVRM-Adam at b = {PAPER_B:g} against Adam", cases)


EXPERIMENT = Experiment(
    name="split",
    number="4c",
    title="Split MNIST",
    sentence="NVRM also enhances robustness to catastrophic forgetting in the setting of … "
    "incremental class learning. … The NVRM curves consistently outperform the counterpart curves.",
    source="appendix, supplementary results",
    runs=runs,
    settings=lambda scale: (
        "Five tasks of two digits each: 0 and 1, 2 and 3, and so on, with a head of two outputs "
        "for each task; the other heads are frozen. "
        f"{SIZE_TEXTS[scale].replace(' per task', '')}, no weight decay, a new optimizer for each "
        f"task, {EPOCHS[scale]} per task. The task is known at test time: this is "
        "task-incremental learning, although the paper calls it incremental class learning."
    ),
    panels=panels,
    table=table,
    check=check,
)
