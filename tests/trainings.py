"""Small trainings: batches, networks and optimizers that the tests of the training loop share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from neuvar.train import Checkpoint, make_optimizer


class StoppedError(Exception):
    """Something from outside ends a training."""


class Chunks:
    """Batches of two tensors, in an order that depends on the epoch alone; may break off."""

    def __init__(
        self, n: int = 26, size: int = 4, *, dtype: torch.dtype = torch.float32, stop: int = -1
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(n, 5, generator=generator, dtype=torch.float64).to(dtype)
        self.labels = torch.randint(0, 3, (n,), generator=generator)
        self.size, self.stop, self.given = size, stop, 0

    def __len__(self) -> int:
        return math.ceil(len(self.inputs) / self.size)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """One epoch; breaks off before batch ``stop``, counted over all epochs."""
        generator = torch.Generator().manual_seed(100 + number)
        order = torch.randperm(len(self.inputs), generator=generator)
        for batch in range(start, len(self)):
            if number * len(self) + batch == self.stop:
                raise StoppedError
            rows = order[batch * self.size : (batch + 1) * self.size]
            yield self.inputs[rows], self.labels[rows]


def network(
    *, dropout: bool = False, norm: bool = False, relu: bool = False, dtype: Any = torch.float32
) -> nn.Module:
    """A small classifier with weights that are always the same."""
    layers: list[nn.Module] = [nn.Linear(5, 7)]
    layers += [nn.BatchNorm1d(7)] if norm else []
    layers += [nn.ReLU() if relu else nn.Tanh()]
    layers += [nn.Dropout(0.3)] if dropout else []
    model = nn.Sequential(*layers, nn.Linear(7, 3)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def optimizer(
    name: str, model: nn.Module, *, known: bool = False, **others: Any
) -> torch.optim.Optimizer:
    """An optimizer by its name, with everything that it has switched on."""
    noisy = name.startswith("nvrm") or name in ("psgd", "sgld")
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01, "seed": 3}
    options |= {"b": 0.1} if noisy else {}
    options |= {"momentum": 0.9} if name.endswith(("sgd", "sgld")) else {}
    options |= {"rho": 0.1} if name.startswith("sam") else {}
    return make_optimizer(name, model if known else model.parameters(), **(options | others))


def state(model: nn.Module) -> list[Tensor]:
    """Copies of all weights and statistics."""
    return [x.detach().clone() for x in model.state_dict().values() if isinstance(x, Tensor)]


class StoppingCheckpoint(Checkpoint):
    """Writes after each step; the process ends after, or just before, one of the writes."""

    def __init__(self, path: Any, *, after: int = 0, before: int = 0) -> None:
        super().__init__(path, every=0)
        self.after, self.before, self.written = after, before, 0

    def write(self, fit: dict[str, Any]) -> None:
        """Write, and perhaps end."""
        self.written += 1
        if self.written == self.before:
            raise StoppedError
        super().write(fit)
        if self.written == self.after:
            raise StoppedError
