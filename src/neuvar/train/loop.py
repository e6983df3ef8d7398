"""The steps of a training, and what they carry along."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from neuvar.baselines import SAM
from neuvar.continual import SI, Penalty
from neuvar.optim import NVRM
from neuvar.optim.layout import bare
from neuvar.optim.wrapper import Wrapper
from neuvar.schedule import BSchedule
from neuvar.train.checkpoint import Checkpoint
from neuvar.train.evaluation import (
    Loss,
    autocast,
    clean_weights,
    device_of,
    in_evaluation_mode,
    not_half,
    perturbed_weights,
)
from neuvar.train.fingerprint import Fingerprint, refuse_difference
from neuvar.train.passes import Passes, length
from neuvar.train.state import kind_of, random_state, refuse_another, set_random_state

Measure = Callable[[nn.Module], Mapping[str, float]]
Observe = Callable[[tuple[Tensor, ...], Tensor], None]
LOOK_EVERY = 20
"""Steps between two looks at whether the loss is still finite: each waits for the device."""


class EpochsOfBatches(Protocol):
    """Batches that depend on the epoch's number alone, such as :class:`neuvar.data.Batches`.

    With a method ``fingerprint()`` that returns a dict of plain values, a checkpoint tells them
    from others by it; without, by their first batch.
    """

    def __len__(self) -> int: ...

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]: ...


@dataclass(frozen=True)
class Fit:
    """How a training went.

    Attributes:
        status: "finished", or "diverged" if the loss, or in the end a weight, was no finite number.
        reason: when and how it diverged.
        epochs: how many epochs were completed.
        curves: each metric after each epoch: the mean training loss, as "loss", the accuracy on
            the batches as they were trained on, as "running_accuracy", if labels are classes, and
            what ``measure`` gave.
    """

    status: str
    reason: str | None
    epochs: int
    curves: dict[str, list[float]]

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.status == "finished"


class _DivergedError(Exception):
    """The loss is no finite number any more."""


@dataclass
class Loop:
    """What one training carries from step to step."""

    model: nn.Module
    batches: EpochsOfBatches | Passes
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
    observe: Observe | None
    progress: Callable[[float], None] | None
    writer: Any
    b_schedule: BSchedule | None = None
    epoch: int = 0
    batch: int = 0
    curves: dict[str, list[float]] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = device_of(self.model)
        autocast(self.device, self.precision)  # refuses an unknown one before anything moves
        self.count = length(self.batches)
        if self.count == 0:
            raise ValueError("batches is empty; a training needs at least one")
        if isinstance(self.schedule, ReduceLROnPlateau):
            raise ValueError("schedule must not ask for a metric, got ReduceLROnPlateau")
        given = self.b_schedule
        fits = isinstance(given, BSchedule) and given.optimizer is self.optimizer
        if given is not None and not fits:
            raise ValueError("b_schedule must be a BSchedule of the optimizer that trains")
        if isinstance(self.penalty, SI) and isinstance(self.optimizer, SAM):
            raise ValueError("penalty SI follows one gradient a step, but SAM takes two")
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self._forget_sums()

    def _forget_sums(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)

    def run(self, checkpoint: Checkpoint | None) -> Fit:
        try:
            reason = self._run_epochs(checkpoint)
        except BaseException:
            with suppress(RuntimeError):  # what stopped us matters more
                self._take_noise_off()
            raise
        self._take_noise_off()
        # The last step may have gone too far, and no loss was taken since.
        if reason is None and not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            reason = f"the weights were not finite any more after epoch {self.epoch}"
        return Fit("diverged" if reason else "finished", reason, self.epoch, self.curves)

    def _take_noise_off(self) -> None:
        if isinstance(self.optimizer, Wrapper):
            self.optimizer.eval()
        elif isinstance(self.optimizer, SAM):
            self.optimizer.descend()

    def _run_epochs(self, checkpoint: Checkpoint | None) -> str | None:
        """Train to the end, or until the loss diverges; returns the reason for that."""
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
            return str(error)
        return None

    def _train_epoch(self, checkpoint: Checkpoint | None) -> None:
        self.model.train()
        stream = self.batches.epoch(self.epoch, start=self.batch)
        count = self.count
        # Only batches that can be asked for by number let a training resume inside an epoch.
        inside = None if count is None or isinstance(self.batches, Passes) else checkpoint
        while group := list(islice(stream, self.accumulate)):
            self._step(group)
            before, self.batch = self.batch, self.batch + len(group)
            if self.batch // LOOK_EVERY > before // LOOK_EVERY and self.batch != count:
                self._check_loss()
                if self.progress is not None and count is not None:
                    self.progress((self.epoch + min(self.batch / count, 1.0)) / self.epochs)
            if inside is not None and self.batch != count and inside.due():
                inside.write(self.state_dict())
        if not self.batch:
            raise ValueError(f"batches is empty in epoch {self.epoch + 1}")
        self._check_loss()
        if self.progress is not None:
            self.progress((self.epoch + 1) / self.epochs)
        if self.schedule is not None:
            self.schedule.step()

    def _check_loss(self) -> None:
        if not math.isfinite(float(self.sums[0])):
            raise _DivergedError(
                f"the training loss was not finite any more in epoch {self.epoch + 1}, by "
                f"batch {self.batch}"
            )

    def _step(self, group: list[tuple[Tensor, ...]]) -> None:
        optimizer = self.optimizer
        self._backward(group, count=True)
        if isinstance(optimizer, SAM):
            optimizer.climb()
            self._backward(group, count=False)
            optimizer.descend()  # a gradient scaler may leave the step out
        if self.clip or self.penalty is not None:
            self.scaler.unscale_(optimizer)
        if self.clip:
            if self.penalty is not None:
                self.penalty.before_clip(self.model)
            trained = [p for g in optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(trained, self.clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.b_schedule is not None:
            self.b_schedule.step()
        if self.penalty is not None:
            self.penalty.after_step(self.model)

    def _backward(self, group: list[tuple[Tensor, ...]], *, count: bool) -> None:
        """Compute the gradients of the mean loss of some batches, and of the penalty."""
        self.optimizer.zero_grad()
        for number, batch in enumerate(group):
            inputs, labels = batch[0].to(self.device), batch[1].to(self.device)
            with autocast(self.device, self.precision):
                scores = self.model(inputs)
            value = self.loss(not_half(scores), labels)
            if count:
                self._count(value, scores, labels)
                if self.observe is not None:
                    self.observe(batch, scores.detach())
            value = value / len(group) if len(group) > 1 else value
            if self.penalty is not None and number == 0:
                value = value + self.penalty(self.model)
            if isinstance(self.optimizer, NVRM):
                self.optimizer.report_loss(value)
            self.scaler.scale(value).backward()

    def _count(self, value: Tensor, scores: Tensor, labels: Tensor) -> None:
        classes = scores.ndim == 2 and labels.shape == scores.shape[:1]
        right = (scores.detach().argmax(1) == labels).sum() if classes else math.nan
        self.sums[0] += value.detach().double() * len(labels)
        self.sums[1] += right
        self.sums[2] += len(labels)

    def _look(self) -> None:
        """Note the metrics of an epoch."""
        loss, accuracy = (self.sums[:2] / self.sums[2]).tolist()
        found = {"loss": loss} | ({} if math.isnan(accuracy) else {"running_accuracy": accuracy})
        with in_evaluation_mode(self.model):
            # The evaluation mode of a model is one thing, the noise in its weights another.
            optimizer = self.optimizer
            noisy = isinstance(optimizer, Wrapper) and optimizer.has_noise
            for measure, weights, wanted in (
                (self.measure, clean_weights(optimizer), True),
                (self.measure_perturbed, perturbed_weights(optimizer), noisy),
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
        parts |= {"b_schedule": self.b_schedule}
        states = {n: None if part is None else part.state_dict() for n, part in parts.items()}
        return states | {
            "kind": kind_of(self.optimizer),
            "batches": self.count,
            "accumulate": self.accumulate,
            "epoch": self.epoch,
            "batch": self.batch,
            "curves": self.curves,
            "sums": self.sums,
            "random": random_state(self.device),
            "passes": self.batches.state_dict() if isinstance(self.batches, Passes) else None,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Go on from a saved state, if it is one of such a training."""
        refuse_another(self, state)
        if (self.b_schedule is None) != (state.get("b_schedule") is None):
            has = "with" if self.b_schedule is None else "without"
            raise ValueError(f"the checkpoint was made {has} a b_schedule")
        if strict:
            refuse_difference(state["fingerprint"], self.fingerprint)
        for name in ("b_schedule", "penalty", "schedule"):
            if (part := getattr(self, name)) is not None:
                part.load_state_dict(state[name])
        bare(self.model).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self.curves = {name: list(values) for name, values in state["curves"].items()}
        self.sums = state["sums"].to(self.device)
        set_random_state(self.device, state["random"])
        if isinstance(self.batches, Passes):
            self.batches.load_state_dict(state["passes"])
