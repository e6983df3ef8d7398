"""Train on wrong labels: does noise beat the baselines that anybody would try first?

    python benchmarks/wrong_labels.py [--rows NAME ...] [--left] [--table]

Each arm trains the same network on the same wrong labels: SGD, weight decay, dropout, NVRM-SGD,
dropout with NVRM-SGD, SAM, IVON, label smoothing, and an exponential average of the weights over
steps. SAM takes two gradients per step: it is trained for as many epochs, and for half of them,
beside SGD for half of them. From one run come the test accuracy and the wrong labels that
were memorized, at the last epoch and at the best epoch on held-out images, whose labels are wrong
as often. From the same run come rankings of the labels: by the history of the training (mean
probability of the label, its margin, AUM) and by a loss. The settings of an arm are chosen on the
held-out labels with a seed that is not reported. The training data are those of ``cleaning.py``.

Finished runs are skipped, so the same command continues. One line per run in
results/wrong_labels.jsonl, tables in results/wrong_labels.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from neuvar import NVRMSGD
from neuvar.baselines import SAM
from neuvar.data import Batches, Dataset, load, normalization
from neuvar.engine import Results
from neuvar.engine.job import provenance
from neuvar.labels import corrupt
from neuvar.models import build
from neuvar.train.evaluation import autocast, clean_weights
from wrong_labels_plan import ARMS, ROWS, WAVES, Arm, Row, choice_runs, left, reported_runs
from wrong_labels_tables import table

RESULTS = Path(__file__).parents[1] / "results"
BATCH, LR, MOMENTUM, WEIGHT_DECAY = 128, 0.1, 0.9, 1e-4
HELD_OUT_SEED = 500_000
"""Added to the seed for the labels of the held-out images."""
CURVE_IMAGES = 1000
"""Test images that are evaluated after every epoch."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Examples:
    """Images with the labels that the training is given, and the true ones."""

    images: Tensor
    given: Tensor
    true: Tensor


@cache
def dataset(name: str) -> Dataset:
    return load(name)


def examples(row: Row, seed: int) -> dict[str, Examples]:
    """Training images, held-out images with labels as wrong, and test images."""
    data = dataset(row.data)
    n, m = row.images, row.images + row.held_out
    parts = {}
    for name, part, label_seed in (
        ("train", slice(0, n), seed),
        ("held_out", slice(n, m), seed + HELD_OUT_SEED),
    ):
        true = data.train.labels[part]
        noisy = corrupt(row.kind, true, row.rate, classes=data.classes, seed=label_seed).noisy
        parts[name] = Examples(data.train.images[part], noisy, true)
    test = data.test
    return parts | {"test": Examples(test.images, test.labels, test.labels)}


def network(row: Row, rate: float, images: Tensor, seed: int) -> nn.Module:
    """The row's network; dropout is behind each hidden layer, or before a ResNet's last layer."""
    shape = tuple(images.shape[1:])
    shape = shape if len(shape) == 3 else (1, *shape)
    model = build(row.model, classes=10, seed=seed, width=row.width or None, shape=shape)
    if rate:
        if row.model == "mlp":
            relus = (
                [layer, nn.Dropout(rate)] if isinstance(layer, nn.ReLU) else [layer]
                for layer in model.layers
            )
            model.layers = nn.Sequential(*(layer for pair in relus for layer in pair))
        else:
            model.classifier = nn.Sequential(nn.Dropout(rate), model.classifier)
    return model.to(memory_format=torch.channels_last) if images.ndim == 4 else model


def optimizer_for(
    arm: Arm, model: nn.Module, setting: dict[str, float], row: Row, seed: int
) -> Any:
    decay = setting.get("weight_decay", WEIGHT_DECAY)
    if arm.optimizer == "ivon":
        from ivon import IVON

        # The effective sample size is the number of training images, as its authors advise.
        how = {"lr": setting["lr"], "hess_init": setting["hess_init"], "weight_decay": decay}
        return IVON(model.parameters(), ess=row.images, beta1=MOMENTUM, **how)
    options = {"lr": LR, "momentum": MOMENTUM, "weight_decay": decay}
    if arm.optimizer == "nvrm":
        return NVRMSGD(model, b=setting.get("b", "auto"), seed=seed, **options)
    inner = torch.optim.SGD(model.parameters(), fused=True, **options)
    return SAM(inner, rho=setting["rho"]) if arm.optimizer == "sam" else inner


