"""The gap between data that was learned from and data that was not."""

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
from neuvar.measures.reading import are_classes, at_least_single, scalar


@dataclass(frozen=True)
class GeneralizationGap:
    """How much worse a model is on new data than on its training data.

    Attributes:
        train_loss: Mean loss on the training data; exact, these are all of them.
        test_loss: Mean loss on new data, which estimates that on the distribution they are from.
        loss_gap: ``test_loss - train_loss``, with the error of having finitely many new data.
        train_accuracy: Accuracy on the training data; nan if this is no classification.
        test_accuracy: Accuracy on new data, with its error; None if this is no classification.
        accuracy_gap: ``train_accuracy - test_accuracy``; None if this is no classification.
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

    The model is in evaluation mode and free of an optimizer's noise meanwhile, and left as found.

    Args:
        model: Any module.
        loss: Mean loss over a batch.
        train: What the model was trained on, in any form that :func:`neural_variability` takes.
            Give it as it is evaluated, without random augmentation.
        test: Data that it has not seen.
        confidence: Of the intervals.
        feed: ``feed(model, batch)`` returns outputs and targets of unusual batches.
        batch_size: Of a pair of tensors.

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
    """The estimate of a quantity, with its sign turned if asked, plus a constant."""
    low, high = sorted(sign * end + offset for end in estimate.interval)
    mean = sign * estimate.mean + offset
    return Estimate(mean, estimate.stderr, (low, high), estimate.samples, estimate.confidence)


@torch.no_grad()
def example_losses(landscape: Landscape) -> tuple[Tensor, Tensor | None]:
    """Loss of each example and, for classification, whether its class was right."""
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
            outputs = at_least_single(outputs)
            losses.append(each(landscape.loss, outputs, targets).double().cpu())
            refuse_if_no_mean(landscape.loss(outputs, targets), losses[-1])
            if are_classes(outputs, targets):
                right = (outputs.argmax(1) == targets).double().cpu()
                hits.append(right.reshape(len(right), -1).mean(1))
    return torch.cat(losses), torch.cat(hits) if hits else None


def refuse_if_no_mean(of_batch: Tensor, of_examples: Tensor) -> None:
    """Refuse a loss that is something else than the mean over a batch of each example's loss."""
    mean = float(of_examples.mean())
    if not abs(float(of_batch) - mean) <= 1e-3 * abs(mean) + 1e-6:
        raise ValueError(
            "loss must be the mean of the losses of single examples, but with class weights or "
            f"ignored targets it is not: {float(of_batch):.6g} for a batch whose mean is {mean:.6g}"
        )


def each(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of each row as a batch of one."""

    def of_one(output: Tensor, target: Tensor) -> Tensor:
        return scalar(loss(output.unsqueeze(0), target.unsqueeze(0)))

    try:
        return vmap(of_one)(outputs, targets)
    except RuntimeError:  # a loss that looks at numbers cannot be batched
        rows = zip(outputs, targets, strict=True)
        return torch.stack([of_one(output, target) for output, target in rows])
