"""Does b that sets itself do as well as the best b of a grid, which nobody can know?

    python benchmarks/auto.py [--problems NAME ...] [--auto] [--table]

One rule with the same constants everywhere, against every b of a grid, chosen with hindsight on the
test set. Seeds 0 to 2 were looked at when the rule was made, so that rule, plain training and the
best b of the grid have as many new seeds, for which the difference is given by itself. A run does
not know the rule: when that changes, remove the lines with "auto_b": true from the results.
Runs are those of the experiments and recorded with them, in results/cpu.jsonl and
results/paper.jsonl, so that what is there is not done again; the table is in results/auto.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from neuvar import NVRMSGD
from neuvar.engine import Results, sweep
from neuvar.experiments.flips import CIFAR, MNIST
from neuvar.experiments.images import flipped_run
from neuvar.experiments.permuted import task_run
from neuvar.experiments.run_spec import Run
from neuvar.models import build
from spread import spread

RESULTS = Path(__file__).parents[1] / "results"
KNOWN = range(3)
"""Seeds that were looked at when the rule was made."""
NEW = range(3, 6)


@dataclass(frozen=True)
class Problem:
    """What is trained, for which b, and what counts."""

    title: str
    run: Callable[..., Run]
    grid: tuple[float, ...]
    scale: str = "cpu"
    metric: str = "test_accuracy"
    auto: str = "nvrm-sgd"

    def run_of(self, b: float | str, seed: int) -> Run:
        """With a b of the grid, or with the one that sets itself."""
        if b == "auto":
            return self.run(0.0, seed, auto_b=True, optimizer=self.auto)
        return self.run(b, seed)

    def measured(self, folder: Path) -> dict[float | str, dict[int, float]]:
        """What is known: b, seed, number."""
        lines = Results(folder / f"{self.scale}.jsonl").lines()
        runs = {b: [self.run_of(b, s) for s in (*KNOWN, *NEW)] for b in (*self.grid, "auto")}
        return {
            b: {run.seed: lines[run.key]["last"][self.metric] for run in of_b if run.key in lines}
            for b, of_b in runs.items()
        }

    def best(self, folder: Path) -> float:
        """The b of the grid that is best for the known seeds."""
        found = self.measured(folder)
        known = {b: [found[b][s] for s in KNOWN if s in found[b]] for b in self.grid}
        return max((b for b in known if known[b]), key=lambda b: statistics.fmean(known[b]))


def permuted(b: float, seed: int, **others: Any) -> Run:
    return task_run("paper", b, seed, **others)


def cifar_run(b: float, seed: int, **others: Any) -> Run:
    return flipped_run("cpu", b, seed, **(CIFAR | others))


def mnist_run(b: float, seed: int, **others: Any) -> Run:
    return flipped_run("cpu", b, seed, **(MNIST | others))


def symmetric(b: float, seed: int, **others: Any) -> Run:
    return mnist_run(b, seed, label_noise="symmetric", noise_rate=0.6, **others)


def normalized(b: float, seed: int, **others: Any) -> Run:
    return mnist_run(b, seed, normalize="channel", **others)


def clean(b: float, seed: int, **others: Any) -> Run:
    return mnist_run(b, seed, label_noise="", noise_rate=0.0, **others)


PROBLEMS = {
    "mnist-pair": Problem(
        "MNIST, 40 % pair flips", mnist_run, (0.0, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)
    ),
    "mnist-sym": Problem(
        "MNIST, 60 % symmetric flips", symmetric, (0.0, 0.03, 0.04, 0.05, 0.06, 0.08)
    ),
    "cifar-pair": Problem("CIFAR-10, 40 % pair flips", cifar_run, (0.0, 0.02, 0.03, 0.04)),
    "permuted": Problem(
        "permuted MNIST, mean of five tasks",
        permuted,
        (0.0, 0.003, 0.01, 0.02, 0.03, 0.05, 0.08),
        "paper",
        "mean_accuracy",
        "nvrm-adam",
    ),
    "mnist-norm": Problem(
        "MNIST, normalized pixels, 40 % pair flips", normalized, (0.0, 0.03, 0.05)
    ),
    "mnist-clean": Problem("MNIST, clean labels", clean, (0.0, 0.03, 0.05)),
}


def cell(of_seeds: dict[int, float]) -> str:
    """Mean and deviation in percent."""
    return spread(of_seeds.values(), 1, factor=100)


def table(folder: Path) -> list[str]:
    """A row per problem."""
    columns = ("problem", "n", "plain", "best b", "auto", "auto − best b", "new seeds only")
    head = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    return head + [row(problem, folder) for problem in PROBLEMS.values()]


def row(problem: Problem, folder: Path) -> str:
    """The row of a problem: plain, the best b of the grid with hindsight, and auto."""
    accuracies = problem.measured(folder)
    auto, plain = accuracies.pop("auto"), accuracies[0.0]
    if not auto or not plain:
        return f"| {problem.title} | 0 | – | – | – | – | – |"
    best = problem.best(folder)
    fixed = accuracies[best]
    gains = {s: 100 * (auto[s] - fixed[s]) for s in auto.keys() & fixed.keys()}
    cells = (
        problem.title,
        str(len(gains)),
        cell({s: plain[s] for s in gains if s in plain}),
        f"{cell({s: fixed[s] for s in gains})} at {best:g}",
        cell({s: auto[s] for s in gains}),
        mean_gain(gains.values()),
        mean_gain([gains[s] for s in NEW if s in gains]),
    )
    return f"| {' | '.join(cells)} |"


def grid_of(problem: Problem, folder: Path) -> str:
    """Every b of a problem's grid, for the known seeds."""
    accuracies = problem.measured(folder)
    known = {b: {s: accuracies[b][s] for s in KNOWN if s in accuracies[b]} for b in problem.grid}
    return f"- {problem.title}: " + ", ".join(f"{b:g}: {cell(known[b])}" for b in known)


