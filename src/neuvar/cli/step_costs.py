"""Time of a training step with NVRM, SAM and the plain optimizer, measured side by side."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from neuvar.baselines import SAM
from neuvar.models import build
from neuvar.optim import NVRM

CLASSES = 10
B = 1e-3  # the time does not depend on it
WARM_UP_STEPS = 3
TIMED_STEPS = 2

Step = Callable[[], None]


@dataclass(frozen=True)
class Cost:
    """Median and quartiles of a step's time, relative to the plain optimizer, and its median."""

    ratio: float
    low: float
    high: float
    milliseconds: float


def costs(network: str, *, batch: int, rounds: int, device: str) -> dict[str, Cost]:
    """Time every method on one network."""
    steps = {name: make(*prepare(network, batch, device)) for name, make in METHODS.items()}
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    taken: list[dict[str, float]] = []
    order, rng = list(steps), random.Random(0)  # noqa: S311, no secret
    for _ in range(rounds):
        rng.shuffle(order)
        taken.append({name: _seconds(steps[name], device) for name in order})
    return {name: _cost([t[name] for t in taken], [t["plain"] for t in taken]) for name in steps}


def _seconds(step: Step, device: str) -> float:
    """Time of a step, after an untimed one that loads the method's weights into the caches."""
    step()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step()
    _wait(device)
    return (time.perf_counter() - begin) / TIMED_STEPS


def _wait(device: str) -> None:
    """Wait for the accelerator, which runs asynchronously."""
    if device != "cpu":
        torch.accelerator.synchronize(device)


def _cost(taken: list[float], plain: list[float]) -> Cost:
    ratios = [mine / theirs for mine, theirs in zip(taken, plain, strict=True)]
    enough = ratios if len(ratios) > 1 else ratios * 2
    low, ratio, high = statistics.quantiles(enough, n=4, method="inclusive")
    return Cost(ratio, low, high, 1e3 * statistics.median(taken))


def prepare(network: str, batch: int, device: str) -> tuple[nn.Module, Optimizer, Step]:
    """A network, its plain optimizer and a function that computes a gradient."""
    shape = (1, 28, 28) if network == "mlp" else (3, 32, 32)
    model = build(network, classes=CLASSES, seed=0, shape=shape).to(device)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(batch, *shape, generator=generator).to(device)
    targets = torch.randint(CLASSES, (batch,), generator=generator).to(device)
    inner: Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if network == "mlp":
        inner = torch.optim.Adam(model.parameters(), lr=1e-3)

    def gradient() -> None:
        model.zero_grad()
        cross_entropy(model(inputs), targets).backward()

    return model, inner, gradient


def _plain(model: nn.Module, inner: Optimizer, gradient: Step) -> Step:
    def step() -> None:
        gradient()
        inner.step()

    return step


def _nvrm(model: nn.Module, inner: Optimizer, gradient: Step) -> Step:
    return _plain(model, NVRM(inner, model=model, b=B), gradient)


def _naive(model: nn.Module, inner: Optimizer, gradient: Step) -> Step:
    """The paper's update written naively: subtract ε, step, draw and add a new one."""
    params = list(model.parameters())
    generator = torch.Generator(params[0].device).manual_seed(2)
    noise = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def add_noise(sign: float) -> None:
        for p, eps in zip(params, noise, strict=True):
            p.add_(eps, alpha=sign * B)

    def step() -> None:
        gradient()
        add_noise(-1)
        inner.step()
        for eps in noise:
            eps.normal_(generator=generator)
        add_noise(1)

    return step


def _sam(model: nn.Module, inner: Optimizer, gradient: Step) -> Step:
    """A step of SAM, with its second gradient."""
    optimizer = SAM(inner, rho=0.05)

    def step() -> None:
        gradient()
        optimizer.climb()
        gradient()
        optimizer.step()

    return step


METHODS: dict[str, Callable[[nn.Module, Optimizer, Step], Step]] = {
    "plain": _plain,
    "plain, again": _plain,  # its distance from 1 is the error of the measurement
    "NVRM": _nvrm,
    "NVRM, naive": _naive,
    "SAM": _sam,
}
