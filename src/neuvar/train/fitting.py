"""The only training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from neuvar.continual import Penalty
from neuvar.guard import bare
from neuvar.measures.checks import whole_number
from neuvar.noise import scale
from neuvar.optim import SAM
from neuvar.optim.wrapper import Wrapper
from neuvar.train.checkpoint import Checkpoint
from neuvar.train.evaluation import Loss, autocast, clean_weights, in_evaluation_mode

Measure = Callable[[nn.Module], Mapping[str, float]]
LOOK_EVERY = 20
"""Steps between two looks at whether the loss is still finite: each waits for the device."""


class EpochsOfBatches(Protocol):
    """Batches that depend on the epoch's number alone, such as :class:`neuvar.data.Batches`."""

    def __len__(self) -> int: ...

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]: ...


@dataclass(frozen=True)
class Fit:
    """How a training went.

    Attributes:
        status: "finished", or "diverged" if the loss was no finite number any more.
        reason: when and how it diverged.
        epochs: how many epochs were completed.
        curves: each metric after each epoch: the mean training loss, as "loss", the accuracy on
            the batches as they were trained on, as "running_accuracy", and what ``measure`` gave.
    """

    status: str
    reason: str | None
    epochs: int
    curves: dict[str, list[float]]

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.status == "finished"


def fit(
    model: nn.Module,
    batches: EpochsOfBatches,
    optimizer: Optimizer,
    *,
    epochs: int,
    loss: Loss = cross_entropy,
    schedule: LRScheduler | None = None,
    penalty: Penalty | None = None,
    clip: float = 0.0,
    accumulate: int = 1,
    precision: str = "float32",
    measure: Measure | None = None,
    measure_perturbed: Measure | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: Callable[[float], None] | None = None,
    writer: Any = None,
) -> Fit:
    """Train a network, and look at it at clean weights after each epoch.

    Any optimizer of torch's or ours may train; for :class:`neuvar.optim.SAM` each step takes two
    gradients. At the end the model holds clean weights. With a checkpoint, a training that was
    stopped at any moment goes on, and ends with the very weights and numbers that it would have
    had; the random state of torch, which dropout uses, is then set to what it was.

    Args:
        model: the network, on the device where it is to be trained.
        batches: inputs and labels; batch k of epoch e must always be the same.
        optimizer: trains the model's parameters.
        epochs: how many there are in all.
        loss: a mean over the examples of a batch.
        schedule: steps after each epoch.
        penalty: is added to the loss; see :class:`neuvar.continual.Penalty`.
        clip: largest norm of the gradient; 0 for none.
        accumulate: batches whose mean gradient makes up one step; the last step of an epoch may
            have fewer.
        precision: "float32", or "bf16" or "fp16" with automatic mixed precision.
        measure: called as ``measure(model)`` after each epoch, in evaluation mode, clean.
        measure_perturbed: the same, at the perturbed weights, if there is noise.
        checkpoint: where to save; a file that is there is gone on from.
        progress: called with the share of all steps that is done.
        writer: has TensorBoard's ``add_scalar(tag, value, step)``.

    >>> from neuvar.data import Batches, mnist_excerpt
    >>> from neuvar.models import mlp
    >>> from neuvar.train import make_optimizer
    >>> model = mlp((784, 32, 10), seed=0)
    >>> optimizer = make_optimizer("nvrm-adam", model.parameters(), lr=1e-3, b=0.03)
    >>> found = fit(model, Batches(mnist_excerpt().train, 128, seed=0), optimizer, epochs=2)
    >>> found.status, found.curves["loss"][1] < found.curves["loss"][0]
    ('finished', True)
    """
    if isinstance(checkpoint, (str, Path)):
        checkpoint = Checkpoint(checkpoint)
    loop = _Loop(
        model=model,
        batches=batches,
        optimizer=optimizer,
        epochs=whole_number("epochs", epochs, least=0),
        loss=loss,
        schedule=schedule,
        penalty=penalty,
        clip=scale("clip", clip),
        accumulate=whole_number("accumulate", accumulate, least=1),
        precision=precision,
        measure=measure,
        measure_perturbed=measure_perturbed,
        progress=progress,
        writer=writer,
    )
    if checkpoint is not None and (saved := checkpoint.take()) is not None:
        loop.load_state_dict(saved)
    return loop.run(checkpoint)


class _DivergedError(Exception):
    """The loss is no finite number any more."""


