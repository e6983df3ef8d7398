"""Where and how a run is carried out: device, data, checkpoint, who is told of its progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuvar.data import Batches, Dataset, Split, load
from neuvar.experiments.runs import Recipe
from neuvar.train import Checkpoint, make_optimizer

EVALUATED_AT_ONCE = 500
LOWER = ("loss", "memorized")
"""Ends of names of metrics that are best when they are low."""


@dataclass
class Place:
    """What :func:`carry_out` was told, and what it has to hand.

    Attributes:
        device: where the network is trained.
        data: folder of data sets, or None.
        checkpoint: from which an interrupted run goes on, or None.
        progress: is told the share of the run that is done, or None.
        writer: TensorBoard's, or None.
    """

    device: torch.device
    data: str | Path | None = None
    checkpoint: Checkpoint | None = None
    progress: Callable[[float], None] | None = None
    writer: Any = None
    began: float = field(default_factory=time.perf_counter)
    earlier: float = 0.0

    def resume(self, run: Recipe) -> dict[str, Any]:
        """What a checkpoint of the same run says about its outer state; empty without one."""
        if self.checkpoint is None:
            return {}
        # The key does not say how a run is carried out, but one run is carried out in one way.
        same = {"key": run.key, "precision": run.precision}
        if not self.checkpoint.read():
            self.checkpoint.outer = same
            return {}
        if not same.items() <= self.checkpoint.outer.items():
            raise ValueError(
                f"{self.checkpoint.path} is the checkpoint of another run, or of this one in "
                "another precision; remove it"
            )
        self.earlier = float(self.checkpoint.outer.get("seconds", 0.0))
        return self.checkpoint.outer

    def seconds(self) -> float:
        """Time spent on the run, also before it was interrupted."""
        return self.earlier + time.perf_counter() - self.began

    def report(self, done: float) -> None:
        """Tell how much of the run is done."""
        if self.checkpoint is not None:
            self.checkpoint.outer["seconds"] = self.seconds()
        if self.progress is not None:
            self.progress(done)

    def dataset(self, run: Recipe) -> Dataset:
        """The images that a run uses: the first ones of both parts."""
        found = load(run.data, folder=self.data)
        return Dataset(
            found.name,
            found.classes,
            first(found.train, run.images, "images"),
            first(found.test, run.test_images, "test_images"),
        )

    def place(self, model: nn.Module, run: Recipe) -> nn.Module:
        """Bring a network to the device, in the memory format and compiled if the run says so."""
        model = model.to(self.device)
        if run.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if run.compile:
            model.compile()
        return model

    def batches(self, split: Split, run: Recipe, size: int, **options: Any) -> Any:
        """Batches on the device, in the memory format of the run."""
        found = Batches(split, size, device=self.device, **options)
        return ChannelsLast(found) if run.channels_last else found


@dataclass(frozen=True)
class ChannelsLast:
    """Batches whose images lie in memory with their channels last."""

    inner: Batches

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return map(channels_last, self.inner)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Batches of one epoch; see :class:`neuvar.data.Batches`."""
        return map(channels_last, self.inner.epoch(number, start=start))

    def fingerprint(self) -> dict[str, Any]:
        """What tells these batches from others; the memory format does not."""
        return self.inner.fingerprint()


def channels_last(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A batch whose images are laid out with their channels last."""
    return batch[0].contiguous(memory_format=torch.channels_last), *batch[1:]


def first(split: Split, count: int, name: str) -> Split:
    """The first images of a split; all for a count of 0."""
    if not 0 <= count <= len(split):
        raise ValueError(f"{name} must be from 0 to {len(split)}, got {count}")
    return Split(split.images[:count], split.labels[:count]) if count else split


def optimizer_for(run: Recipe, model: nn.Module, *, seed: int) -> torch.optim.Optimizer:
    """The optimizer that a run asks for."""
    return make_optimizer(
        run.optimizer,
        model,
        lr=run.lr,
        momentum=run.momentum,
        weight_decay=run.weight_decay,
        b="auto" if run.auto_b else run.b,
        noise=run.noise,
        rho=run.rho,
        seed=seed,
    )


def outcome(
    status: str,
    reason: str | None,
    curves: dict[str, list[float]],
    *,
    seconds: float,
    **others: Any,
) -> dict[str, Any]:
    """What is recorded of a run: curves, and of each its last and its best value."""
    kept = {name: [_number(x) for x in values] for name, values in curves.items()}
    finite = {n: [x for x in v if x is not None] for n, v in kept.items()}
    return {
        "status": status,
        "reason": reason,
        "curves": kept,
        "last": {name: values[-1] for name, values in kept.items() if values},
        "best": {n: (min if n.endswith(LOWER) else max)(v) for n, v in finite.items() if v},
        "seconds": round(seconds, 2),
    } | others


def _number(x: float) -> float | None:
    """A number with six digits, which is what trials are sure of; None for one beyond all."""
    return float(f"{x:.6g}") if math.isfinite(x) else None
