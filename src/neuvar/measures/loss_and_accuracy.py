"""Loss and accuracy over batches, with ignored targets and class weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from neuvar._batches import batch_length

Loss = Callable[[Any, Any], Tensor]
"""Called as ``loss(outputs, targets)``; returns the mean over the batch."""

IGNORE_INDEX = -100
"""The target that torch's losses ignore by default."""


class LossAndAccuracy(NamedTuple):
    """Mean loss over all data and, for classification, accuracy (else nan)."""

    loss: float
    accuracy: float


def scalar(value: Any) -> Tensor:
    """The value of a loss, which must be one number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss must return the mean over the batch as a tensor, got {got}")
    return value.reshape(())


def are_classes(outputs: Any, targets: Any) -> bool:
    """Whether outputs are logits along their second axis, and targets are classes."""
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.ndim == targets.ndim + 1 >= 2
        and outputs.is_floating_point()
        and not (targets.is_floating_point() or targets.is_complex())
        and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)
        and outputs.shape[1] > 1
    )


def _loss_options(loss: Any) -> tuple[bool, int | None, Tensor | None]:
    """Whether a loss is torch's cross entropy or NLL, its ignore_index and its class weights."""
    keywords: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        keywords, loss = loss.keywords | keywords, loss.func
    is_torch = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or any(
        loss is function for function in (F.cross_entropy, F.nll_loss)
    )
    ignored = keywords.get("ignore_index", getattr(loss, "ignore_index", IGNORE_INDEX))
    weight = keywords.get("weight", getattr(loss, "weight", None)) if is_torch else None
    return is_torch, ignored, weight


def counted_targets(loss: Any, outputs: Any, targets: Any) -> Tensor | None:
    """Mask of the targets that a loss averages over; None if the targets are not integers.

    A loss ignores targets equal to its ``ignore_index``, -100 if it has none. A loss that is not
    torch's also ignores negative targets if the outputs are logits.
    """
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or not targets.ndim:
        return None
    if targets.is_floating_point() or targets.is_complex():
        return None
    is_torch, ignored, _ = _loss_options(loss)
    mask = torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored
    has_scores = isinstance(outputs, Tensor) and outputs.ndim == targets.ndim + 1
    if has_scores and outputs.numel() > targets.numel() and not is_torch:
        mask &= targets >= 0
    return mask


def batch_weights(loss: Any, outputs: Any, targets: Any) -> Tensor:
    """Weights of a batch in the mean loss and in the accuracy over all data, float64 of shape (2,).

    The weight is the number of targets that are not ignored, so the batch size does not matter.
    With class weights, torch divides by their sum, which is then the weight of the loss.
    """
    mask = counted_targets(loss, outputs, targets)
    if mask is None:
        return torch.full((2,), batch_length(outputs, targets), dtype=torch.float64)
    count = mask.sum(dtype=torch.float64)
    weight = _loss_options(loss)[2]
    if weight is None or not are_classes(outputs, targets):
        return torch.stack([count, count])
    each = weight.to(targets.device)[targets.clamp(0, len(weight) - 1).long()]
    return torch.stack([(each * mask).sum(dtype=torch.float64), count])


def count_examples(loss: Any, outputs: Any, targets: Any) -> int:
    """Number of examples with a target that is not ignored; refuses unknown classes."""
    size, mask = batch_length(outputs, targets), counted_targets(loss, outputs, targets)
    if mask is None or not size:
        return size
    if _loss_options(loss)[0] and are_classes(outputs, targets):
        check_classes(targets[mask], outputs.shape[1])
    return int(mask.reshape(size, -1).any(1).sum())


def check_classes(labels: Tensor, classes: int) -> None:
    """Refuse labels outside 0 to ``classes - 1``."""
    unknown = labels[(labels < 0) | (labels >= classes)]
    if len(unknown):
        raise ValueError(
            f"data has the label {int(unknown[0])}, but the model has {classes} classes: labels "
            f"must be from 0 to {classes - 1}"
        )


def batch_accuracy(outputs: Any, targets: Any, mask: Tensor | None = None) -> Tensor:
    """Accuracy in a batch over targets >= 0, within ``mask`` if given; nan without classes."""
    if not are_classes(outputs, targets):
        return torch.tensor(math.nan)
    mask = targets >= 0 if mask is None else mask & (targets >= 0)
    right = ((outputs.argmax(1) == targets) & mask).sum()
    accuracy: Tensor = right / mask.sum().clamp(min=1)
    return accuracy


def half_to_float(outputs: Any) -> Any:
    """Convert outputs of half precision to float32, so that their loss is not rounded."""
    if isinstance(outputs, Tensor) and outputs.dtype in (torch.float16, torch.bfloat16):
        return outputs.float()
    return outputs


def weighted_mean(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Mean over batches; values with weight 0 may be nan."""
    stacked, used = torch.stack(list(values)).detach().cpu().double(), weights > 0
    return weights[used] @ stacked[used] / (weights.sum() if used.any() else math.nan)


def loss_per_example(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of each example, computed as a batch of one."""

    def single_loss(output: Tensor, target: Tensor) -> Tensor:
        return scalar(loss(output.unsqueeze(0), target.unsqueeze(0)))

    try:
        return vmap(single_loss)(outputs, targets)
    except RuntimeError:  # vmap refuses a loss with branches that depend on values
        return torch.stack(list(map(single_loss, outputs, targets)))


def check_mean(batch_loss: Tensor, losses: Tensor) -> None:
    """Refuse a batch loss that is not the mean of the losses of its examples."""
    mean = float(losses.mean())
    if not abs(float(batch_loss) - mean) <= 1e-3 * abs(mean) + 1e-6:
        raise ValueError(
            "loss must be the mean of the losses of single examples, but with class weights or "
            f"ignored targets it is not: {float(batch_loss):.6g} for a batch with mean {mean:.6g}"
        )
