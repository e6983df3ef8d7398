"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from neuvar._batches import Generators, describe, length
from neuvar._eval_mode import eval_mode
from neuvar._validate import integer
from neuvar.baselines import SAM
from neuvar.continual import SI, Penalty
from neuvar.measures.loss_and_accuracy import (
    Loss,
    are_classes,
    batch_weights,
    counted_targets,
    half_to_float,
)
from neuvar.noise import scale
from neuvar.optim import NVRM
from neuvar.optim.layout import bare
from neuvar.optim.wrapper import Wrapper
from neuvar.schedule import BSchedule
from neuvar.train.checkpoint import (
    Checkpoint,
    Fingerprint,
    check_state,
    data_fingerprint,
    options_fingerprint,
    weights_fingerprint,
)
from neuvar.train.evaluation import autocast, check_batches, clean_weights, device_of

Measure = Callable[[nn.Module], Mapping[str, float]]
Observe = Callable[[tuple[Tensor, ...], Tensor], None]
CHECK_EVERY = 20
"""Batches between two checks that the loss is finite; each check waits for the device."""

_TRAINED: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()
"""Hashes of a model's weights before and after its training in this process."""


class EpochsOfBatches(Protocol):
    """Batches that depend on the number of the epoch only, such as :class:`neuvar.data.Batches`.

    A checkpoint identifies them by their method ``fingerprint()``, which returns a dict of plain
    values. Without this method it identifies them by their first batch.
    """

    def __len__(self) -> int: ...

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]: ...


@dataclass(frozen=True)
class Fit:
    """The result of :func:`fit`.

    Attributes:
        status: "finished", or "diverged" if the loss or a weight became infinite or nan.
        reason: when and how it diverged.
        epochs: number of completed epochs.
        curves: each metric after each epoch: "loss", the mean training loss; "running_accuracy",
            the accuracy on the batches during training, if labels are classes; and the metrics of
            ``measure`` and ``measure_perturbed``. Labels that the loss ignores are left out.
    """

    status: str
    reason: str | None
    epochs: int
    curves: dict[str, list[float]]

    @property
    def finished(self) -> bool:
        """Whether the training did not diverge."""
        return self.status == "finished"


