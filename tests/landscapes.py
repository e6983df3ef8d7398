"""Models whose loss around their weights is known by calculation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Quadratic(nn.Module):
    """Loss ½ wᵀHw + gᵀw for each example, whatever its input is."""

    def __init__(self, hessian: Tensor, w: Tensor, slope: Tensor | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(w)
        self.hessian, self.slope = hessian, torch.zeros_like(w) if slope is None else slope

    def forward(self, x: Tensor) -> Tensor:
        value = self.w @ self.hessian @ self.w / 2 + self.slope @ self.w
        return value.expand(len(x))


def as_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of outputs that are losses already."""
    return outputs.mean()


def quadratic(dimension: int = 8, seed: int = 0) -> Quadratic:
    """A quadratic with a random positive Hessian, off its minimum."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)
    w = torch.randn(dimension, generator=generator, dtype=torch.float64)
    return Quadratic(root @ root.T / dimension, w)


def one_example() -> tuple[Tensor, Tensor]:
    """Data for losses that do not depend on them."""
    return torch.zeros(1, 1), torch.zeros(1)


def classes(n: int = 60, features: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and labels of three classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    mixing = torch.randn(3, features, generator=generator)
    return x, linear(x, mixing).argmax(1)


def classifier(seed: int = 0, features: int = 5) -> nn.Sequential:
    """A small network for them, with dropout and batch normalization."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(features, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 3)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
        model[1].running_mean.copy_(torch.randn(7, generator=generator) / 5)
    return model
