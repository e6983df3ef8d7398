"""What one pass of a model over data shows."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuvar._batches import batch_length

IGNORED = -100
"""The target that torch's losses leave out unless they are told another."""


@dataclass(frozen=True)
class Reading:
    """Loss and, for classification, accuracy (else nan) of a model over all data."""

    loss: float
    accuracy: float


def scalar(value: Any) -> Tensor:
    """What a loss returned, if it is one number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss must return the mean over the batch as a tensor, got {got}")
    return value.reshape(())


def are_classes(outputs: Any, targets: Any) -> bool:
    """Whether outputs are scores of classes along their second axis and targets are classes."""
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.ndim == targets.ndim + 1 >= 2
        and outputs.is_floating_point()
        and not (targets.is_floating_point() or targets.is_complex())
        and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)
        and outputs.shape[1] > 1
    )


class _Targets(NamedTuple):
    """How a loss treats targets: whether it is torch's, which one it leaves out, class weights."""

    known: bool
    ignored: int | None
    weight: Tensor | None


def _targets_of(loss: Any) -> _Targets:
    given: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        given, loss = loss.keywords | given, loss.func
    known = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or any(
        loss is function for function in (F.cross_entropy, F.nll_loss)
    )
    ignored = given.get("ignore_index", getattr(loss, "ignore_index", IGNORED))
    weight = given.get("weight", getattr(loss, "weight", None)) if known else None
    return _Targets(known, ignored, weight)


def counted(loss: Any, outputs: Any, targets: Any) -> Tensor | None:
    """Which targets a loss takes its mean over; None if they are no whole numbers.

    A loss leaves out its ``ignore_index``, which torch's have, and any other may have as an
    attribute; without one, -100. Nor does a target below 0 count if there are scores of classes for
    it: torch's losses would refuse it, and others can only leave it out.
    """
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or not targets.ndim:
        return None
    if targets.is_floating_point() or targets.is_complex():
        return None
    known, ignored, _ = _targets_of(loss)
    counts = torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored
    # Scores of classes, along whichever axis.
    scored = isinstance(outputs, Tensor) and outputs.ndim == targets.ndim + 1
    scored = scored and outputs.numel() > targets.numel()
    return counts & (targets >= 0) if scored and not known else counts


def weights_of(loss: Any, outputs: Any, targets: Any) -> Tensor:
    """Weights of a batch in the mean loss and in the accuracy of all data, float64 of shape (2,).

    They are how many targets count, so that it does not matter how data are divided into batches.
    Under class weights torch's mean is over their sum, which is then the weight of the loss.
    """
    counts = counted(loss, outputs, targets)
    if counts is None:
        return torch.full((2,), batch_length(outputs, targets), dtype=torch.float64)
    number = counts.sum(dtype=torch.float64)
    weight = _targets_of(loss).weight
    if weight is None or not are_classes(outputs, targets):
        return torch.stack([number, number])
    each = weight.to(targets.device)[targets.clamp(0, len(weight) - 1).long()]
    return torch.stack([(each * counts).sum(dtype=torch.float64), number])


def examples_in(loss: Any, outputs: Any, targets: Any) -> int:
    """How many examples of a batch have a target that counts; an unknown class is refused."""
    size, counts = batch_length(outputs, targets), counted(loss, outputs, targets)
    if counts is None or not size:
        return size
    if _targets_of(loss).known and are_classes(outputs, targets):
        refuse_unknown_class(targets, outputs.shape[1], counts)
    return int(counts.reshape(size, -1).any(1).sum())


def refuse_unknown_class(labels: Tensor, classes: int, counts: Tensor | None = None) -> None:
    """Refuse labels that are none of the classes; ``counts`` says which ones matter."""
    unknown = (labels < 0) | (labels >= classes)
    found = labels[unknown if counts is None else unknown & counts]
    if len(found):
        raise ValueError(
            f"data has the label {int(found[0])}, but the model has {classes} classes: labels must "
            f"be from 0 to {classes - 1}"
        )


def hit_rate(outputs: Any, targets: Any, counts: Tensor | None = None) -> Tensor:
    """Share of right classes in a batch, those below 0 left out; nan where there are none.

    ``counts`` says which targets matter; all by default.
    """
    if not are_classes(outputs, targets):
        return torch.tensor(math.nan)
    counts = targets >= 0 if counts is None else counts & (targets >= 0)
    right = ((outputs.argmax(1) == targets) & counts).sum()
    share: Tensor = right / counts.sum().clamp(min=1)
    return share


def at_least_single(outputs: Any) -> Any:
    """Outputs of half precision in single: their loss would be rounded too much to compare."""
    if isinstance(outputs, Tensor) and outputs.dtype in (torch.float16, torch.bfloat16):
        return outputs.float()
    return outputs


def weighted_mean(values: list[Tensor], weights: Tensor) -> float:
    """Mean over batches, each with its weight; one without weight may be nan."""
    found, matter = torch.stack(values).detach().cpu().double(), weights > 0
    return float(found[matter] @ weights[matter] / weights.sum()) if matter.any() else math.nan


def average(readings: list[Reading]) -> Reading:
    """Mean of several readings."""
    n = len(readings)
    return Reading(sum(r.loss for r in readings) / n, sum(r.accuracy for r in readings) / n)


def agree(one: Reading, other: Reading, clean: Reading, rounding: float) -> bool:
    """Whether two ways of computing a reading show the same effect of the noise.

    Where that is too small to be told from rounding, they do not.
    """
    effect = abs(other.loss - clean.loss)
    return 100 * rounding < effect < math.inf and (
        abs(one.loss - other.loss) <= 1e-3 * effect + 10 * rounding
    )
