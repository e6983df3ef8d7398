"""How well a network does, at weights that nobody disturbs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from neuvar.measures.reading import counted, examples_in, weighted_mean, weights_of
from neuvar.optim.wrapper import Wrapper

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a network makes of some data.

    Attributes:
        loss: mean over the labels that count.
        accuracy: share of these whose class has the highest score.
        predictions: the class with the highest score, for each example, on the CPU.
        examples: how many there were.
    """

    loss: float
    accuracy: float
    predictions: Tensor
    examples: int


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    *,
    optimizer: Optimizer | None = None,
    loss: Loss = cross_entropy,
    precision: str = "float32",
    **arguments: Any,
) -> Evaluation:
    """Measure loss and accuracy in evaluation mode; modes are left as found.

    Labels that the loss leaves out, such as -100, count neither for the loss nor for the accuracy;
    see :func:`neuvar.neural_variability`.

    Args:
        model: the network; a batch goes to the device of its first parameter.
        batches: pairs of inputs and labels, such as :class:`neuvar.data.Batches`.
        optimizer: whose noise is taken off meanwhile; None measures the weights as they stand.
        loss: a mean over the examples of a batch.
        precision: "float32", or "bf16" or "fp16" with automatic mixed precision.
        **arguments: for the model's forward pass, such as the task of a multi-head network.

    >>> from neuvar.data import Batches, mnist_excerpt
    >>> from neuvar.models import mlp
    >>> found = evaluate(mlp(seed=0), Batches(mnist_excerpt().test, 500, shuffle=False))
    >>> found.examples, 0 < found.accuracy < 1
    (1000, True)
    """
    device = device_of(model)
    autocast(device, precision)  # refuses an unknown one before anything is done
    losses, weights, predictions, labels_seen, counts = [], [], [], [], []
    with torch.no_grad(), clean_weights(optimizer), in_evaluation_mode(model):
        for inputs, labels, *_ in batches:
            if not len(labels):
                continue  # the mean of nothing is no number
            inputs, labels = inputs.to(device), labels.to(device)  # noqa: PLW2901
            with autocast(device, precision):
                scores = model(inputs, **arguments)
            examples_in(loss, scores, labels)  # refuses an unknown class
            losses.append(loss(not_half(scores), labels))
            weights.append(weights_of(loss, scores, labels)[0])
            predictions.append(scores.argmax(1).cpu())
            labels_seen.append(labels.cpu())
            mask = counted(loss, scores, labels)
            counts.append(
                (torch.ones_like(labels, dtype=torch.bool) if mask is None else mask).cpu()
            )
    if not predictions:
        raise ValueError("batches is empty; an evaluation needs at least one example")
    if not any(bool(mask.any()) for mask in counts):
        raise ValueError("batches has no label that counts: the loss leaves all of them out")
    found, labels = torch.cat(predictions), torch.cat(labels_seen)
    accuracy = (found == labels)[torch.cat(counts)].double().mean().item()
    mean = weighted_mean(losses, torch.stack(weights).cpu())
    return Evaluation(mean, accuracy, found, len(labels))


def device_of(model: nn.Module) -> torch.device:
    """Where a network is."""
    for p in model.parameters():
        return p.device
    raise ValueError("model has no parameters")


def not_half(scores: Tensor) -> Tensor:
    """Scores in which a loss does not lose digits: half precision becomes single."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


def clean_weights(optimizer: Optimizer | None) -> AbstractContextManager[object]:
    """Take an optimizer's noise off for a while, if it is one that has any."""
    return optimizer.denoised() if isinstance(optimizer, Wrapper) else nullcontext()


def perturbed_weights(optimizer: Optimizer | None) -> AbstractContextManager[object]:
    """Let forward passes see an optimizer's noise in any mode, if it is one that has any."""
    return optimizer.perturbed() if isinstance(optimizer, Wrapper) else nullcontext()


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Automatic mixed precision, or none."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, PRECISIONS[precision])


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module gets back the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