def fit(
    model: nn.Module,
    batches: EpochsOfBatches | Iterable[Any],
    optimizer: Optimizer,
    *,
    epochs: int,
    loss: Loss = cross_entropy,
    schedule: LRScheduler | None = None,
    b_schedule: BSchedule | None = None,
    penalty: Penalty | None = None,
    clip: float = 0.0,
    accumulate: int = 1,
    precision: str = "float32",
    measure: Measure | None = None,
    measure_perturbed: Measure | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    observe: Observe | None = None,
    progress: Callable[[float], None] | None = None,
    writer: Any = None,
) -> Fit:
    """Train a network, and measure it at clean weights after each epoch.

    Works with any optimizer; :class:`neuvar.baselines.SAM` takes two gradients per step. When
    training ends, also by an exception, the model has clean weights.

    With a checkpoint, an interrupted training resumes and ends with exactly the weights and metrics
    of an uninterrupted one. Resuming sets torch's random state, which dropout uses. The checkpoint
    of another training is refused; see :class:`Checkpoint`. With a :class:`neuvar.data.Batches` it
    is saved at any step, with a ``DataLoader`` or another iterable only between two epochs. For
    these, resuming is exact if order and augmentation use global generators or the loader's own; it
    also sets the random states of NumPy and Python.

    Args:
        model: the network, on the device to train on.
        batches: a :class:`neuvar.data.Batches`, a ``DataLoader``, a list of batches, or another
            iterable that can be iterated once per epoch. A batch is a tuple or a list that begins
            with inputs and labels. An object with a method ``epoch(number, start=0)`` must always
            return the same batches for the same numbers.
        optimizer: trains the model's parameters.
        epochs: total number of epochs.
        loss: a mean over the examples of a batch.
        schedule: learning-rate schedule, stepped after each epoch; must not need a metric.
        b_schedule: schedule of the optimizer's b, stepped after each optimizer step.
        penalty: added to the loss; see :class:`neuvar.continual.Penalty`.
        clip: maximum norm of the gradient; 0 for no clipping.
        accumulate: number of batches whose mean gradient makes one step; the last step of an epoch
            may have fewer.
        precision: "float32", or "bf16" or "fp16" with automatic mixed precision.
        measure: called as ``measure(model)`` after each epoch, at clean weights in evaluation mode.
        measure_perturbed: the same at perturbed weights, if the optimizer adds noise.
        checkpoint: file to save to; resumes if it exists.
        observe: called as ``observe(batch, scores)`` for every training batch, with the scores of
            the perturbed network.
        progress: called with the finished fraction of all steps.
        writer: an object with TensorBoard's ``add_scalar(tag, value, step)``.

    >>> from neuvar.data import Batches, mnist_excerpt
    >>> from neuvar.models import mlp
    >>> from neuvar.train import make_optimizer
    >>> model = mlp((784, 32, 10), seed=0)
    >>> optimizer = make_optimizer("nvrm-adam", model.parameters(), lr=1e-3, b=0.03)
    >>> result = fit(model, Batches(mnist_excerpt().train, 128, seed=0), optimizer, epochs=2)
    >>> result.status, result.curves["loss"][1] < result.curves["loss"][0]
    ('finished', True)
    """
    if isinstance(checkpoint, (str, Path)):
        checkpoint = Checkpoint(checkpoint)
    loop = Loop(**locals())  # its first fields are the arguments
    if checkpoint is None:
        return loop.run()
    # A model that was trained in this process, and not changed since, continues its training: after
    # Ctrl-C in a notebook, or with the next task. Its initial weights are those of its first fit().
    now = weights_fingerprint(model)
    before, after = _TRAINED.get(bare(model), (now, now))
    start = before if after == now else now
    loop.resume(checkpoint, start)
    try:
        return loop.run()
    finally:
        with suppress(RuntimeError):  # do not hide the first exception
            _TRAINED[bare(model)] = start, weights_fingerprint(model)


def _metrics(name: str, result: Any) -> Mapping[str, float]:
    if not isinstance(result, Mapping):
        raise ValueError(f"{name} must return a dict of names and numbers, got {result!r}")
    return result


class _DivergedError(Exception):
    """The loss is not finite."""


