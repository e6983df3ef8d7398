"""Does the table of draws train as well as fresh draws? Permuted MNIST, ten seeds each.

    python benchmarks/samplers.py [--seeds 10] [--out results/samplers.jsonl]

Setting 4a of the paper: five permuted tasks, 784-1024-1024-10, Adam at 1e-3, weight decay 1e-4,
batch 256, one epoch a task, b = 0.03; the optimizer is kept from task to task. One JSON line a run;
finished runs are skipped..
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuvar
from neuvar.data import load
from spread import spread

OPTIMIZERS = {
    "table": lambda model, seed: neuvar.NVRMAdam(model, weight_decay=1e-4, b=0.03, seed=seed),
    "fresh": lambda model, seed: neuvar.NVRMAdam(
        model, weight_decay=1e-4, b=0.03, seed=seed, sampler="fresh"
    ),
    "adam": lambda model, seed: torch.optim.Adam(model.parameters(), weight_decay=1e-4),
}


def permuted_mnist(data: dict[str, Tensor], name: str, seed: int) -> dict[str, object]:
    """Train on five permutations in turn; accuracy of each at the end, at clean weights."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    permutations = [torch.randperm(784, generator=generator) for _ in range(5)]
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    began = time.perf_counter()
    optimizer = OPTIMIZERS[name](model, seed)
    for permutation in permutations:
        for index in torch.randperm(len(data["x_train"]), generator=generator).split(256):
            optimizer.zero_grad()
            outputs = model(data["x_train"][index][:, permutation])
            cross_entropy(outputs, data["y_train"][index]).backward()
            optimizer.step()
    with torch.no_grad():
        guesses = [model(data["x_test"][:, p]).argmax(1) for p in permutations]
    accuracy = [(g == data["y_test"]).float().mean().item() for g in guesses]
    seconds = round(time.perf_counter() - began, 1)
    return {"optimizer": name, "seed": seed, "accuracy": accuracy, "seconds": seconds}


def mnist() -> dict[str, Tensor]:
    """MNIST as flat float tensors and labels."""
    data = load("mnist")
    splits = {"train": data.train, "test": data.test}
    pixels = {f"x_{k}": split.images.flatten(1).float() / 255 for k, split in splits.items()}
    return pixels | {f"y_{k}": split.labels for k, split in splits.items()}


def summary(runs: list[dict[str, object]]) -> str:
    """Mean, deviation and n of first-task and mean accuracy for each optimizer."""
    lines = ["| optimizer | n | first task | mean of five |", "| --- | --- | --- | --- |"]
    for name in OPTIMIZERS:
        accuracy = [run["accuracy"] for run in runs if run["optimizer"] == name]
        if len(accuracy) < 2:
            continue
        columns = [[a[0] for a in accuracy], [sum(a) / len(a) for a in accuracy]]
        cells = [spread(c, 4) for c in columns]
        lines.append(f"| {name} | {len(accuracy)} | {' | '.join(cells)} |")
    pairs = {run["seed"]: {} for run in runs}
    for run in runs:
        pairs[run["seed"]][run["optimizer"]] = sum(run["accuracy"]) / 5
    differences = [
        p["table"] - p["fresh"] for p in pairs.values() if {"table", "fresh"} <= p.keys()
    ]
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        mean = statistics.mean(differences)
        lines.append(
            f"\ntable - fresh, mean of five, paired by seed: {mean:+.4f} ± {error:.4f} s.e."
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("results/samplers.jsonl"))
    arguments = parser.parse_args()
    data = mnist()
    done = (
        [json.loads(line) for line in arguments.out.read_text().splitlines()]
        if arguments.out.exists()
        else []
    )
    known = {(run["optimizer"], run["seed"]) for run in done}
    for names in (("table", "fresh"), ("adam",)):
        for seed, name in itertools.product(range(arguments.seeds), names):
            if (name, seed) not in known:
                done.append(permuted_mnist(data, name, seed))
                with arguments.out.open("a") as lines:
                    lines.write(json.dumps(done[-1]) + "\n")
                print(done[-1], flush=True)
    print(summary(done))


if __name__ == "__main__":
    main()
