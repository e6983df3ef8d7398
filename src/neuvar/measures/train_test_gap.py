"""The gap between training data and new data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from neuvar._batches import Feed
from neuvar._validate import probability
from neuvar.measures.estimate import Estimate
from neuvar.measures.landscape import Landscape, Loss
from neuvar.measures.loss_and_accuracy import are_classes, half_to_float, scalar


@dataclass(frozen=True)
class GeneralizationGap:
    """How much worse a model is on new data than on its training data.

    Errors are those from the finite number of new data. ``loss_gap`` is test minus train,
    ``accuracy_gap`` train minus test. Without classes, ``train_accuracy`` is nan and the other
    accuracies are None.
    """

    train_loss: float
    test_loss: Estimate
    loss_gap: Estimate
    train_accuracy: float
    test_accuracy: Estimate | None
    accuracy_gap: Estimate | None


def generalization_gap(
    model: nn.Module,
    loss: Loss,
    train: Any,
    test: Any,
    *,
    confidence: float = 0.95,
    feed: Feed | None = None,
    batch_size: int = 1024,
) -> GeneralizationGap:
    r"""Measure how much worse a model is on new data.

    .. math:: L(\theta) - L(\theta, S)

    ``train`` are the training data without augmentation, ``test`` data that the model has not
    seen. The other arguments are as for :func:`neural_variability`.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> train = torch.randn(50, 3), torch.arange(50) % 2
        >>> test = torch.randn(50, 3), torch.arange(50) % 2
        >>> gap = generalization_gap(model, nn.functional.cross_entropy, train, test)
        >>> gap.loss_gap.samples
        50
    """
    probability("confidence", confidence)
    with Landscape(model, loss, train, feed=feed, batch_size=batch_size) as landscape:
        seen = landscape.clean
    with Landscape(model, loss, test, feed=feed, batch_size=batch_size) as landscape:
        losses, hits = example_losses(landscape)
    test_loss = Estimate.of(losses.numpy(), confidence)
    test_accuracy = None if hits is None else Estimate.of(hits.numpy(), confidence)
    return GeneralizationGap(
        train_loss=seen.loss,
        test_loss=test_loss,
        loss_gap=_shifted(test_loss, 1, -seen.loss),
        train_accuracy=seen.accuracy,
        test_accuracy=test_accuracy,
        accuracy_gap=None if test_accuracy is None else _shifted(test_accuracy, -1, seen.accuracy),
    )


def _shifted(estimate: Estimate, sign: int, offset: float) -> Estimate:
    """The estimate times a sign plus a constant."""
    low, high = sorted(sign * end + offset for end in estimate.interval)
    mean = sign * estimate.mean + offset
    return Estimate(mean, estimate.stderr, (low, high), estimate.samples, estimate.confidence)


@torch.no_grad()
def example_losses(landscape: Landscape) -> tuple[Tensor, Tensor | None]:
    """Loss of each example and, for classification, its accuracy."""
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    with landscape.batches.one_pass() as batches:
        for batch in batches:
            outputs, targets = landscape.feed(landscape.model, batch)
            if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
                raise ValueError(
                    "the loss of single examples needs outputs and targets that are tensors, got "
                    f"{type(outputs).__name__} and {type(targets).__name__}"
                )
            outputs = half_to_float(outputs)
            losses.append(loss_per_example(landscape.loss, outputs, targets).double().cpu())
            check_mean(landscape.loss(outputs, targets), losses[-1])
            if are_classes(outputs, targets):
                right = (outputs.argmax(1) == targets).double().cpu()
                hits.append(right.reshape(len(right), -1).mean(1))
    return torch.cat(losses), torch.cat(hits) if hits else None


def check_mean(batch_loss: Tensor, losses: Tensor) -> None:
    """Refuse a loss of a batch that is not the mean of the losses of its examples."""
    mean = float(losses.mean())
    if not abs(float(batch_loss) - mean) <= 1e-3 * abs(mean) + 1e-6:
        raise ValueError(
            "loss must be the mean of the losses of single examples, but with class weights or "
            f"ignored targets it is not: {float(batch_loss):.6g} for a batch with mean {mean:.6g}"
        )


def loss_per_example(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of each row as a batch of one."""

    def of_one(output: Tensor, target: Tensor) -> Tensor:
        return scalar(loss(output.unsqueeze(0), target.unsqueeze(0)))

    try:
        return vmap(of_one)(outputs, targets)
    except RuntimeError:  # a loss that depends on values cannot be vectorized
        rows = zip(outputs, targets, strict=True)
        return torch.stack([of_one(output, target) for output, target in rows])