def step(optimizer: Any, backward: Callable[[], Tensor]) -> Tensor:
    """One training step as the optimizer's authors ask for; returns the scores of the batch."""
    if hasattr(optimizer, "sampled_params"):
        with optimizer.sampled_params(train=True):
            scores = backward()
    else:
        scores = backward()
    if isinstance(optimizer, SAM):
        optimizer.climb()
        backward()
    optimizer.step()
    return scores


@dataclass
class History:
    """What the training itself sees of each example, summed over the epochs."""

    given: Tensor
    probabilities: Tensor = field(init=False)
    margins: Tensor = field(init=False)
    epochs: int = 0

    def __post_init__(self) -> None:
        self.probabilities = torch.zeros(len(self.given), 10)
        self.margins = torch.zeros(len(self.given))

    def add(self, index: Tensor, scores: Tensor) -> None:
        self.probabilities[index] += softmax(scores, 1)
        self.margins[index] += margin(scores, self.given[index])

    def suspicions(self) -> dict[str, Tensor]:
        """Scores that are higher for a label that is more likely wrong."""
        p, y = self.probabilities / self.epochs, self.given
        return {
            "mean probability": -p[torch.arange(len(y)), y],
            "margin of the mean": -margin(p, y),
            "AUM": -self.margins,
        }


def margin(scores: Tensor, labels: Tensor) -> Tensor:
    """Score of the label minus the highest of the others."""
    own = scores.gather(1, labels[:, None])
    others = scores.scatter(1, labels[:, None], -math.inf)
    return own[:, 0] - others.max(1).values


