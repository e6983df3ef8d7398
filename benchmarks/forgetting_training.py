"""One run of the forgetting benchmark: learn permuted MNIST tasks in turn, then test them all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuvar
from neuvar.continual import EWC, MAS, SI, Penalty, Stream, permuted_tasks
from neuvar.data import Dataset, Normalization, Split, normalization
from neuvar.models import mlp

PENALTIES = {"ewc": EWC, "si": SI, "mas": MAS}
IMPORTANCE_IMAGES = 5000
"""Number of images of a task that the Fisher information and MAS's sensitivity use."""

HELD_OUT = 10_000
"""Number of training images that stand in for the test images when settings are chosen."""


@dataclass(frozen=True)
class Setting:
    """What is tuned.

    Attributes:
        optimizer: "sgd", "momentum" (SGD with momentum 0.9) or "adam"; a new one for each task.
        lr: learning rate at the start of the first task.
        b: scale of NVRM's noise; 0 for none.
        dropout: probability, after each hidden layer.
        task_decay: factor of the learning rate from one task to the next.
        within: "constant", or "linear" for a linear decay to 0 within each task.
        batch: images per step.
        penalty: "none", "ewc" (exact Fisher), "si" or "mas".
        strength: λ of the penalty.
        at: under NVRM, whether the penalty is computed at the "perturbed" or the "clean" weights.
    """

    optimizer: str
    lr: float
    b: float = 0.0
    dropout: float = 0.0
    task_decay: float = 1.0
    within: str = "constant"
    batch: int = 256
    penalty: str = "none"
    strength: float = 0.0
    at: str = "perturbed"


@dataclass(frozen=True)
class Run:
    """A setting with the seed of its permutations, weights, order and noise.

    Attributes:
        role: "choice" is tested on held-out training images, "test" on the test images.
    """

    role: str
    tasks: int
    seed: int
    setting: Setting


def execute(
    run: Run,
    data: Dataset,
    *,
    hidden: tuple[int, ...] = (1024, 1024),
    precision: str = "bfloat16",
) -> dict[str, Any]:
    """Train on all tasks in turn; returns the line for the results file.

    "final" has the accuracy of each task after the last one, "learned" the accuracy of each right
    after it was learned, both at the clean weights.
    """
    began = time.perf_counter()
    data = held_out(data) if run.role == "choice" else data
    scaling, draws = normalization(data.train.images), torch.Generator().manual_seed(run.seed)
    stream = permuted_tasks(data, run.tasks, seed=run.seed)
    sizes = (data.train.images[0].numel(), *hidden, data.classes)
    model = network(sizes, run.setting.dropout, run.seed)
    penalty = make_penalty(run.setting)
    learned, losses = [], []
    for task in stream:
        split = task.train
        split = Split(pixels(split.images, scaling), split.labels)
        lr = run.setting.lr * run.setting.task_decay**task.number
        losses.append(train_task(model, split, run.setting, lr, penalty, draws, precision))
        if not math.isfinite(losses[-1]):
            break
        model.eval()
        learned.append(accuracy(model, task.test, scaling))
        if penalty is not None and task is not stream[-1]:
            penalty.after_task(model, split.images[:IMPORTANCE_IMAGES])
    model.eval()
    final = final_accuracies(model, stream, scaling)
    return asdict(run) | {
        "final": final,
        "learned": learned,
        "mean": round(statistics.mean(final), 5),
        "losses": [round(loss, 4) if math.isfinite(loss) else None for loss in losses],
        "diverged": not math.isfinite(losses[-1]),
        "precision": precision,
        "seconds": round(time.perf_counter() - began, 1),
        "torch": torch.__version__,
    }


def network(sizes: tuple[int, ...], dropout: float, seed: int) -> nn.Module:
    """The perceptron, with dropout after each hidden layer."""
    layers: list[nn.Module] = []
    for layer in mlp(sizes, seed=seed).layers:
        layers.append(layer)
        if dropout and isinstance(layer, nn.ReLU):
            layers.append(Dropout(dropout, seed + len(layers)))
    return nn.Sequential(*layers)


class Dropout(nn.Module):
    """Dropout with a generator of its own, so that a run depends on its seed alone."""

    def __init__(self, p: float, seed: int) -> None:
        super().__init__()
        self.p, self.generator = p, torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = torch.empty_like(x, dtype=torch.float32).uniform_(generator=self.generator) >= self.p
        return x * keep / (1 - self.p)


def train_task(
    model: nn.Module,
    split: Split,
    setting: Setting,
    lr: float,
    penalty: Penalty | None,
    draws: torch.Generator,
    precision: str,
) -> float:
    """One epoch with a new optimizer; returns the loss of the last step, with its penalty."""
    model.train()
    seed = int(torch.randint(1 << 31, (), generator=draws))
    optimizer = make_optimizer(model, setting, lr, seed)
    loss = torch.zeros(())
    for rate, index in rates(lr, setting, torch.randperm(len(split), generator=draws)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        # One step each: autocast would reuse the weights of its first step otherwise.
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            outputs = model(split.images[index])
        loss = cross_entropy(outputs.float(), split.labels[index])
        if penalty is not None:
            loss = loss + penalty(model)
        loss.backward()
        optimizer.step()
        if penalty is not None:
            penalty.after_step(model)
    return loss.item()


def make_penalty(setting: Setting) -> Penalty | None:
    if setting.penalty == "none":
        return None
    return PENALTIES[setting.penalty](setting.strength, at=setting.at)


def make_optimizer(model: nn.Module, setting: Setting, lr: float, seed: int) -> Any:
    parameters = model.parameters()
    if setting.optimizer == "adam":
        inner: Any = torch.optim.Adam(parameters, lr=lr, fused=True)
    else:
        momentum = {"sgd": 0.0, "momentum": 0.9}[setting.optimizer]
        inner = torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=True)
    return neuvar.NVRM(inner, model=model, b=setting.b, seed=seed) if setting.b else inner


def rates(lr: float, setting: Setting, order: Tensor) -> Iterator[tuple[float, Tensor]]:
    """The learning rate and the images of each step of a task."""
    batches = order.split(setting.batch)
    for step, index in enumerate(batches):
        factor = 1 - step / len(batches) if setting.within == "linear" else 1.0
        yield lr * factor, index


def pixels(images: Tensor, scaling: Normalization) -> Tensor:
    """Images as normalized rows."""
    mean, deviation = (float(value.squeeze()) for value in (scaling.mean, scaling.std))
    return images.flatten(1).float().div_(255).sub_(mean).div_(deviation)


def final_accuracies(model: nn.Module, stream: Stream, scaling: Normalization) -> list[float]:
    return [accuracy(model, task.test, scaling) for task in stream]


@torch.no_grad()
def accuracy(model: nn.Module, split: Split, scaling: Normalization) -> float:
    parts = [
        (model(pixels(x, scaling)).argmax(1) == y).sum()
        for x, y in zip(split.images.split(1000), split.labels.split(1000), strict=True)
    ]
    return round(int(sum(parts)) / len(split), 5)


def held_out(data: Dataset) -> Dataset:
    """The training images alone: the last ones take the place of the test images."""
    x, y = data.train.images, data.train.labels
    count = min(HELD_OUT, len(x) // 6)
    kept = Split(x[:-count], y[:-count])
    return Dataset(f"{data.name}-held-out", data.classes, kept, Split(x[-count:], y[-count:]))
