"""Two experiments of tiny runs, and a command line that knows no others."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from dataclasses import replace

from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import Experiment
from neuvar.experiments.findings import Cell, Line, Panel, Table, Verdict
from neuvar.experiments.run_spec import Tasks, Training

TINY = Training(data="mnist-excerpt", images=200, test_images=100, width=8, batch=50)
TRIALS = {"smoke": 2, "cpu": 3, "paper": 10}


def labels(scale, trials):
    """A plain and a noisy method for each trial, as an experiment lists them: one after another."""
    seeds = range(trials or TRIALS[scale])
    tiny = replace(TINY, label_noise="pair", noise_rate=0.4)
    methods = [{"optimizer": "sgd"}, {"optimizer": "nvrm-sgd", "b": 0.05}]
    return [replace(tiny, **what, seed=s, label_seed=s) for what in methods for s in seeds]


def tasks(scale, trials):
    """Runs of several tasks, and one that the other experiment has as well."""
    seeds = range(trials or TRIALS[scale])
    tiny = Tasks(data="mnist-excerpt", images=100, test_images=50, width=8, tasks=2, lr=0.01)
    return [*(replace(tiny, seed=s) for s in seeds), labels(scale, trials)[0]]


def experiment(name, number, runs, settings="tiny"):
    """An experiment that shows the last test accuracy."""

    def accuracy(results, optimizer):
        found = [r for r in results if r.run.optimizer == optimizer and r.finished]
        return Cell(tuple(float(r.line["last"].get("test_accuracy", 0)) for r in found))

    def table(results):
        rows = [(o, accuracy(results, o)) for o in ("sgd", "nvrm-sgd")]
        return Table(("method", "test", "n"), tuple((o, c, str(len(c.trials))) for o, c in rows))

    def panels(results):
        curves = tuple(tuple(r.line["curves"].get("test_accuracy", ())) for r in results)
        return [Panel("accuracy", "epoch", "test accuracy", (Line("all", (1.0,), curves),))]

    return Experiment(
        name=name,
        number=number,
        title=f"The title of {name}",
        sentence=f"The claim of {name}.",
        source="section 9",
        runs=runs,
        settings=lambda scale: f"{settings} {scale} networks",
        panels=panels,
        table=table,
        check=lambda results: Verdict("undecided", f"{len(results)} results say little."),
    )


def slow(scale, trials):
    """A tiny run, and one that lasts until it is stopped."""
    return [TINY, replace(TINY, epochs=100_000, seed=1)]


MADE = {
    "labels": experiment("labels", "8", labels),
    "tasks": experiment("tasks", "9", tasks),
    "slow": experiment("slow", "10", slow),
    "forgetting": experiment("forgetting", "4a", tasks),
    "pair-flips": experiment("pair-flips", "3", labels),
}


@contextmanager
def alone():
    """Let these be the only experiments for a while."""
    before = dict(EXPERIMENTS)
    EXPERIMENTS.clear()
    EXPERIMENTS.update(MADE)
    try:
        yield
    finally:
        EXPERIMENTS.clear()
        EXPERIMENTS.update(before)


if __name__ == "__main__":
    from neuvar.cli import main

    # Whoever runs the tests in the background may ignore interrupts, and so would this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with alone():
        sys.exit(main())
