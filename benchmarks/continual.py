"""Do EWC, SI and MAS forget less than plain Adam? Permuted MNIST, five seeds each.

    python benchmarks/continual.py --choose   # strengths, on held-out training images
    python benchmarks/continual.py            # the five seeds, with the chosen strengths

Setting 4a of the paper: five permuted tasks, 784-1024-1024-10, Adam at 1e-3, weight decay 1e-4,
batch 256, one epoch a task, a new optimizer for each task. Importances are taken on 10,000 images
of the task. One JSON line a run; finished runs are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuvar
from neuvar.continual import EWC, MAS, SI, Penalty, Stream, permuted_tasks
from neuvar.data import Dataset, Split, load
from neuvar.models import mlp
from spread import spread

METHODS = {"ewc": EWC, "si": SI, "mas": MAS}
GRID = {
    "ewc": (30.0, 100.0, 300.0, 1000.0, 3000.0),
    "si": (3.0, 10.0, 30.0, 100.0, 300.0),
    "mas": (0.03, 0.1, 0.3),
}
HELD_OUT = 10_000
CHOICE_SEED = 100
LOOKED_AT = 10_000
"""How many images of a task the importances are taken on."""


@dataclass(frozen=True)
class Run:
    """One training through all tasks; ``b`` is NVRM's, 0 for plain Adam."""

    role: str
    method: str
    strength: float
    seed: int
    b: float = 0.0
    at: str = "perturbed"


def penalty_for(run: Run) -> Penalty | None:
    return METHODS[run.method](run.strength, at=run.at) if run.method in METHODS else None


def pixels(images: Tensor) -> Tensor:
    return images.flatten(1).float().div_(255)


def train_task(
    model: nn.Module, split: Split, run: Run, penalty: Penalty | None, draws: torch.Generator
) -> float:
    """One epoch with a new optimizer; returns the penalty's mean share of the loss."""
    model.train()
    optimizer: Any = torch.optim.Adam(model.parameters(), weight_decay=1e-4)
    if run.b:
        seed = int(torch.randint(1 << 31, (), generator=draws))
        optimizer = neuvar.NVRM(optimizer, model=model, b=run.b, seed=seed)
    shares = []
    for index in torch.randperm(len(split), generator=draws).split(256):
        optimizer.zero_grad()
        loss = cross_entropy(model(pixels(split.images[index])), split.labels[index])
        if penalty is not None:
            loss = loss + penalty(model)
            shares.append(penalty.share(loss))
        loss.backward()
        optimizer.step()
        if penalty is not None:
            penalty.after_step(model)
    return statistics.mean(shares) if shares else 0.0


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    parts = [
        model(pixels(x)).argmax(1) == y
        for x, y in zip(split.images.split(2000), split.labels.split(2000), strict=True)
    ]
    return torch.cat(parts).float().mean().item()


def run_one(run: Run, stream: Stream) -> dict[str, Any]:
    """Learn all tasks in turn; accuracy of all tasks seen after each, at clean weights."""
    model = mlp((784, 1024, 1024, 10), seed=run.seed)
    penalty, draws = penalty_for(run), torch.Generator().manual_seed(run.seed)
    began, tests, history, shares = time.perf_counter(), [], [], []
    for task in stream:
        split = task.train
        share = train_task(model, split, run, penalty, draws)
        if penalty is not None and task is not stream[-1]:
            penalty.after_task(model, pixels(split.images[:LOOKED_AT]))
        model.eval()
        shares.append(share)
        tests.append(task.test)
        history.append([round(accuracy(model, test), 4) for test in tests])
    return asdict(run) | {
        "history": history,
        "first": history[-1][0],
        "mean": round(statistics.mean(history[-1]), 5),
        "share": [round(share, 4) for share in shares],
        "seconds": round(time.perf_counter() - began, 1),
        "torch": torch.__version__,
    }


def held_out(data: Dataset) -> Dataset:
    """The training images alone: the last ones take the place of the test images."""
    x, y = data.train.images, data.train.labels
    kept = Split(x[:-HELD_OUT], y[:-HELD_OUT])
    return Dataset("mnist-held-out", 10, kept, Split(x[-HELD_OUT:], y[-HELD_OUT:]))


def choices(method: str) -> Iterator[Run]:
    for strength in GRID[method]:
        yield Run("choice", method, strength, CHOICE_SEED)


def chosen(done: list[dict[str, Any]], method: str) -> float:
    """The strength that did best on held-out images."""
    runs = [r for r in done if r["role"] == "choice" and r["method"] == method]
    if missing := set(GRID[method]) - {r["strength"] for r in runs}:
        raise SystemExit(f"{method} was not tried at {sorted(missing)}; run with --choose first")
    return max(runs, key=lambda r: r["mean"])["strength"]


def trials(seeds: int, method: str, strength: float) -> Iterator[Run]:
    """All seeds with Adam, and the first with NVRM-Adam."""
    for seed in range(seeds):
        yield Run("test", method, strength, seed)
    yield Run("test", method, strength, 0, b=0.03)
    if method == "ewc":
        yield Run("test", method, strength, 0, b=0.03, at="clean")


def finished(path: Path) -> list[dict[str, Any]]:
    """Runs of an earlier call; a line that was torn is left out, and its run done again."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def summary(done: list[dict[str, Any]]) -> str:
    """Mean and deviation for each method, and the gain over plain Adam paired by seed."""
    rows = [
        "| method | strength | b | at | n | first task | mean of five | gain over Adam ± s.e. |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    test = [run for run in done if run["role"] == "test"]
    plain = {r["seed"]: r["mean"] for r in test if r["method"] == "none" and not r["b"]}
    keys = list(dict.fromkeys((r["method"], r["strength"], r["b"], r["at"]) for r in test))
    for key in keys:
        runs = [r for r in test if (r["method"], r["strength"], r["b"], r["at"]) == key]
        cells = [spread((r[column] for r in runs), 4) for column in ("first", "mean")]
        gains = [r["mean"] - plain[r["seed"]] for r in runs if r["seed"] in plain]
        gain = f"{statistics.mean(gains):+.4f}" if any(gains) else ""
        if gain and len(gains) > 1:
            gain += f" ± {statistics.stdev(gains) / math.sqrt(len(gains)):.4f}"
        rows.append("| " + " | ".join([*map(str, key), str(len(runs)), *cells, gain]) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choose", action="store_true", help="choose strengths on held-out images")
    parser.add_argument("--only", choices=["none", *METHODS], help="one method alone")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/continual.jsonl"))
    options = parser.parse_args()
    data, done = load("mnist"), finished(options.out)
    data = held_out(data) if options.choose else data
    for method in [options.only] if options.only else ["none", *METHODS]:
        if options.choose:
            runs = choices(method) if method in METHODS else iter(())
        else:
            strength = chosen(done, method) if method in METHODS else 0.0
            runs = trials(options.seeds, method, strength)
        for run in runs:
            if any(asdict(run).items() <= other.items() for other in done):
                continue
            done.append(run_one(run, permuted_tasks(data, 5, seed=run.seed)))
            with options.out.open("a") as lines:
                lines.write(json.dumps(done[-1]) + "\n")
            print(json.dumps(done[-1]), flush=True)
    if not options.choose:
        print(summary(done))


if __name__ == "__main__":
    main()