def mean_gain(gains: Collection[float]) -> str:
    """Mean of differences in points, with its standard error."""
    if len(gains) < 2:
        return "–"
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    return f"{statistics.fmean(gains):+.1f} ± {error:.1f}"


def cost(rounds: int = 9, steps: int = 40) -> str:
    """Time of training steps with b that sets itself, over that with a fixed b, in turns."""
    said = []
    for name, shape, batch in (("mlp", (1, 28, 28), 128), ("resnet-10", (3, 32, 32), 128)):
        x, y = torch.rand(batch, *shape), torch.arange(batch) % 10
        ways = {}
        for b in (0.03, "auto"):
            model = build(name, classes=10, seed=0, shape=shape)
            ways[b] = model, NVRMSGD(model, lr=0.1, momentum=0.9, b=b)
        times: dict[Any, list[float]] = {b: [] for b in ways}
        for _ in range(rounds):
            for b, (model, optimizer) in ways.items():
                began = time.perf_counter()
                for _ in range(steps):
                    optimizer.zero_grad()
                    loss = cross_entropy(model(x), y)
                    optimizer.report_loss(loss)
                    loss.backward()
                    optimizer.step()
                times[b].append(time.perf_counter() - began)
        ratios = [a / f for a, f in zip(times["auto"], times[0.03], strict=True)]
        said.append(f"{name} {statistics.median(ratios):.3f}")
    return f"Time of a step relative to a fixed b, median of {rounds} rounds: {', '.join(said)}."


def print_event(event: Any) -> None:
    """One line for each start and end."""
    if event.kind != "progress":
        run = event.run
        what = (run.data, getattr(run, "label_noise", "tasks"), f"b {run.b}", f"seed {run.seed}")
        print(event.kind, *what, event.message or "", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--auto", action="store_true", help="leave the grid out")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in () if options.table else options.problems:
        problem = PROBLEMS[name]
        path = options.results / f"{problem.scale}.jsonl"
        grid = () if options.auto else problem.grid
        known = [problem.run_of(b, seed) for b in (*grid, "auto") for seed in KNOWN]
        sweep(known, path, workers=options.workers, watch=print_event)
        ways = {0.0, problem.best(options.results), "auto"}
        new = [problem.run_of(b, seed) for b in ways for seed in NEW]
        sweep(new, path, workers=options.workers, watch=print_event)
    said = "Test accuracy in %: mean ± standard deviation; differences: mean ± standard error."
    grids = "\n".join(grid_of(problem, options.results) for problem in PROBLEMS.values())
    lines, path = "\n".join(table(options.results)), options.results / "auto.md"
    # Times are not in the lines: without runs, the last measured ones are kept.
    time_of_step = path.read_text().splitlines()[-1] if options.table else cost()
    text = f"{said}\n\n{lines}\n\nEvery b:\n\n{grids}\n\n{time_of_step}\n"
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
