"""Loss and accuracy of a network at its clean weights."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from neuvar._batches import check_iterable, describe
from neuvar._eval_mode import eval_mode
from neuvar._validate import one_of
from neuvar.measures.loss_and_accuracy import (
    Loss,
    batch_weights,
    count_examples,
    counted_targets,
    half_to_float,
    weighted_mean,
)
from neuvar.optim.noisy_parameters import held_clean
from neuvar.optim.wrapper import Wrapper

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of :func:`evaluate`.

    Attributes:
        loss: mean loss, without ignored labels.
        accuracy: share of correct predictions, without ignored labels.
        predictions: the predicted class of each example, on the CPU.
        examples: number of examples.
    """

    loss: float
    accuracy: float
    predictions: Tensor
    examples: int


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    *,
    loss: Loss = cross_entropy,
    precision: str = "float32",
    **arguments: Any,
) -> Evaluation:
    """Measure loss and accuracy in evaluation mode, then restore the modes of all modules.

    The weights are clean, except inside ``optimizer.perturbed()``. Labels that the loss ignores,
    such as -100, are left out of loss and accuracy; see :func:`neuvar.neural_variability`.

    Args:
        model: the network; batches are moved to its device.
        batches: pairs of inputs and labels, such as :class:`neuvar.data.Batches`.
        loss: a mean over the examples of a batch.
        precision: "float32", or "bf16" or "fp16" with automatic mixed precision.
        **arguments: for the model's forward pass, such as the task of a multi-head network.

    >>> from neuvar.data import Batches, mnist_excerpt
    >>> from neuvar.models import mlp
    >>> result = evaluate(mlp(seed=0), Batches(mnist_excerpt().test, 500, shuffle=False))
    >>> result.examples, 0 < result.accuracy < 1
    (1000, True)
    """
    check_batches(batches)
    device = device_of(model)
    mixed_precision = autocast(device, precision)
    losses, weights, predictions, correct = [], [], [], []
    clean = held_clean(model.parameters(), even_if_perturbed=False)
    with torch.no_grad(), clean, eval_mode(model):
        for inputs, labels, *_ in batches:
            if not len(labels):
                continue  # the mean loss of an empty batch is nan
            inputs, labels = inputs.to(device), labels.to(device)  # noqa: PLW2901
            with mixed_precision:
                scores = model(inputs, **arguments)
            count_examples(loss, scores, labels)  # refuses an unknown class
            losses.append(loss(half_to_float(scores), labels))
            weights.append(batch_weights(loss, scores, labels)[0])
            predictions.append(scores.argmax(1).cpu())
            mask, hits = counted_targets(loss, scores, labels), predictions[-1] == labels.cpu()
            correct.append(hits if mask is None else hits[mask.cpu()])
    if not predictions:
        raise ValueError("batches is empty; an evaluation needs at least one example")
    predicted, hits = torch.cat(predictions), torch.cat(correct)
    if not hits.numel():
        raise ValueError("the loss ignores all labels in batches")
    mean = weighted_mean(losses, torch.stack(weights).cpu()).item()
    return Evaluation(mean, hits.double().mean().item(), predicted, len(predicted))


def check_batches(batches: Any, *, many_times: bool = False) -> None:
    """Refuse a pair of tensors in place of batches, and what is not an iterable."""
    if isinstance(batches, (tuple, list)) and batches and all(map(torch.is_tensor, batches)):
        raise ValueError(
            "batches must hold one tuple (inputs, labels) per batch, got "
            f"{describe(batches)}; put the tensors into a DataLoader with TensorDataset"
        )
    accepted = "a neuvar.data.Batches, a DataLoader or another iterable of batches"
    check_iterable("batches", batches, accepted, many_times=many_times)


def device_of(model: nn.Module) -> torch.device:
    """The device of a network's first parameter."""
    for p in model.parameters():
        return p.device
    raise ValueError("model has no parameters")


def clean_weights(optimizer: Optimizer) -> AbstractContextManager[object]:
    """Remove an optimizer's weight noise inside the block, if it has any."""
    return optimizer.denoised() if isinstance(optimizer, Wrapper) else nullcontext()


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Automatic mixed precision, or a no-op for float32."""
    one_of("precision", precision, PRECISIONS)
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, PRECISIONS[precision])
