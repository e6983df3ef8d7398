"""What predictions averaged over 32 draws cost, beside 32 plain passes.

    python benchmarks/predicting.py [--quick] [--only TEXT] [--out results/predicting.json]

Plain: 32 forward passes over the data with softmax, without noise. Loop: a copy of the model for
each draw, noise from torch, and the mean of the probabilities. One by one and together: ours, with
batching of draws switched off and on. Ours: what it does by itself. All are timed as in
variability.py.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see optimizers.py

import torch
from torch import Tensor, nn

import neuvar
from networks import mlp, resnet
from variability import BATCH, DRAWS, B, Case, command, contenders, deep, noisy_copies

# Batching the draws of a large network takes minutes, and is never chosen.
LARGE = {"target": 1.15, "without": ("together",)}
CASES = [
    Case("784-1024-1024-10, 10,000 images", mlp, (10_000, 784), **LARGE),
    Case("784-1024-1024-10, 1,000 images", mlp, (1_000, 784), **LARGE),
    Case(
        "ResNet-10 of width 16, 256 images",
        lambda: resnet(16, (1, 1, 1, 1)),
        (256, 3, 32, 32),
        **LARGE,
    ),
    Case("20-20×30-10, 64 examples", deep, (64, 20), target=1.15),
]


@torch.no_grad()
def passes(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part).softmax(1) for part in x.split(BATCH)])


def plain(model: nn.Module, x: Tensor, y: Tensor, draws: int = DRAWS) -> Tensor:
    return sum(passes(model, x) for _ in range(draws)) / draws


def loop(model: nn.Module, x: Tensor, y: Tensor, draws: int = DRAWS) -> Tensor:
    return sum(passes(moved, x) for moved in noisy_copies(model, draws)) / draws


def ours(model: nn.Module, x: Tensor, y: Tensor, draws: int = DRAWS, **options: bool) -> Tensor:
    return neuvar.predict(model, x, b=B, draws=draws, batch_size=BATCH, **options).probabilities


if __name__ == "__main__":
    command(__doc__.splitlines()[0], CASES, contenders(plain, loop, ours))
