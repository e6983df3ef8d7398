"""Does b that sets itself do as well as the best b of a grid, which nobody can know?

    python benchmarks/auto.py [--seeds 3] [--problems NAME ...] [--auto] [--table]

One rule with the same constants everywhere, against every b of a grid, chosen with hindsight on the
test set. The rule was made with seed 0, but for its speed (see docs/log.md), so the difference is
also given for the other seeds alone. A run does not know the rule: when that changes, remove the
lines with "auto_b" from the results.
Runs are those of the experiments and recorded with them, in results/cpu.jsonl and
results/paper.jsonl, so that what is there is not done again; the table is in results/auto.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from neuvar import NVRMSGD
from neuvar.engine import Results, sweep
from neuvar.experiments.flips import cifar_run, mnist_run
from neuvar.experiments.permuted import task_run
from neuvar.experiments.runs import Run
from neuvar.models import build

RESULTS = Path(__file__).parents[1] / "results"
MADE_WITH = 0
"""The seed that the rule was made with."""


@dataclass(frozen=True)
class Problem:
    """What is trained, for which b, and what counts."""

    title: str
    run: Callable[..., Run]
    grid: tuple[float, ...]
    scale: str = "cpu"
    metric: str = "test_accuracy"
    auto: str = "nvrm-sgd"

    def runs(self, seeds: int) -> dict[float | str, list[Run]]:
        """Runs for each b of the grid, and for the one that sets itself."""
        found: dict[float | str, list[Run]] = {
            b: [self.run(b, seed) for seed in range(seeds)] for b in self.grid
        }
        alone = {"auto_b": True, "optimizer": self.auto}
        return found | {"auto": [self.run(0.0, seed, **alone) for seed in range(seeds)]}


def permuted(b: float, seed: int, **others: Any) -> Run:
    return task_run("paper", b, seed, **others)


def symmetric(b: float, seed: int, **others: Any) -> Run:
    return mnist_run(b, seed, label_noise="symmetric", noise_rate=0.6, **others)


def normalised(b: float, seed: int, **others: Any) -> Run:
    return mnist_run(b, seed, normalize="channel", **others)


def clean(b: float, seed: int, **others: Any) -> Run:
    return mnist_run(b, seed, label_noise="", noise_rate=0.0, **others)


PROBLEMS = {
    "mnist-pair": Problem("MNIST, pair 40 %", mnist_run, (0.0, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)),
    "mnist-sym": Problem("MNIST, symmetric 60 %", symmetric, (0.0, 0.03, 0.04, 0.05, 0.06, 0.08)),
    "cifar-pair": Problem("CIFAR-10, pair 40 %", cifar_run, (0.0, 0.02, 0.03, 0.04)),
    "permuted": Problem(
        "permuted MNIST, mean of five tasks",
        permuted,
        (0.0, 0.003, 0.01, 0.02, 0.03, 0.05, 0.08),
        "paper",
        "mean_accuracy",
        "nvrm-adam",
    ),
    "mnist-norm": Problem("MNIST, normalised pixels, pair 40 %", normalised, (0.0, 0.03, 0.05)),
    "mnist-clean": Problem("MNIST, clean labels", clean, (0.0, 0.03, 0.05)),
}


def cell(of_seeds: dict[int, float]) -> str:
    """Mean and deviation in per cent."""
    numbers = [100 * number for number in of_seeds.values()]
    spread = f" ± {statistics.stdev(numbers):.1f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.1f}{spread}"


def row(problem: Problem, seeds: int, folder: Path) -> str:
    """The row of a problem: each b, the best of them with hindsight, and auto."""
    lines = Results(folder / f"{problem.scale}.jsonl").lines()
    found = {
        b: {r.seed: lines[r.key]["last"][problem.metric] for r in rs if r.key in lines}
        for b, rs in problem.runs(seeds).items()
    }
    auto, plain = found.pop("auto"), found[0.0]
    if not auto or not plain:
        return f"| {problem.title} | 0 | – | – | – | – | – | – |"
    best = max((b for b in found if found[b]), key=lambda b: statistics.fmean(found[b].values()))
    every = ", ".join(f"{b:g}: {cell(found[b])}" for b in found if found[b])
    gains = {s: 100 * (auto[s] - found[best][s]) for s in auto.keys() & found[best].keys()}
    fresh = [gain for s, gain in gains.items() if s != MADE_WITH]
    cells = (
        problem.title,
        str(len(gains)),
        cell(plain),
        f"{cell(found[best])} at {best:g}",
        cell(auto),
        f"{statistics.fmean(gains.values()):+.1f}",
        f"{statistics.fmean(fresh):+.1f}" if fresh else "–",
        every,
    )
    return f"| {' | '.join(cells)} |"


def cost(rounds: int = 9, steps: int = 40) -> str:
    """Time of training steps with b that sets itself, over that with a fixed b, in turns."""
    said = []
    for name, shape, batch in (("mlp", (1, 28, 28), 128), ("resnet-10", (3, 32, 32), 128)):
        x, y = torch.rand(batch, *shape), torch.arange(batch) % 10
        ways = {}
        for b in (0.03, "auto"):
            model = build(name, classes=10, seed=0, shape=shape)
            ways[b] = model, NVRMSGD(model.parameters(), lr=0.1, momentum=0.9, b=b)
        times: dict[Any, list[float]] = {b: [] for b in ways}
        for _ in range(rounds):
            for b, (model, optimizer) in ways.items():
                began = time.perf_counter()
                for _ in range(steps):
                    optimizer.zero_grad()
                    loss = cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.tell(loss)
                    optimizer.step()
                times[b].append(time.perf_counter() - began)
        ratios = [a / f for a, f in zip(times["auto"], times[0.03], strict=True)]
        said.append(f"{name} {statistics.median(ratios):.3f}")
    return f"Cost of a step, auto over a fixed b, median of {rounds} rounds: {', '.join(said)}."


def told(event: Any) -> None:
    """One line for each start and end."""
    if event.kind != "progress":
        run = event.run
        what = (run.data, getattr(run, "label_noise", "tasks"), f"b {run.b}", f"seed {run.seed}")
        print(event.kind, *what, event.message or "", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--auto", action="store_true", help="leave the grid out")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.table:
        for name in options.problems:
            problem = PROBLEMS[name]
            every = [run for rs in problem.runs(options.seeds).values() for run in rs]
            every = [run for run in every if run.auto_b or not options.auto]
            path = options.results / f"{problem.scale}.jsonl"
            sweep(every, path, workers=options.workers, watch=told)
    columns = (
        "problem",
        "n",
        "plain",
        "best b with hindsight",
        "auto",
        "auto less best",
        "without the seed that the rule was made with",
        "every b",
    )
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    lines += [row(problem, options.seeds, options.results) for problem in PROBLEMS.values()]
    text = "Accuracy in per cent, mean ± deviation.\n\n" + "\n".join(lines) + f"\n\n{cost()}\n"
    (options.results / "auto.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