@dataclass
class _Loop:
    """What one training carries from step to step."""

    model: nn.Module
    batches: EpochsOfBatches
    optimizer: Optimizer
    epochs: int
    loss: Loss
    schedule: LRScheduler | None
    penalty: Penalty | None
    clip: float
    accumulate: int
    precision: str
    measure: Measure | None
    measure_perturbed: Measure | None
    progress: Callable[[float], None] | None
    writer: Any
    epoch: int = 0
    batch: int = 0
    curves: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        autocast(self.device, self.precision)  # refuses an unknown one before anything moves
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self._forget_sums()

    def _forget_sums(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)

    def run(self, checkpoint: Checkpoint | None) -> Fit:
        status, reason = "finished", None
        if isinstance(self.optimizer, Wrapper):
            self.optimizer.train()
        try:
            while self.epoch < self.epochs:
                self._train_epoch(checkpoint)
                self._look()
                self.epoch, self.batch = self.epoch + 1, 0
                self._forget_sums()
                if checkpoint is not None and checkpoint.due():
                    checkpoint.write(self.state_dict())
        except _DivergedError as error:
            status, reason = "diverged", str(error)
        if isinstance(self.optimizer, Wrapper):
            self.optimizer.eval()
        return Fit(status, reason, self.epoch, self.curves)

    def _train_epoch(self, checkpoint: Checkpoint | None) -> None:
        self.model.train()
        stream = self.batches.epoch(self.epoch, start=self.batch)
        count = len(self.batches)
        while group := list(islice(stream, self.accumulate)):
            self._step(group)
            before, self.batch = self.batch, self.batch + len(group)
            looks = self.batch // LOOK_EVERY > before // LOOK_EVERY or self.batch == count
            if looks and not math.isfinite(float(self.sums[0])):
                raise _DivergedError(
                    f"the training loss was not finite any more in epoch {self.epoch + 1}, by "
                    f"batch {self.batch}"
                )
            if self.progress is not None and looks:
                self.progress((self.epoch + self.batch / count) / self.epochs)
            if checkpoint is not None and self.batch < count and checkpoint.due():
                checkpoint.write(self.state_dict())
        if self.schedule is not None:
            self.schedule.step()

    def _step(self, group: list[tuple[Tensor, ...]]) -> None:
        optimizer = self.optimizer
        self._backward(group, count=True)
        if isinstance(optimizer, SAM):
            optimizer.climb()
            self._backward(group, count=False)
        if self.clip:
            self.scaler.unscale_(optimizer)
            if self.penalty is not None:
                self.penalty.before_clip(self.model)
            trained = [p for g in optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(trained, self.clip)
        elif self.penalty is not None and self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.penalty is not None:
            self.penalty.after_step(self.model)

    def _backward(self, group: list[tuple[Tensor, ...]], *, count: bool) -> None:
        """Gradients of the mean loss of some batches, and of the penalty."""
        self.optimizer.zero_grad()
        for number, (inputs, labels, *_) in enumerate(group):
            inputs, labels = inputs.to(self.device), labels.to(self.device)  # noqa: PLW2901
            with autocast(self.device, self.precision):
                scores = self.model(inputs)
            value = self.loss(scores.float(), labels)
            if count:
                self._count(value, scores, labels)
            value = value / len(group) if len(group) > 1 else value
            if self.penalty is not None and number == 0:
                value = value + self.penalty(self.model)
            self.scaler.scale(value).backward()

    def _count(self, value: Tensor, scores: Tensor, labels: Tensor) -> None:
        right = (scores.detach().argmax(1) == labels).sum() if scores.ndim == 2 else 0
        self.sums[0] += value.detach().double() * len(labels)
        self.sums[1] += right
        self.sums[2] += len(labels)

    def _look(self) -> None:
        """Note the metrics of an epoch."""
        found = {
            "loss": float(self.sums[0] / self.sums[2]),
            "running_accuracy": float(self.sums[1] / self.sums[2]),
        }
        # The evaluation mode of the model is one thing, the noise in its weights another.
        noisy = isinstance(self.optimizer, Wrapper) and bool(self.optimizer._weights.eps.terms)
        with in_evaluation_mode(self.model):
            for measure, weights, wanted in (
                (self.measure, clean_weights(self.optimizer), True),
                (self.measure_perturbed, nullcontext(), noisy),
            ):
                if measure is not None and wanted:
                    with weights:
                        found |= measure(self.model)
        for name, value in found.items():
            self.curves.setdefault(name, []).append(float(value))
            if self.writer is not None:
                self.writer.add_scalar(name, float(value), self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on."""
        parts: dict[str, Any] = {"model": bare(self.model), "optimizer": self.optimizer}
        parts |= {"schedule": self.schedule, "penalty": self.penalty, "scaler": self.scaler}
        return {name: part and part.state_dict() for name, part in parts.items()} | {
            "epoch": self.epoch,
            "batch": self.batch,
            "curves": self.curves,
            "sums": self.sums,
            "random": random_state(self.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        bare(self.model).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        for name, part in (("schedule", self.schedule), ("penalty", self.penalty)):
            if (part is None) != (state[name] is None):
                has = "with" if part is None else "without"
                raise ValueError(f"the checkpoint was made {has} a {name}")
            if part is not None:
                part.load_state_dict(state[name])
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self.curves = {name: list(values) for name, values in state["curves"].items()}
        self.sums = state["sums"].to(self.device)
        set_random_state(self.device, state["random"])


def random_state(device: torch.device) -> list[Tensor]:
    """States of torch's own generators, which dropout draws from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    """Set torch's own generators to saved states."""
    torch.set_rng_state(states[0])
    if device.type != "cpu" and len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)
