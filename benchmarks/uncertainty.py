"""How sure are models of their predictions? NVRM beside what people would use instead.

    python benchmarks/uncertainty.py [--rows NAME ...] [--seeds N ...] [--tiny] [--left] [--table]

Each arm trains the same network on the same images, with as many gradients: Adam or SGD by itself,
with NVRM, with dropout, SAM (half of the epochs, since a step takes two gradients), IVON, SWA (the
mean of the weights after each of the last epochs), and an ensemble of three networks, at three
times the cost. Predictions are made as their authors do: at the clean weights, with the mean over
32 draws of noise (NVRM), of dropout (MC dropout), of IVON's posterior, or over the ensemble.

Settings are chosen by the log loss of held-out images, with a seed that is not reported: first the
weight decay of plain training, which all arms use, then the setting of each arm. Held-out images
also give the temperature by which all predictions are scaled, as a second result. Finished runs are
skipped, so the same command continues. One line per run in results/uncertainty.jsonl, tables in
results/uncertainty.md, figures in docs/pictures. tools/write_tables.py puts the tables in
docs/results.md, and a short one in docs/how-sure.md.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuvar
from neuvar import NVRMSGD, NVRMAdam, measures
from neuvar.baselines import SAM
from neuvar.data import Batches, Dataset, load, normalization
from neuvar.engine import Results
from neuvar.engine.job import provenance
from neuvar.models import mlp, resnet
from neuvar.models.initialization import seeded

RESULTS = Path(__file__).parents[1] / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
CHOICE_SEED = 1000
"""Seed of the runs that choose settings."""
DRAWS = 32
BITS = (8, 7, 6, 5, 4, 3, 2)
COVERAGES = tuple(k / 20 for k in range(4, 21))
TEMPERATURES = torch.logspace(-2, 2, 161, base=2, dtype=torch.float64)
WEIGHT_IMAGES = 4000
"""Test images for the accuracy at rounded, flipped or noisy weights."""
SWA_SHARE = 0.25
"""Share of the epochs at the end over which SWA averages."""
NEW = {"saturate", "jpeg", "snow", "spatter", "dotted_line", "zigzag", "edges"}
CORRUPTIONS = [kind for kind in measures.CORRUPTIONS if kind not in NEW]
"""The kinds of the recorded runs, which were made before there were the new ones."""

Predictor = Callable[[Tensor], Tensor]
"""Probabilities of normalized images."""


@dataclass(frozen=True)
class Row:
    """Data, network and training that all arms share."""

    name: str
    title: str
    data: str
    strange: str
    network: str
    optimizer: str
    lr: float
    epochs: int
    images: int = 10_000
    held_out: int = 2_000
    batch: int = 128
    attacked: int = 500
    corrupted: int = 500
    epsilon: float = 0.1
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    test: int | None = None
    bf16: bool = False
    """Whether training and predictions use bfloat16, by autocast; rounding never does."""


ROWS = {
    row.name: row
    for row in (
        Row("mnist", "MNIST, 784-256-256-10", "mnist", "fashion-mnist", "mlp", "adam", 1e-3, 20),
        Row(
            "fashion", "Fashion-MNIST, small CNN", "fashion-mnist", "mnist", "cnn", "adam", 1e-3,
            12, epsilon=0.03,
        ),
        Row(
            "cifar10", "CIFAR-10, ResNet-10 of width 16", "cifar10", "fashion-mnist", "resnet",
            "sgd", 0.1, 12, epsilon=2 / 255, attacked=300, corrupted=300, test=4000, bf16=True,
        ),
    )
}  # fmt: skip


def tiny(row: Row) -> Row:
    """A row that only shows that everything runs."""
    small = {"images": 300, "held_out": 100, "epochs": 2, "attacked": 20, "corrupted": 20}
    return replace(row, **small, test=100, seeds=(0, 1))


@dataclass(frozen=True)
class Arm:
    """How to train, and which settings to try."""

    title: str
    grid: tuple[dict[str, float], ...] = ({},)
    networks: int = 1
    same_as: str | None = None


def _grid(**options: tuple[float, ...]) -> tuple[dict[str, float], ...]:
    products = itertools.product(*options.values())
    return tuple(dict(zip(options, values, strict=True)) for values in products)


ARMS = {
    "plain": Arm("plain", _grid(weight_decay=(0.0, 1e-4, 1e-3))),
    "nvrm": Arm("NVRM", _grid(b=(0.003, 0.01, 0.02, 0.03, 0.05))),
    "dropout": Arm("dropout", _grid(dropout=(0.2, 0.5))),
    "sam": Arm("SAM", _grid(rho=(0.02, 0.05, 0.1, 0.2))),
    "ivon": Arm("IVON", _grid(ivon_lr=(0.2, 0.4), hess_init=(0.5, 1.0))),
    "swa": Arm("SWA", same_as="plain"),
    "ensemble": Arm("ensemble of three", networks=3, same_as="plain"),
}
"""SWA and the ensemble have no settings of their own: they use those of plain training."""


def cnn(classes: int, seed: int) -> nn.Module:
    """Two convolutions and two linear layers."""
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, classes),
        ),
        seed,
    )  # fmt: skip


def network(row: Row, dropout: float, seed: int) -> nn.Module:
    """The row's network; dropout is behind hidden linear layers, or before the last layer."""
    if row.network == "resnet":
        model = resnet((1, 1, 1, 1), classes=10, seed=seed, width=16)
        if dropout:
            model.classifier = nn.Sequential(nn.Dropout(dropout), model.classifier)
        return model.to(memory_format=torch.channels_last)
    model = mlp((784, 256, 256, 10), seed=seed) if row.network == "mlp" else cnn(10, seed)
    if dropout:
        layers = model.layers if row.network == "mlp" else model
        linear = [k for k, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
        for k in reversed(linear[1:]):  # before each linear layer but the first
            layers.insert(k, nn.Dropout(dropout))
    return model


def optimizer_for(
    row: Row, arm: str, model: nn.Module, setting: dict[str, float], seed: int
) -> Any:
    options: dict[str, Any] = {"lr": row.lr, "weight_decay": setting["weight_decay"]}
    if arm == "ivon":
        from ivon import IVON

        options |= {"lr": setting["ivon_lr"], "hess_init": setting["hess_init"]}
        return IVON(model.parameters(), ess=row.images, **options)
    if row.optimizer == "sgd":
        options["momentum"] = 0.9
    if arm == "nvrm":
        kind = NVRMSGD if row.optimizer == "sgd" else NVRMAdam
        return kind(model, b=setting["b"], seed=seed, **options)
    plain = torch.optim.SGD if row.optimizer == "sgd" else torch.optim.Adam
    inner = plain(model.parameters(), fused=True, **options)
    return SAM(inner, rho=setting["rho"]) if arm == "sam" else inner


@cache
def dataset(name: str) -> Dataset:
    return load(name)


@dataclass
class Images:
    """Normalized images of a row and their labels, and how to normalize others."""

    row: Row
    train: tuple[Tensor, Tensor] = field(init=False)
    held_out: tuple[Tensor, Tensor] = field(init=False)
    test: tuple[Tensor, Tensor] = field(init=False)
    strange: Tensor = field(init=False)

    def __post_init__(self) -> None:
        row, data = self.row, dataset(self.row.data)
        n, m = row.images, row.images + row.held_out
        self.train = data.train.images[:n], data.train.labels[:n]
        self.statistics = normalization(self.train[0])
        held = data.train.images[n:m], data.train.labels[n:m]
        self.held_out = self.normalize(as_pixels(held[0])), held[1]
        self.pixels = as_pixels(data.test.images[: row.test])
        self.test = self.normalize(self.pixels), data.test.labels[: row.test]
        strange = as_pixels(dataset(row.strange).test.images[: row.test])
        if self.pixels.shape[1] == 3:
            size = self.pixels.shape[-2:]
            strange = nn.functional.interpolate(strange, size).expand(-1, 3, -1, -1)
        self.strange = self.normalize(strange)

    def normalize(self, pixels: Tensor) -> Tensor:
        return (pixels - self.statistics.mean) / self.statistics.std


def as_pixels(images: Tensor) -> Tensor:
    """Numbers from 0 to 1 with channels."""
    return (images if images.ndim == 4 else images.unsqueeze(1)).float() / 255


@dataclass
class Trained:
    """A trained network, and the optimizer that knows its noise."""

    model: nn.Module
    optimizer: Any
    gradients: int


def train(row: Row, arm: str, setting: dict[str, float], seed: int, data: Images) -> Trained:
    """Train one network; raises ArithmeticError if it diverges."""
    torch.manual_seed(seed)  # for dropout, and for IVON's noise
    model = network(row, setting.get("dropout", 0.0), seed)
    optimizer = optimizer_for(row, arm, model, setting, seed)
    epochs = max(1, row.epochs // 2) if arm == "sam" else row.epochs
    batches = Batches(data.train, row.batch, seed=seed, normalize=data.statistics)
    # SWA ends with a constant rate, as its authors advise.
    drops = () if arm == "swa" else (epochs // 2, epochs * 3 // 4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops)
    average = torch.optim.swa_utils.AveragedModel(model) if arm == "swa" else None
    gradients = 0
    for epoch in range(epochs):
        model.train()
        for images, labels in batches.epoch(epoch):

            def backward(images: Tensor = images, labels: Tensor = labels) -> None:
                nonlocal gradients
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                if not math.isfinite(loss.item()):
                    raise ArithmeticError(f"the loss is not finite after {gradients} steps")
                loss.backward()
                gradients += 1

            if arm == "ivon":
                with optimizer.sampled_params(train=True):
                    backward()
            else:
                backward()
            if arm == "sam":
                optimizer.climb()
                backward()
            optimizer.step()
        schedule.step()
        if average is not None and epoch >= math.floor((1 - SWA_SHARE) * epochs):
            average.update_parameters(model)
    if average is not None:
        model = average.module
        parts = batches.epoch(0)
        neuvar.reestimate_batchnorm(model, (images for images, _ in parts))
    return Trained(model.eval(), optimizer, gradients)


def clean(model: nn.Module) -> Predictor:
    @torch.no_grad()  # or the mean over samples would keep the activations of all of them
    def predict(x: Tensor) -> Tensor:
        return torch.cat([model(part).double().softmax(1) for part in x.split(500)])

    return predict


def sampled(trained: Trained, draws: int, seed: int) -> Predictor:
    """The mean over samples of IVON's posterior."""

    def predict(x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        total = torch.zeros(())
        for _ in range(draws):
            with trained.optimizer.sampled_params():
                total = total + clean(trained.model)(x)
        return total / draws

    return predict


def averaged(trained: Trained, draws: int, **options: Any) -> Predictor:
    return lambda x: (
        neuvar.predict(trained.model, x, draws=draws, batch_size=500, **options).probabilities
    )


def predictors(arm: str, trained: list[Trained], draws: int, seed: int) -> dict[str, Predictor]:
    """The ways to predict of an arm; the last one is its own."""
    first = trained[0]
    if len(trained) > 1:
        every = [clean(own.model) for own in trained]
        return {"mean": lambda x: torch.stack([predict(x) for predict in every]).mean(0)}
    ways = {"clean": clean(first.model)}
    if arm == "nvrm":
        ways["averaged"] = averaged(first, draws, optimizer=first.optimizer, seed=seed)
    elif arm == "dropout":
        ways["averaged"] = averaged(first, draws, b=0, dropout=True, seed=seed, antithetic=False)
    elif arm == "ivon":
        ways["averaged"] = sampled(first, draws, seed)
    return ways


class Scores(nn.Module):
    """A predictor as a module that returns log-probabilities."""

    def __init__(self, predict: Predictor) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(x).clamp(min=1e-300).log()


def scale(p: Tensor, temperature: float) -> Tensor:
    """Probabilities at another temperature."""
    return (p.clamp(min=1e-300).log() / temperature).softmax(1)


def best_temperature(p: Tensor, labels: Tensor) -> float:
    """The temperature with the lowest log loss."""
    losses = [measures.log_loss(scale(p, float(t)), labels, logits=False) for t in TEMPERATURES]
    return float(TEMPERATURES[min(range(len(losses)), key=lambda k: losses[k].mean)])


def measure_prediction(predict: Predictor, cheap: Predictor, data: Images) -> dict[str, Any]:
    """Numbers of one way to predict; corruptions with fewer draws."""
    row, (x, y) = data.row, data.test
    p = predict(x)
    temperature = best_temperature(predict(data.held_out[0]), data.held_out[1])
    scaled = scale(p, temperature)
    entropy = torch.special.entr(p).sum(1)
    strange = torch.special.entr(predict(data.strange)).sum(1)
    calibration = measures.calibration_error(p, y, logits=False)
    selective = measures.selective_accuracy(p, y, logits=False)
    corrupted = measures.corruption_accuracy(
        Scores(cheap),
        (data.pixels[: row.corrupted], y[: row.corrupted]),
        kinds=CORRUPTIONS,
        severities=[3],
        transform=data.normalize,
    )
    return {
        "accuracy": float((p.argmax(1) == y).double().mean()),
        "calibration_error": calibration.value,
        "calibration_floor": calibration.floor,
        "log_loss": measures.log_loss(p, y, logits=False).mean,
        "brier": measures.brier_score(p, y, logits=False).mean,
        "temperature": temperature,
        "scaled_calibration_error": measures.calibration_error(scaled, y, logits=False).value,
        "scaled_log_loss": measures.log_loss(scaled, y, logits=False).mean,
        "selective_area": selective.area,
        "selective_80": selective.at(0.8).value,
        "strange_auroc": measures.ood_auroc(entropy, strange).value,
        "corrupted": corrupted.mean.mean,
        "bins": [[b.confidence, b.accuracy, b.count] for b in calibration.bins],
        "coverage": [selective.at(coverage).value for coverage in COVERAGES],
    }


def measure_weights(model: nn.Module, data: Images) -> dict[str, Any]:
    """Numbers of a network at its clean weights."""
    row, test = data.row, (data.test[0][:WEIGHT_IMAGES], data.test[1][:WEIGHT_IMAGES])
    some = slice(0, row.attacked)
    attacked = measures.adversarial_accuracy(
        model, (data.pixels[some], test[1][some]), epsilon=row.epsilon, transform=data.normalize
    )
    rounded = measures.rounding(model, test, bits=BITS, kernels=True)
    flips = measures.bit_flips(model, test, rates=[1e-3, 1e-2], draws=4)
    analog = {
        kind: measures.analog_noise(model, test, scales=[0.1], kind=kind, draws=4)
        for kind in ("multiplicative", "additive")
    }
    return {
        "attacked": attacked.attacked.value,
        "bits": {by: [p.value for p in own.values()] for by, own in rounded.accuracies.items()},
        "kernels": {str(bits): p.value for bits, p in rounded.kernels.items()},
        "bit_flips": [accuracy.mean for accuracy in flips.accuracies],
        "analog": {kind: own.accuracies[0].mean for kind, own in analog.items()},
    }


def run_one(run: dict[str, Any], rows: dict[str, Row]) -> dict[str, Any]:
    """The line of one run."""
    # The cache would keep weights of an earlier step; every weight is used once per pass anyway.
    with torch.autocast("cpu", torch.bfloat16, enabled=rows[run["row"]].bf16, cache_enabled=False):
        return measured(run, rows)


def measured(run: dict[str, Any], rows: dict[str, Row]) -> dict[str, Any]:
    began, row, arm = time.process_time(), rows[run["row"]], run["arm"]
    seed, setting, data = run["seed"], run["setting"], Images(rows[run["row"]])
    seeds = [seed] if ARMS[arm].networks == 1 else [seed + 100 * k for k in (0, 1, 2)]
    outcome: dict[str, Any] = {"status": "finished", "reason": None}
    try:
        trained = [train(row, arm, setting, own, data) for own in seeds]
        ways = predictors(arm, trained, DRAWS, seed)
        x, y = data.held_out
        outcome["training_seconds"] = round(time.process_time() - began, 1)
        outcome["gradients"] = sum(own.gradients for own in trained)
        outcome["held_out"] = {
            name: measures.log_loss(predict(x), y, logits=False).mean
            for name, predict in ways.items()
        }
        if not run["choice"]:
            cheap = predictors(arm, trained, 8, seed)
            outcome["predictions"] = {
                name: measure_prediction(predict, cheap[name], data)
                for name, predict in ways.items()
            }
            if len(trained) == 1:
                with torch.autocast("cpu", enabled=False):  # quantized kernels need float32
                    outcome["weights"] = measure_weights(copy.deepcopy(trained[0].model), data)
    except ArithmeticError as error:
        outcome = {"status": "diverged", "reason": str(error)}
    cost = {"seconds": round(time.process_time() - began, 1)}
    return {"key": key(run), "run": run} | outcome | cost | provenance("cpu", 1)


def key(run: dict[str, Any]) -> str:
    """Identity of a run: its fields as text."""
    return json.dumps(run, sort_keys=True)


def choice_runs(row: Row, name: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs that choose the setting of an arm. All arms have the weight decay of plain training."""
    arm, decay = ARMS[name], {} if name == "plain" else chosen(row, "plain", lines)
    settings = [setting | decay for setting in arm.grid] if len(arm.grid) > 1 else []
    common = {"row": row.name, "arm": name, "seed": CHOICE_SEED, "choice": True}
    return [common | {"setting": setting} for setting in settings]


def chosen(row: Row, name: str, lines: list[dict[str, Any]]) -> dict[str, float]:
    """The setting with the lowest held-out log loss of the arm's own way to predict."""
    if same_as := ARMS[name].same_as:
        return chosen(row, same_as, lines)
    planned = {key(run) for run in choice_runs(row, name, lines)}
    tried = [  # an infinite loss is recorded as null
        (list(line["held_out"].values())[-1] or math.inf, line["run"]["setting"])
        for line in lines
        if key(line["run"]) in planned and line["status"] == "finished"
    ]
    return min(tried, key=lambda pair: pair[0])[1]


def reported_runs(row: Row, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of the tables, one seed of all arms after another."""
    settings = {name: chosen(row, name, lines) for name in ARMS}
    return [
        {"row": row.name, "arm": name, "setting": settings[name], "seed": seed, "choice": False}
        for seed in row.seeds
        for name in ARMS
    ]


def missing(runs: list[dict[str, Any]], results: Results) -> list[dict[str, Any]]:
    return [run for run in runs if results.recorded(key(run)) is None]


def all_lines(results: Results) -> list[dict[str, Any]]:
    return list(results.lines().values())


def left_runs(row: Row, results: Results) -> list[dict[str, Any]]:
    """The next runs: choices for plain training, choices for the other arms, or reported runs."""
    if left := missing(choice_runs(row, "plain", []), results):
        return left
    lines = all_lines(results)
    choices = [run for name in ARMS for run in choice_runs(row, name, lines)]
    return missing(choices, results) or missing(reported_runs(row, lines), results)


def run_row(row: Row, rows: dict[str, Row], results: Results, seeds: list[int] | None) -> None:
    """Run what is left of a row."""
    while left := left_runs(row, results):
        if seeds and not left[0]["choice"]:
            left = [run for seed in seeds for run in left if run["seed"] == seed]
        if not left:
            return
        for run in missing(left, results):
            print("started", *run.values(), flush=True)
            line = run_one(run, rows)
            results.add(line)
            print(line["status"], line.get("held_out"), f"{line['seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", nargs="*", type=int, help="run only these, in this order")
    parser.add_argument("--tiny", action="store_true", help="a few images: does it run at all?")
    parser.add_argument("--left", action="store_true", help="only say what is left to run")
    parser.add_argument("--table", action="store_true", help="only write tables and figures")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: tiny(row) if options.tiny else row for name, row in ROWS.items()}
    results = Results(options.results / "uncertainty.jsonl")
    for name in options.rows:
        if not (options.left or options.table):
            run_row(rows[name], rows, results, options.seeds)
        print(f"{name}: at least {len(left_runs(rows[name], results))} runs left", flush=True)
    if not options.left:
        from uncertainty_tables import pictures, tables

        lines = all_lines(results)
        text = tables(lines, rows)
        (options.results / "uncertainty.md").write_text(text, encoding="utf-8")
        pictures(lines, rows, options.pictures)
        print(text)


if __name__ == "__main__":
    main()
