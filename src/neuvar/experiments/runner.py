"""Run one experiment run: data, network, checkpoint, progress, and what is recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, and the run's time would include that
from torch import Tensor, nn

from neuvar.data import Batches, Dataset, Split, load
from neuvar.experiments.run_spec import Run, RunSpec, Training
from neuvar.train import Checkpoint, make_optimizer

EVALUATION_BATCH = 500
LOWER_IS_BETTER = ("loss", "memorized")
"""Suffixes of metrics whose best value is the lowest."""


def run_one(
    run: Run,
    *,
    device: str | torch.device = "cpu",
    data: str | Path | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    progress: Callable[[float], None] | None = None,
    writer: Any = None,
) -> dict[str, Any]:
    """Train as a run says and return what is recorded of it.

    Resumes if the checkpoint file exists, with the same numbers as an uninterrupted run. The file
    is not removed.

    Args:
        run: a :class:`Training` or :class:`Tasks`.
        device: where the network is trained.
        data: folder with data sets, searched before the cache; see :func:`neuvar.data.load`.
        checkpoint: a file to save to once a minute.
        progress: called with the fraction of the run that is done.
        writer: has TensorBoard's ``add_scalar(tag, value, step)``.

    Returns:
        A JSON object: status ("finished" or "diverged"), reason, curves, last and best values,
        realised rate of wrong labels, seeds, seconds.

    >>> from neuvar.experiments import Training
    >>> run = Training(data="mnist-excerpt", images=500, test_images=100, width=32, epochs=2)
    >>> outcome = run_one(run)
    >>> outcome["status"], len(outcome["curves"]["test_accuracy"])
    ('finished', 2)
    """
    from neuvar.experiments.tasks import run_tasks
    from neuvar.experiments.training import run_training

    if isinstance(checkpoint, (str, Path)):
        checkpoint = Checkpoint(checkpoint)
    context = RunContext(torch.device(device), data, checkpoint, progress, writer)
    return run_training(run, context) if isinstance(run, Training) else run_tasks(run, context)


@dataclass
class RunContext:
    """The arguments of :func:`run_one`, and what both kinds of runs do with them."""

    device: torch.device
    data: str | Path | None = None
    checkpoint: Checkpoint | None = None
    progress: Callable[[float], None] | None = None
    writer: Any = None
    _start: float = field(default_factory=time.perf_counter)
    _earlier_seconds: float = 0.0

    def resume(self, run: RunSpec) -> dict[str, Any]:
        """The outer state in the checkpoint of this run; empty without a checkpoint."""
        if self.checkpoint is None:
            return {}
        # Precision is not part of the key, but a run must not change it halfway.
        identity = {"key": run.key, "precision": run.precision}
        if not self.checkpoint.read():
            self.checkpoint.outer = identity
            return {}
        if not identity.items() <= self.checkpoint.outer.items():
            raise ValueError(
                f"{self.checkpoint.path} is the checkpoint of another run, or of this one in "
                "another precision; remove it"
            )
        self._earlier_seconds = float(self.checkpoint.outer.get("seconds", 0.0))
        return self.checkpoint.outer

    def report(self, fraction: float) -> None:
        """Report how much of the run is done."""
        if self.checkpoint is not None:
            self.checkpoint.outer["seconds"] = self.seconds()
        if self.progress is not None:
            self.progress(fraction)

    def seconds(self) -> float:
        """Seconds spent on the run, including those before an interruption."""
        return self._earlier_seconds + time.perf_counter() - self._start

    def dataset(self, run: RunSpec) -> Dataset:
        """The first images of both splits, as many as the run uses."""
        data = load(run.data, folder=self.data)
        return Dataset(
            data.name,
            data.classes,
            first_images(data.train, run.images, "images"),
            first_images(data.test, run.test_images, "test_images"),
        )

    def prepare(self, model: nn.Module, run: RunSpec) -> nn.Module:
        """Move a network to the device; set its memory format and compile it if the run says so."""
        model = model.to(self.device)
        if run.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if run.compile:
            model.compile()
        return model

    def batches(self, split: Split, run: RunSpec, size: int, **options: Any) -> Batches:
        """Batches on the device, in the memory format of the run."""
        kind = ChannelsLast if run.channels_last else Batches
        return kind(split, size, device=self.device, **options)

    def optimizer(self, run: RunSpec, model: nn.Module, *, seed: int) -> torch.optim.Optimizer:
        """The optimizer of the run."""
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
        self, status: str, reason: str | None, curves: dict[str, list[float]], **others: Any
    ) -> dict[str, Any]:
        """What is recorded of a run; numbers that are not finite become None."""
        rounded = {name: [_round(x) for x in values] for name, values in curves.items()}
        finite = {n: [x for x in v if x is not None] for n, v in rounded.items()}
        best = {n: (min if n.endswith(LOWER_IS_BETTER) else max)(v) for n, v in finite.items() if v}
        return {
            "status": status,
            "reason": reason,
            "curves": rounded,
            "last": {name: values[-1] for name, values in rounded.items() if values},
            "best": best,
            "seconds": round(self.seconds(), 2),
        } | others


def _round(x: float) -> float | None:
    """Six significant digits; None if not finite."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


def first_images(split: Split, count: int, name: str) -> Split:
    """The first images of a split; all if count is 0."""
    if not 0 <= count <= len(split):
        raise ValueError(f"{name} must be from 0 to {len(split)}, got {count}")
    return Split(split.images[:count], split.labels[:count]) if count else split


class ChannelsLast(Batches):
    """Batches with images in the channels-last memory format."""

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Batches of one epoch."""
        batches = super().epoch(number, start=start)
        return ((x.contiguous(memory_format=torch.channels_last), *y) for x, *y in batches)
