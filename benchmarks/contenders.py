"""The optimizers that the benchmark compares, each with the training step its authors ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from ivon import IVON
from pytorch_optimizer import SAM
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from networks import Case
from neuvar import NVRMSGD, NVRMAdam, NVRMAdamW

NAMED = {torch.optim.SGD: NVRMSGD, torch.optim.Adam: NVRMAdam, torch.optim.AdamW: NVRMAdamW}
B = 1e-3
"""Scale of the noise; the cost does not depend on it."""


@dataclass(frozen=True)
class Trainer:
    """A network in training: ``step`` is one full training step, ``clean`` copies the weights
    that the method holds to be its solution."""

    model: nn.Module
    step: Callable[[], Tensor]
    clean: Callable[[], list[Tensor]]


Data = tuple[Tensor, Tensor]


def copies(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def ordinary_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> Tensor:
    """The training step of plain PyTorch, with which NVRM works as it is."""
    inputs, targets = data
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def plain(case: Case, data: Data, *, fused: bool | None = None) -> Trainer:
    """The inner optimizer by itself: torch's default, or with fused kernels."""
    model = case.build()
    optimizer = case.inner(model.parameters(), **case.options, fused=fused)
    return Trainer(model, partial(ordinary_step, model, optimizer, data), partial(copies, model))


def nvrm(
    case: Case, data: Data, *, mode: str = "exact", sampler: str = "table", known: bool = True
) -> Trainer:
    """NVRM by name, created with the model or from its parameters."""
    model = case.build()
    given = model if known else model.parameters()
    optimizer = NAMED[case.inner](given, **case.options, b=B, mode=mode, sampler=sampler)

    def clean() -> list[Tensor]:
        with optimizer.denoised():
            return copies(model)

    return Trainer(model, partial(ordinary_step, model, optimizer, data), clean)


class NaiveNVRM:
    """The paper's update as one would write it down, θ_t + ε_t - ε_{t-1}, with both ε kept.

    It draws in place and makes no temporaries, which is kinder to it than the usual code.
    """

    def __init__(self, inner: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
        self.inner = inner
        self.params = params
        self.old = [torch.zeros_like(p) for p in params]
        self.new = [torch.zeros_like(p) for p in params]

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for p, eps in zip(self.params, self.old, strict=True):
            p.sub_(eps, alpha=B)
        self.inner.step()
        for p, eps in zip(self.params, self.new, strict=True):
            torch.randn(p.shape, out=eps)
            p.add_(eps, alpha=B)
        self.old, self.new = self.new, self.old


def naive(case: Case, data: Data) -> Trainer:
    """The paper's update, written naively around the inner optimizer."""
    model = case.build()
    inner = case.inner(model.parameters(), **case.options, fused=True)
    optimizer = NaiveNVRM(inner, list(model.parameters()))

    def clean() -> list[Tensor]:
        return [p - B * eps for p, eps in zip(copies(model), optimizer.old, strict=True)]

    return Trainer(model, partial(ordinary_step, model, optimizer, data), clean)


def ivon(case: Case, data: Data) -> Trainer:
    """IVON with one sample a step; it takes the inner optimizer's place."""
    model = case.build()
    inputs, targets = data
    # Its noise has the standard deviation 1 / sqrt(ess * (hess_init + weight_decay)), about B.
    optimizer = IVON(model.parameters(), lr=1e-3, ess=1 / B**2)

    def step() -> Tensor:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return Trainer(model, step, partial(copies, model))


def sam(case: Case, data: Data) -> Trainer:
    """SAM around the inner optimizer: a second pass at the perturbed weights."""
    model = case.build()
    inputs, targets = data
    optimizer = SAM(model.parameters(), case.inner, **case.options, fused=True)

    def passes() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss.detach()

    def step() -> Tensor:
        loss = passes()
        optimizer.step(passes)
        return loss

    return Trainer(model, step, partial(copies, model))


CONTENDERS: dict[str, Callable[[Case, Data], Trainer]] = {
    "plain": plain,
    "fused": partial(plain, fused=True),
    "NVRM": nvrm,
    "NVRM replay": partial(nvrm, mode="replay"),
    "NVRM fresh": partial(nvrm, sampler="fresh"),
    "NVRM parameters": partial(nvrm, known=False),
    "naive": naive,
    "IVON": ivon,
    "SAM": sam,
}
PLAIN = ["plain", "fused"]
PEERS = ["naive", "IVON", "SAM"]


def check(name: str, trainer: Trainer) -> None:
    """Make sure that a contender, in its next step, does what it ought to.

    SAM goes forward twice and all others once; the gradient of the last pass is taken at weights
    other than the clean ones for all but the plain optimizers; the step moves the clean weights,
    and loss and gradients are finite.
    """
    seen: list[list[Tensor]] = []
    before = trainer.clean()
    handle = trainer.model.register_forward_pre_hook(lambda *_: seen.append(copies(trainer.model)))
    loss = trainer.step()
    handle.remove()

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(map(torch.equal, a, b))

    faults = {
        f"went forward {len(seen)} times": len(seen) != (2 if name == "SAM" else 1),
        "took its gradient at the wrong weights": same(seen[-1], before) != (name in PLAIN),
        "did not move its weights": same(trainer.clean(), before),
        "has a loss or gradients that are not finite": not all_finite(trainer, loss),
    }
    if found := [fault for fault, present in faults.items() if present]:
        raise RuntimeError(f"contender {name!r} {', and '.join(found)}")


def all_finite(trainer: Trainer, loss: Tensor) -> bool:
    """Whether the loss and every gradient are finite."""
    gradients = [p.grad for p in trainer.model.parameters()]
    return all(g is not None and bool(g.isfinite().all()) for g in (loss, *gradients))