@dataclass
class Loop:
    """A training and its state; for the options see :func:`fit`."""

    model: nn.Module
    batches: Any
    optimizer: Optimizer
    epochs: int
    loss: Loss
    schedule: LRScheduler | None
    b_schedule: BSchedule | None
    penalty: Penalty | None
    clip: float
    accumulate: int
    precision: str
    measure: Measure | None
    measure_perturbed: Measure | None
    checkpoint: Checkpoint | None
    observe: Observe | None
    progress: Callable[[float], None] | None
    writer: Any
    epoch: int = 0
    batch: int = 0
    curves: dict[str, list[float]] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.epochs = integer("epochs", self.epochs, low=0)
        self.clip = scale("clip", self.clip)
        self.accumulate = integer("accumulate", self.accumulate, low=1)
        self.device = device_of(self.model)
        own = set(map(id, self.model.parameters()))
        if not any(id(p) in own for group in self.optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "optimizer has no parameter of model, so training would change nothing; make the "
                "optimizer with this model"
            )
        self.autocast = autocast(self.device, self.precision)
        # Only numbered batches let a training resume inside an epoch.
        self.numbered = callable(getattr(self.batches, "epoch", None))
        if not self.numbered:
            check_batches(self.batches, many_times=True)
        self.generators = Generators(self.device, None if self.numbered else self.batches)
        self.count = length(self.batches)
        if self.count == 0:
            raise ValueError("batches is empty; a training needs at least one")
        if isinstance(self.schedule, ReduceLROnPlateau):
            raise ValueError("schedule must not need a metric, got ReduceLROnPlateau")
        b_schedule: Any = self.b_schedule
        fits = isinstance(b_schedule, BSchedule) and b_schedule.optimizer is self.optimizer
        if b_schedule is not None and not fits:
            raise ValueError("b_schedule must be a BSchedule of the same optimizer")
        if isinstance(self.penalty, SI) and isinstance(self.optimizer, SAM):
            raise ValueError("penalty SI needs one gradient per step, but SAM takes two")
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        # Over an epoch: losses, correct predictions, and the weights of both.
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        # The parts with a state dict, in the order of loading: the first ones refuse the state of
        # another training before anything is loaded.
        self.parts: dict[str, Any] = {
            "b_schedule": self.b_schedule,
            "penalty": self.penalty,
            "schedule": self.schedule,
            "model": bare(self.model),
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "random": self.generators,
        }

    def run(self) -> Fit:
        """Train until the last epoch, or until the loss diverges."""
        reason, trains = None, self.epoch < self.epochs
        if isinstance(self.optimizer, Wrapper):
            self.optimizer.train()
        try:
            while self.epoch < self.epochs:
                self._train_epoch()
                self._record_metrics()
                self.epoch, self.batch = self.epoch + 1, 0
                self.sums.zero_()
                if self.epoch < self.epochs:
                    self._save_if_due()
        except _DivergedError as error:
            reason = str(error)
        except BaseException:
            with suppress(RuntimeError):  # do not hide the first exception
                self._remove_noise()
            raise
        self._remove_noise()
        # The loss of the last step was computed before it.
        if reason is None and not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            reason = f"the weights were not finite after epoch {self.epoch}"
        if reason is None and trains and self.checkpoint is not None:
            self.checkpoint.write(self.state_dict())
        return Fit("diverged" if reason else "finished", reason, self.epoch, self.curves)

    def _remove_noise(self) -> None:
        if isinstance(self.optimizer, Wrapper):
            self.optimizer.eval()
        elif isinstance(self.optimizer, SAM):
            self.optimizer.descend()

    def _save_if_due(self) -> None:
        if self.checkpoint is not None and self.checkpoint.due():
            self.checkpoint.write(self.state_dict())

    def _train_epoch(self) -> None:
        self.model.train()
        stream, count = self._stream(), self.count
        while group := list(islice(stream, self.accumulate)):
            self._step(group)
            before, self.batch = self.batch, self.batch + len(group)
            if self.batch // CHECK_EVERY > before // CHECK_EVERY and self.batch != count:
                self._check_loss()
                if self.progress is not None and count is not None:
                    self.progress((self.epoch + min(self.batch / count, 1.0)) / self.epochs)
            if self.numbered and count is not None and self.batch != count:
                self._save_if_due()
        if not self.batch:
            raise ValueError(f"batches is empty in epoch {self.epoch + 1}")
        self._check_loss()
        if self.progress is not None:
            self.progress((self.epoch + 1) / self.epochs)
        if self.schedule is not None:
            self.schedule.step()

    def _stream(self) -> Iterator[tuple[Tensor, ...]]:
        """The batches of this epoch that are left."""
        if self.numbered:
            yield from self.batches.epoch(self.epoch, start=self.batch)
            return
        for name in ("sampler", "batch_sampler"):
            # Samplers of distributed training need the number of the epoch.
            set_epoch = getattr(getattr(self.batches, name, None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)
        for batch in self.batches:
            pair = isinstance(batch, (tuple, list)) and all(map(torch.is_tensor, batch[:2]))
            if not pair or len(batch) < 2:
                raise ValueError(
                    "batches must give tuples that begin with a tensor of inputs and a tensor of "
                    f"labels, got {describe(batch)}; for a DataLoader, let its collate_fn return "
                    "(inputs, labels)"
                )
            yield tuple(batch)

    def _check_loss(self) -> None:
        if not math.isfinite(float(self.sums[0])):
            raise _DivergedError(
                f"the training loss was not finite in epoch {self.epoch + 1}, by batch {self.batch}"
            )

    def _step(self, group: list[tuple[Tensor, ...]]) -> None:
        optimizer = self.optimizer
        self._backward(group, count=True)
        if isinstance(optimizer, SAM):
            optimizer.climb()
            self._backward(group, count=False)
            optimizer.descend()  # a gradient scaler may skip the step
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
            with self.autocast:
                scores = self.model(inputs)
            value = self.loss(half_to_float(scores), labels)
            if count:
                self._add_to_sums(value.detach(), scores.detach(), labels)
                if self.observe is not None:
                    self.observe(batch, scores.detach())
            value = value / len(group) if len(group) > 1 else value
            if self.penalty is not None and number == 0:
                value = value + self.penalty(self.model)
            if isinstance(self.optimizer, NVRM):
                self.optimizer.report_loss(value)
            self.scaler.scale(value).backward()

    def _add_to_sums(self, value: Tensor, scores: Tensor, labels: Tensor) -> None:
        weight, number = batch_weights(self.loss, scores, labels).to(self.device).unbind()
        # If the loss ignores all labels of the batch, their mean is nan.
        total = torch.where(weight == 0, weight, value * weight)
        if are_classes(scores, labels):
            used, correct = counted_targets(self.loss, scores, labels), scores.argmax(1) == labels
            right = (correct if used is None else correct & used).sum(dtype=torch.float64)
        else:
            right = torch.full_like(number, math.nan)
        self.sums += torch.stack([total, right, weight, number])

    def _record_metrics(self) -> None:
        loss, accuracy = (self.sums[:2] / self.sums[2:]).tolist()
        metrics = {"loss": loss} | ({} if math.isnan(accuracy) else {"running_accuracy": accuracy})
        optimizer = self.optimizer
        with eval_mode(self.model):
            if self.measure is not None:
                with clean_weights(optimizer):
                    metrics |= _metrics("measure", self.measure(self.model))
            noisy = isinstance(optimizer, Wrapper) and optimizer.has_noise
            if self.measure_perturbed is not None and noisy:
                with optimizer.perturbed():  # type: ignore[attr-defined]
                    metrics |= _metrics("measure_perturbed", self.measure_perturbed(self.model))
        for name, value in metrics.items():
            self.curves.setdefault(name, []).append(float(value))
            if self.writer is not None:
                self.writer.add_scalar(name, float(value), self.epoch + 1)

    def resume(self, checkpoint: Checkpoint, start: str) -> None:
        """Resume if the checkpoint holds a state; ``start`` is the hash of the initial weights."""
        if getattr(self.batches, "persistent_workers", False):
            raise ValueError(
                "batches must be a DataLoader with persistent_workers=False if there is a "
                "checkpoint: the random state of its workers cannot be saved"
            )
        parts = {"loss": self.loss, "schedule": self.schedule, "penalty": self.penalty}
        self.fingerprint = options_fingerprint(self.optimizer, parts)
        self.fingerprint |= {"clip": self.clip, "precision": self.precision}
        self.fingerprint |= data_fingerprint(self.batches, self.device) | {"initial weights": start}
        checkpoint.read()
        if (saved := checkpoint.saved) is not None:
            own = self.state_dict()
            check_state(saved, own, epochs=self.epochs, strict=checkpoint.strict)
            for name, part in self.parts.items():
                if part is not None:
                    part.load_state_dict(saved[name])
            checkpoint.saved = None  # the next training does not resume from it
            self.epoch, self.batch = int(saved["epoch"]), int(saved["batch"])
            self.curves = {name: list(values) for name, values in saved["curves"].items()}
            self.sums = saved["sums"].to(self.device)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on."""
        states = {n: None if part is None else part.state_dict() for n, part in self.parts.items()}
        wrapped = getattr(self.optimizer, "inner", None)
        around = "" if wrapped is None else f" around {type(wrapped).__name__}"
        kind = {
            "optimizer": type(self.optimizer).__name__ + around,
            "number of batches": self.count,
            "accumulate": self.accumulate,
            "kind of batches": "numbered" if self.numbered else "iterable",
        }
        return states | {
            "kind": kind,
            "epoch": self.epoch,
            "batch": self.batch,
            "curves": self.curves,
            "sums": self.sums,
            "fingerprint": self.fingerprint,
        }
