"""The only training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from neuvar._validate import integer
from neuvar.continual import Penalty
from neuvar.noise import scale
from neuvar.schedule import BSchedule
from neuvar.train.checkpoint import Checkpoint
from neuvar.train.evaluation import Loss
from neuvar.train.fingerprint import note_end, of_data, options, start_of
from neuvar.train.loop import EpochsOfBatches, Fit, Loop, Measure, Observe
from neuvar.train.passes import Passes


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
    """Train a network, and look at it at clean weights after each epoch.

    Any optimizer of torch or neuvar can train. :class:`neuvar.baselines.SAM` takes two gradients a
    step. At the end, also by an exception, the model holds clean weights. With a checkpoint, a
    training that was stopped at any moment goes on, and ends with the very weights and numbers that
    it would have had; the random state of torch, which dropout uses, is then set to what it was.
    The checkpoint of another training is refused; see :class:`Checkpoint`.

    A :class:`neuvar.data.Batches` is saved at any step. A ``DataLoader`` or another iterable is
    saved only between two epochs, and resumes at the beginning of the next one, exactly if its
    order and its augmentation are drawn from global generators or from the loader's own. NumPy's
    and Python's random states are then set, too.

    Args:
        model: the network, on the device where it is to be trained.
        batches: a :class:`neuvar.data.Batches`, a ``DataLoader``, a list of batches, or another
            iterable that can be gone through once an epoch. A batch is a tuple or a list that
            begins with inputs and labels. An object with a method ``epoch(number, start=0)`` gives
            its batches by number, and batch k of epoch e must always be the same.
        optimizer: trains the model's parameters.
        epochs: how many there are in all.
        loss: a mean over the examples of a batch.
        schedule: steps after each epoch; one that asks for a metric is refused.
        b_schedule: of the optimizer's b; steps after each step, unlike ``schedule``.
        penalty: is added to the loss; see :class:`neuvar.continual.Penalty`.
        clip: largest norm of the gradient; 0 for none.
        accumulate: batches whose mean gradient makes up one step; the last step of an epoch may
            have fewer.
        precision: "float32", or "bf16" or "fp16" with automatic mixed precision.
        measure: called as ``measure(model)`` after each epoch, in evaluation mode, clean.
        measure_perturbed: the same, at the perturbed weights, if they carry noise; those of a
            guarded model in evaluation mode carry none.
        checkpoint: where to save; resumes if the file exists.
        observe: called as ``observe(batch, scores)`` for every batch that is trained on, with all
            tensors of the batch and the scores that the network, perturbed as it is, gave to it.
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
    by_number = callable(getattr(batches, "epoch", None))
    loop = Loop(
        model=model,
        batches=batches if by_number else Passes(batches),  # type: ignore[arg-type]
        optimizer=optimizer,
        epochs=integer("epochs", epochs, low=0),
        loss=loss,
        schedule=schedule,
        penalty=penalty,
        clip=scale("clip", clip),
        accumulate=integer("accumulate", accumulate, low=1),
        precision=precision,
        measure=measure,
        measure_perturbed=measure_perturbed,
        observe=observe,
        progress=progress,
        writer=writer,
        b_schedule=b_schedule,
    )
    if checkpoint is None:
        return loop.run(None)
    began = start_of(model)
    loop.fingerprint = options(
        optimizer,
        loss=loss,
        schedule=schedule,
        penalty=penalty,
        clip=loop.clip,
        precision=precision,
    )
    loop.fingerprint |= of_data(loop.batches, loop.device) | {"initial weights": began}
    _resume(loop, checkpoint)
    try:
        return loop.run(checkpoint)
    finally:
        with suppress(RuntimeError):  # what stopped us matters more
            note_end(model, began)


def _resume(loop: Loop, checkpoint: Checkpoint) -> None:
    """Load what a checkpoint holds, if it has something for this training."""
    if isinstance(loop.batches, Passes):
        loop.batches.refuse_checkpoint()
    if (saved := checkpoint.take()) is not None:
        try:
            loop.load_state_dict(saved, strict=checkpoint.strict)
        except BaseException:
            checkpoint.give_back(saved)
            raise
