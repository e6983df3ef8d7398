"""Small networks and steps that the tests train."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from neuvar import NVRM
from neuvar.noise import Draw, standard_noise, whole_slot


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A small network with weights that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(8, 3, generator=generator, dtype=torch.float64).to(dtype)
    return x, y


def backward(model: nn.Module, step: int) -> Tensor:
    """Add the gradient of a step's loss at the weights as they stand."""
    dtype = next(model.parameters()).dtype
    x, y = batch(step, dtype)
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Take ordinary steps."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters as they stand."""
    return [p.detach().clone() for p in model.parameters()]


def clean(model: nn.Module, optimizer: NVRM) -> list[Tensor]:
    """Copies of all clean parameters."""
    with optimizer.denoised():
        return weights(model)


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def epsilon(model: nn.Module, optimizer: NVRM) -> list[Tensor]:
    """The noise that an optimizer with one group carries, from the pure function of its record."""
    group = optimizer.param_groups[0]
    draw, start, result = Draw(*group["drawn"]), 0, []
    for index, p in enumerate(model.parameters()):
        if draw.number:
            z = standard_noise(whole_slot(tuple(p.shape), number=index, start=start), draw)
            result.append(draw.sign * group["b"] * z.to(p.dtype))
        else:
            result.append(torch.zeros_like(p))
        start += p.numel()
    return result
