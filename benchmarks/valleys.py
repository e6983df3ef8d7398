"""Which b suits which network? Accuracy over b for seven networks and four scales of the noise.

    python benchmarks/valleys.py                 # about eight hours on one core, four on two:
    python benchmarks/valleys.py --part 1/2 & python benchmarks/valleys.py --part 2/2
    python benchmarks/valleys.py --draw          # run nothing; write the picture and the table

Each network is trained with clean labels and with 40 % pair flips, without noise and with noise of
several b, absolute or relative to tensors, filters or weights, three seeds each. If there were one
b that is good for all networks, their curves would have their peaks at the same place. Runs are
lines of results/valleys.jsonl; finished ones are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuvar import NVRMSGD, NVRMAdam
from neuvar.data import Split, load, normalization
from neuvar.engine import Results
from neuvar.engine.job import provenance
from neuvar.labels import corrupt
from neuvar.models import build

ROOT = Path(__file__).parent.parent
SEEDS = 3
RATE = 0.4
RELATIVE = (0.03, 0.1, 0.2, 0.4, 0.8)
SCALES: dict[str, tuple[float, ...]] = {
    "absolute": (0.003, 0.01, 0.02, 0.05, 0.1),
    "tensor": RELATIVE,
    "filter": RELATIVE,
    "weight": RELATIVE,
}
LABELS = ("clean", "pair")
MOST = 25_000
"""How many images of a set are kept in memory."""


class RowsLSTM(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 128, batch_first=True)
        self.classifier = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(self.lstm(images.flatten(1, -2))[0][:, -1])
        return outputs


class RowsTransformer(nn.Module):
    """Two layers of attention over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(28, 64), nn.Parameter(0.02 * torch.randn(28, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.embed(images.flatten(1, -2)) + self.places
        outputs: Tensor = self.classifier(self.layers(rows).mean(1))
        return outputs


@dataclass(frozen=True)
class Problem:
    """A network, its data and its training; ``classes`` are those that it learns."""

    title: str
    network: Callable[[int], nn.Module]
    data: str = "cifar10"
    images: int = 3000
    test_images: int = 2000
    epochs: int = 12
    batch: int = 32
    lr: float = 0.05
    optimizer: str = "sgd"
    classes: tuple[int, int] = (0, 10)
    bf16: bool = False


def from_registry(name: str, width: int, shape: tuple[int, ...]) -> Callable[[int], nn.Module]:
    return lambda seed: build(name, classes=10, seed=seed, width=width, shape=shape)


def seeded(kind: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return kind()

    return make


COLOUR = (3, 32, 32)
RESNET = from_registry("resnet-10", 16, COLOUR)
DIGITS: dict[str, Any] = {"data": "mnist", "batch": 64}
BEFORE = Problem("ResNet-10", RESNET, images=10_000, classes=(0, 5), batch=128, lr=0.1, bf16=True)
"""What the fine-tuned network learns first: the first five classes, with clean labels."""


@cache
def pretrained(seed: int) -> dict[str, Tensor]:
    model = RESNET(seed)
    train(BEFORE, model, *examples(BEFORE, "clean", seed)[0], {"b": 0.0}, seed)
    return {name: value.clone() for name, value in model.state_dict().items()}


def fine_tuned(seed: int) -> nn.Module:
    model = RESNET(seed)
    model.load_state_dict(pretrained(seed))
    return model


PROBLEMS = {
    "mlp": Problem("MLP", from_registry("mlp", 256, (1, 28, 28)), epochs=20, lr=0.1, **DIGITS),
    "lstm": Problem("LSTM", seeded(RowsLSTM), epochs=10, lr=2e-3, optimizer="adam", **DIGITS),
    "transformer": Problem(
        "transformer", seeded(RowsTransformer), epochs=15, lr=2e-3, optimizer="adam", **DIGITS
    ),
    "vgg-11": Problem("VGG-11", from_registry("vgg-11", 16, COLOUR), epochs=20, bf16=True),
    "resnet-10": Problem("ResNet-10", RESNET, bf16=True),
    "fine-tuned": Problem(
        "ResNet-10, fine-tuned", fine_tuned, epochs=8, lr=0.01, classes=(5, 10), bf16=True
    ),
    "mobilenet-v2": Problem(
        "MobileNetV2",
        from_registry("mobilenet-v2", 8, COLOUR),
        images=2000,
        test_images=1000,
        epochs=10,
    ),
}


def planned() -> Iterator[dict[str, Any]]:
    """All runs of the first seed, then of the second: the picture is fair at any time."""
    for seed in range(SEEDS):
        for problem in PROBLEMS:
            for labels in LABELS:
                common = {"problem": problem, "labels": labels, "seed": seed}
                yield common | {"scale": "none", "b": 0.0}
                for scale, grid in SCALES.items():
                    for b in grid:
                        yield common | {"scale": scale, "b": b}


@cache
def pixels(name: str) -> tuple[Split, Split]:
    """Training and test images, normalized."""
    data = load(name)
    statistics = normalization(data.train.images)
    parts = []
    for split in (data.train, data.test):
        images = split.images if split.images.ndim == 4 else split.images[:, None]
        images = (images[:MOST].float() / 255 - statistics.mean) / statistics.std
        parts.append(Split(images, split.labels[:MOST]))
    return parts[0], parts[1]


def examples(problem: Problem, labels: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Training images with labels as asked for, and test images with true labels."""
    low, high = problem.classes
    found = []
    for split, count in zip(
        pixels(problem.data), (problem.images, problem.test_images), strict=True
    ):
        chosen = ((split.labels >= low) & (split.labels < high)).nonzero().flatten()[:count]
        found.append((split.images[chosen], split.labels[chosen] - low))
    if labels == "pair":
        images, true = found[0]
        found[0] = images, corrupt("pair", true, RATE, classes=high - low, seed=seed).noisy
    return found


def train(
    problem: Problem, model: nn.Module, x: Tensor, y: Tensor, noise: dict[str, Any], seed: int
) -> bool:
    """Train with a learning rate that decays to 0; returns whether the loss stayed finite."""
    options: dict[str, Any] = {"lr": problem.lr, "weight_decay": 1e-4, "seed": seed} | noise
    sgd = problem.optimizer == "sgd"
    optimizer: Any = NVRMSGD(model, momentum=0.9, **options) if sgd else NVRMAdam(model, **options)
    steps = problem.epochs * math.ceil(len(x) / problem.batch)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: max(1 - k / steps, 1e-3))
    order = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(problem.epochs):
        for index in torch.randperm(len(x), generator=order).split(problem.batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=problem.bf16):
                loss = cross_entropy(model(x[index]), y[index])
            if not bool(loss.isfinite()):
                return False
            loss.backward()
            optimizer.step()
            decay.step()
    return True


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    hits = [model(a).argmax(1) == b for a, b in zip(x.split(500), y.split(500), strict=True)]
    return float(torch.cat(hits).double().mean())


def run_one(run: dict[str, Any], problems: dict[str, Problem] = PROBLEMS) -> dict[str, Any]:
    """The line of one run; a network whose loss is not finite has no accuracy."""
    began = time.process_time()
    problem, seed = problems[run["problem"]], run["seed"]
    (x, y), test = examples(problem, run["labels"], seed)
    model = problem.network(seed)
    if x.ndim == 4 and x.shape[1] == 3:
        model = model.to(memory_format=torch.channels_last)
    relative_to = run["scale"] if run["scale"] in ("tensor", "filter", "weight") else None
    finite = train(problem, model, x, y, {"b": run["b"], "relative_to": relative_to}, seed)
    last = {"test": accuracy(model, *test), "fitted": accuracy(model, x, y)} if finite else {}
    line = {"key": key(run), "run": run, "status": "finished" if finite else "diverged"}
    line |= {"reason": None, "last": last, "seconds": round(time.process_time() - began, 1)}
    return line | provenance("cpu", 1)


def key(run: dict[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)


Gains = dict[tuple[str, str], dict[str, dict[float, list[float]]]]


def gains(lines: list[dict[str, Any]]) -> Gains:
    """Accuracy minus that without noise, by labels and scale, problem and b, for each seed.

    A network that diverged has the accuracy of chance.
    """

    def score(line: dict[str, Any]) -> float:
        low, high = PROBLEMS[line["run"]["problem"]].classes
        return line["last"].get("test", 1 / (high - low))

    def place(run: dict[str, Any]) -> tuple[str, str, int]:
        return run["problem"], run["labels"], run["seed"]

    plain = {place(line["run"]): score(line) for line in lines if line["run"]["scale"] == "none"}
    found: Gains = {}
    for line in lines:
        run = line["run"]
        if run["scale"] != "none" and place(run) in plain:
            curves = found.setdefault((run["labels"], run["scale"]), {})
            points = curves.setdefault(run["problem"], {}).setdefault(run["b"], [])
            points.append(100 * (score(line) - plain[place(run)]))
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """For each scale and b: what it gains at the worst and on average over the networks."""
    rows = [
        "| labels | scale | b | mean gain over networks | worst network | n |",
        "| --- | --- | ---: | ---: | --- | ---: |",
    ]
    for (labels, scale), curves in gains(lines).items():
        for b in SCALES[scale]:
            means = {p: statistics.fmean(c[b]) for p, c in curves.items() if b in c}
            if means:
                worst = min(means, key=lambda name: means[name])
                n = min(len(curves[p][b]) for p in means)
                rows.append(
                    f"| {labels} | {scale} | {b:g} | {statistics.fmean(means.values()):+.1f} "
                    f"| {PROBLEMS[worst].title} {means[worst]:+.1f} | {n} |"
                )
    return "\n".join(rows) + "\n"


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """A panel for each scale and kind of labels, a curve for each network."""
    import matplotlib.pyplot as plt

    found = gains(lines)
    figure, every = plt.subplots(
        2, len(SCALES), figsize=(13, 6), sharey="row", layout="constrained", squeeze=False
    )
    titles = {"clean": "clean labels", "pair": "40 % pair flips"}
    for row, labels in zip(every, LABELS, strict=True):
        for axes, scale in zip(row, SCALES, strict=True):
            for index, (name, problem) in enumerate(PROBLEMS.items()):
                points = found.get((labels, scale), {}).get(name, {})
                x = sorted(points)
                means = [statistics.fmean(points[b]) for b in x]
                marker = "osD^v<>"[index]
                axes.plot(x, means, marker=marker, markersize=4, label=problem.title)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set(xscale="log", xlim=(0.8 * SCALES[scale][0], 1.25 * SCALES[scale][-1]))
            kind = "absolute" if scale == "absolute" else f"relative to {scale}"
            axes.set_title(f"{kind}, {titles[labels]}")
            axes.set_xlabel("b")
        row[0].set_ylabel("test accuracy minus\nthat without noise, points")
    every[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", default="1/1", help="which part of the runs, such as 1/2")
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.results / "valleys.jsonl")
    part, parts = map(int, options.part.split("/"))
    mine = [run for run in planned() if run["problem"] in options.problems][part - 1 :: parts]
    for run in [] if options.draw else mine:
        if results.recorded(key(run)) is None:
            line = run_one(run)
            results.add(line)
            print(*run.values(), line["status"], line["last"], line["seconds"], flush=True)
    lines = list(results.lines().values())
    (options.results / "valleys.md").write_text(table(lines))
    if options.draw:
        draw(lines, ROOT / "docs" / "pictures" / "valleys.png")
    print(table(lines))


if __name__ == "__main__":
    main()