class Trial:
    """One run: its data, its network in training, and how it is measured."""

    def __init__(self, row: Row, arm: Arm, setting: dict[str, float], seed: int) -> None:
        torch.manual_seed(seed)  # for dropout, and for IVON's noise
        self.row, self.seed = row, seed
        self.epochs = row.epochs // 2 if arm.half_epochs else row.epochs
        self.data = examples(row, seed)
        train = self.data["train"]
        self.normalize = normalization(train.images)
        self.model = network(row, setting.get("dropout", 0.0), train.images, seed)
        self.optimizer = optimizer_for(arm, self.model, setting, row, seed)
        self.smoothing, self.average = setting.get("smoothing", 0.0), None
        if decay := setting.get("average"):
            how = {"multi_avg_fn": get_ema_multi_avg_fn(decay), "use_buffers": True}
            self.average = AveragedModel(self.model, **how)
        self.history = History(train.given)
        self.curves: dict[str, list[float]] = {"running": [], "held_out": [], "test_part": []}

    def run(self) -> dict[str, Any]:
        """Train; measure the network of the last epoch and of the best held-out epoch."""
        drop = torch.optim.lr_scheduler.StepLR(self.optimizer, -(-self.epochs // 3))
        best, kept = -1.0, {}
        for epoch in range(self.epochs):
            if not self._train_epoch(epoch):
                return {"status": "diverged", "reason": f"not finite in epoch {epoch + 1}"}
            drop.step()
            held_out = self._accuracy("held_out")
            self.curves["held_out"].append(held_out)
            self.curves["test_part"].append(self._accuracy("test", CURVE_IMAGES))
            if held_out > best:  # the first of equal ones
                with clean_weights(self.optimizer):
                    best, kept = held_out, copy.deepcopy(self.measured.state_dict())
        last, loss = self._measure(self.epochs)
        suspicions = self.history.suspicions() | {"last loss": loss}
        with clean_weights(self.optimizer):
            self.measured.load_state_dict(kept)
            at_best, loss = self._measure(1 + self.curves["held_out"].index(best))
        suspicions["loss at the best held-out epoch"] = loss
        return {
            "status": "finished",
            "reason": None,
            "curves": {k: [round(v, 4) for v in values] for k, values in self.curves.items()},
            "last": last,
            "best": at_best,
            "last_b": float(self.optimizer.param_groups[0].get("b", 0.0)),
            "finding": {name: ranking(s, self.wrong) for name, s in suspicions.items()},
        }

    @property
    def measured(self) -> nn.Module:
        """The network in training, or the average of its weights."""
        return self.model if self.average is None else self.average.module

    @property
    def wrong(self) -> Tensor:
        return self.data["train"].given != self.data["train"].true

    def _train_epoch(self, epoch: int) -> bool:
        """Whether all losses were finite."""
        train = self.data["train"]
        parts = (train.images, train.given, torch.arange(len(train.given)))
        batches = Batches(parts, BATCH, seed=self.seed, normalize=self.normalize)
        correct, total = 0, 0.0
        self.model.train()
        for images, labels, index in batches.epoch(epoch):

            def backward(images: Tensor = images, labels: Tensor = labels) -> Tensor:
                nonlocal total
                self.optimizer.zero_grad()
                with autocast(CPU, self.row.precision):
                    scores = self.model(images)
                loss = cross_entropy(scores.float(), labels, label_smoothing=self.smoothing)
                if isinstance(self.optimizer, NVRMSGD):
                    self.optimizer.report_loss(loss)  # for b="auto"
                loss.backward()
                total += loss.item()
                return scores.detach().float()

            scores = step(self.optimizer, backward)
            if self.average is not None:
                self.average.update_parameters(self.model)
            self.history.add(index, scores)
            correct += int((scores.argmax(1) == labels).sum())
            if not math.isfinite(total):
                return False
        self.history.epochs += 1
        self.curves["running"].append(correct / len(train.given))
        return True

    def _scores(self, name: str, count: int | None = None) -> Tensor:
        """Scores at the clean weights, in evaluation mode."""
        images = self.data[name].images[:count]
        batches = Batches((images,), 500, shuffle=False, normalize=self.normalize)
        model = self.measured.eval()
        with torch.no_grad(), clean_weights(self.optimizer), autocast(CPU, self.row.precision):
            return torch.cat([model(part).float() for (part,) in batches])

    def _accuracy(self, name: str, count: int | None = None) -> float:
        predicted = self._scores(name, count).argmax(1)
        return share(predicted == self.data[name].given[:count])

    def _measure(self, epoch: int) -> tuple[dict[str, float], Tensor]:
        """Numbers of the network as it is, and the loss of each training example."""
        train, wrong = self.data["train"], self.wrong
        scores = self._scores("train")
        predicted = scores.argmax(1)
        held_out, held_out_labels = self._scores("held_out"), self.data["held_out"].given
        return {
            "epoch": epoch,
            "test": self._accuracy("test"),
            "held_out": share(held_out.argmax(1) == held_out_labels),
            "held_out_loss": float(cross_entropy(held_out, held_out_labels)),
            "fitted": share(predicted == train.given),
            "memorized": share((predicted == train.given)[wrong]),
            "corrected": share((predicted == train.true)[wrong]),
        }, cross_entropy(scores, train.given, reduction="none")


def share(hits: Tensor) -> float:
    return float(hits.double().mean())


def ranking(suspicion: Tensor, wrong: Tensor) -> dict[str, float]:
    """How well wrong labels come first; equal scores count as half."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    truth, scores = wrong.numpy(), suspicion.double().numpy()
    if not np.isfinite(scores).all():
        return {"auroc": math.nan, "average_precision": math.nan}
    return {
        "auroc": float(roc_auc_score(truth, scores)),
        "average_precision": float(average_precision_score(truth, scores)),
    }


def run_one(run: dict[str, Any], rows: dict[str, Row] = ROWS) -> dict[str, Any]:
    """The line of one run."""
    began = time.process_time()
    row, arm = rows[run["row"]], ARMS[run["arm"]]
    outcome = Trial(row, arm, run["setting"], run["seed"]).run()
    cost = {"seconds": round(time.process_time() - began, 1)}
    return {"key": key(run), "run": run} | outcome | cost | provenance("cpu", 1)


def key(run: dict[str, Any]) -> str:
    """Identity of a run: its fields as text."""
    return json.dumps(run, sort_keys=True)


def run_missing(runs: Iterator[dict[str, Any]], results: Results) -> None:
    for run in runs:
        if results.recorded(key(run)) is None:
            print("started", *run.values(), flush=True)
            line = run_one(run)
            results.add(line)
            shown = {k: line.get("last", {}).get(k) for k in ("test", "held_out", "memorized")}
            print(line["status"], shown, f"{line['seconds']} s of CPU time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--left", action="store_true", help="only say what is left to run")
    parser.add_argument("--table", action="store_true", help="only write the tables")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.results / "wrong_labels.jsonl")
    if not (options.left or options.table):
        for name, count, arms in WAVES:
            if name in options.rows:
                run_missing(choice_runs(name, arms), results)
                lines = list(results.lines().values())
                run_missing(iter(reported_runs(name, count, arms, lines)), results)
    print(left(list(results.lines().values())))
    if not options.left:
        text = table(options.results)
        (options.results / "wrong_labels.md").write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
