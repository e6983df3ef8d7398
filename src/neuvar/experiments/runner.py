"""Run one experiment run: data, network, checkpoint, progress, and what is recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, and the run's time would include that
from torch import Tensor, nn

from neuvar.data import Batches, Dataset, Split, load
from neuvar.experiments.run_spec import Run, Training
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
        data: folder with datasets, searched before the cache; see :func:`neuvar.data.load`.
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

    start = time.perf_counter()
    if isinstance(checkpoint, (str, Path)):
        checkpoint = Checkpoint(checkpoint)
    if checkpoint is not None:
        # Precision is not part of the key, but a run must not change it halfway.
        identity = {"key": run.key, "precision": run.precision}
        if not checkpoint.read():
            checkpoint.outer = identity
        elif not identity.items() <= checkpoint.outer.items():
            raise ValueError(
                f"{checkpoint.path} is the checkpoint of another run, or of this one in another "
                "precision; remove it"
            )
        start -= float(checkpoint.outer.get("seconds", 0.0))
    whole = load(run.data, folder=data)
    splits = []
    for split, field in ((whole.train, "images"), (whole.test, "test_images")):
        count = getattr(run, field) or len(split)
        if count > len(split):
            raise ValueError(f"{field} must be from 0 to {len(split)}, got {count}")
        splits.append(Split(split.images[:count], split.labels[:count]))
    dataset = replace(whole, train=splits[0], test=splits[1])
    context = RunContext(run, dataset, torch.device(device), start, checkpoint, progress, writer)
    return run_training(run, context) if isinstance(run, Training) else run_tasks(run, context)


@dataclass(frozen=True)
class RunContext:
    """The arguments of :func:`run_one`, with the data loaded, and what both kinds of runs share."""

    run: Run
    data: Dataset
    device: torch.device
    start: float  # earlier than it was, by the time spent before an interruption
    checkpoint: Checkpoint | None = None
    progress: Callable[[float], None] | None = None
    writer: Any = None

    def report(self, fraction: float, done: int = 0, of: int = 1) -> None:
        """Report how much of the run is done: a fraction of a part, and the parts before it."""
        if self.checkpoint is not None:
            self.checkpoint.outer["seconds"] = time.perf_counter() - self.start
        if self.progress is not None:
            self.progress((done + fraction) / of)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move a network to the device; set its memory format and compile it if the run says so."""
        model = model.to(self.device)
        if self.run.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.run.compile:
            model.compile()
        return model

    def batches(self, split: Split, size: int, **options: Any) -> Batches:
        """Batches on the device, in the memory format of the run."""
        kind = ChannelsLast if self.run.channels_last else Batches
        return kind(split, size, device=self.device, **options)

    def optimizer(self, model: nn.Module, *, seed: int) -> torch.optim.Optimizer:
        """The optimizer of the run."""
        run = self.run
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

    @property
    def fit_options(self) -> dict[str, Any]:
        """What both kinds of runs pass to :func:`neuvar.train.fit`."""
        names = ("epochs", "clip", "accumulate", "precision")
        return {name: getattr(self.run, name) for name in names} | {"checkpoint": self.checkpoint}

    def outcome(
        self, status: str, reason: str | None, curves: dict[str, list[float]], **others: Any
    ) -> dict[str, Any]:
        """What is recorded of a run: six significant digits, and None for what is not finite."""
        rounded = {
            name: [float(f"{x:.6g}") if math.isfinite(x) else None for x in values]
            for name, values in curves.items()
        }
        finite = {n: [x for x in v if x is not None] for n, v in rounded.items()}
        best = {n: (min if n.endswith(LOWER_IS_BETTER) else max)(v) for n, v in finite.items() if v}
        return {
            "status": status,
            "reason": reason,
            "curves": rounded,
            "last": {name: values[-1] for name, values in rounded.items() if values},
            "best": best,
            "seconds": round(time.perf_counter() - self.start, 2),
        } | others


class ChannelsLast(Batches):
    """Batches with images in the channels-last memory format."""

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Batches of one epoch."""
        batches = super().epoch(number, start=start)
        return ((x.contiguous(memory_format=torch.channels_last), *y) for x, *y in batches)
