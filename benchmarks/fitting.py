"""What does our training loop cost? Experiment 4a through it, beside the same loop by hand.

    python benchmarks/fitting.py [--rounds 5] [--tasks 5]

Permuted MNIST as in the paper: 784-1024-1024-10, batch 256, one epoch a task, one optimizer for all
tasks, accuracy of all tasks seen after each. By hand: plain PyTorch, every task's images as
normalized floats in memory. The same optimizer, weights and batches in both, which end with the
same weights to the bit; both take turns, and the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from neuvar.continual import permuted_tasks
from neuvar.data import Batches, load, normalization
from neuvar.experiments import run_one
from neuvar.experiments.permuted import task_run
from neuvar.experiments.run_spec import Tasks
from neuvar.models import mlp
from neuvar.train import make_optimizer


def in_memory(run: Tasks) -> list[Any]:
    """Normalised floats of every task, and the order in which each is trained on."""
    data = load(run.data)
    normalize = normalization(data.train.images)
    tasks = []
    for task in permuted_tasks(data, run.tasks, seed=run.seed):
        train, test = task.train, task.test
        seed = run.seed * 1000 + task.number
        order = Batches(train, run.batch, seed=seed).order(0)
        whole = [
            next(Batches(s, len(s), shuffle=False, normalize=normalize).epoch(0))[0].flatten(1)
            for s in (train, test)
        ]
        tasks.append((whole[0], train.labels, order, whole[1], test.labels))
    return tasks


def by_hand(run: Tasks, tasks: list[Any]) -> list[list[float]]:
    model = mlp(seed=run.seed)
    optimizer: Any = make_optimizer(
        run.optimizer,
        model,
        lr=run.lr,
        weight_decay=run.weight_decay,
        b=run.b,
        seed=run.seed,
    )
    found = []
    for number, (inputs, labels, order, _, _) in enumerate(tasks):
        model.train()
        for index in order.split(run.batch):
            optimizer.zero_grad()
            cross_entropy(model(inputs[index]), labels[index]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(
                [
                    float(
                        torch.cat([model(x).argmax(1) for x in test.split(500)])
                        .eq(right)
                        .double()
                        .mean()
                    )
                    for _, _, _, test, right in tasks[: number + 1]
                ]
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/fitting.json"))
    options = parser.parse_args()
    found = {}
    for b in (0.0, 0.03):
        run = task_run("paper", b, 0, tasks=options.tasks)
        tasks = in_memory(run)
        contenders = {
            "fit": lambda run=run: run_one(run)["accuracies"],
            "by hand": lambda run=run, tasks=tasks: by_hand(run, tasks),
        }
        ratios = []
        for number in range(options.rounds):
            seconds, accuracies = {}, {}
            for name in sorted(contenders, reverse=bool(number % 2)):
                began = time.perf_counter()
                accuracies[name] = contenders[name]()
                seconds[name] = time.perf_counter() - began
            if accuracies["fit"] != accuracies["by hand"]:
                raise SystemExit(f"the two loops disagree: {accuracies}")
            ratios.append(seconds["fit"] / seconds["by hand"])
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        found[run.optimizer] = {"ratios": ratios, "median": statistics.median(ratios)}
        print(
            f"{run.optimizer}: {statistics.median(ratios):.3f} "
            f"({quartiles[0]:.3f} to {quartiles[2]:.3f}, {len(ratios)} rounds)"
        )
    options.out.write_text(
        json.dumps(found | {"threads": torch.get_num_threads()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
