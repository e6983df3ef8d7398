"""Train a copy of a network on some examples, and keep what it makes of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from neuvar._batches import Generators
from neuvar._validate import integer
from neuvar.cleaning.inputs import Examples
from neuvar.cleaning.issues import Array
from neuvar.data import Batches, normalization
from neuvar.measures.loss_and_accuracy import half_to_float
from neuvar.optim import NVRMSGD
from neuvar.train import fit
from neuvar.train.evaluation import autocast, device_of
from neuvar.train.loop import EpochsOfBatches
from neuvar.train.preparing import check_trainable, clean_copy, make_layers, no_single

DROPS = 3
"""The learning rate is divided by ten after each third of the training."""
AT_ONCE = 500
"""Examples in a batch of an evaluation."""


@dataclass(frozen=True, eq=False)
class Trained:
    """What came of one training.

    Attributes:
        model: a copy of the network, trained.
        probabilities: the mean of those that examples got in training, shape (n, classes).
        b: scale of the noise at the end.
    """

    model: nn.Module
    probabilities: Array
    b: float


def train_once(
    model: nn.Module,
    examples: Examples,
    *,
    b: float | str,
    epochs: int,
    batch_size: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    seed: int,
    device: torch.device | str,
    precision: str,
    progress: Callable[[float], None] | None = None,
) -> Trained:
    """Train a copy of the model, and keep what it makes of each example on the way."""
    epochs = integer("epochs", epochs, low=1)
    check_trainable(model)
    check_scores(model, examples)
    trained = _copied(model).to(device).train()
    history = History(len(examples.labels), len(examples.names), torch.device(device))
    # Of dropout, and of layers yet to be made.
    with Generators(torch.device(device)).seeded(seed):
        make_layers(trained, lambda: trained(_inputs_of_two(examples, device_of(trained))))
        optimizer = NVRMSGD(
            trained,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            b=b,
            seed=seed,
        )
        found = fit(
            trained,
            feed(examples, no_single(len(examples), batch_size), seed=seed, device=device),
            optimizer,
            epochs=epochs,
            schedule=torch.optim.lr_scheduler.StepLR(optimizer, -(-epochs // DROPS)),
            precision=precision,
            observe=history,
            progress=progress,
        )
    if not found.finished:
        raise ValueError(f"the training diverged: {found.reason}; try a smaller lr or b")
    return Trained(trained, history.mean(), float(optimizer.param_groups[0]["b"]))


def _copied(model: nn.Module) -> nn.Module:
    """A copy at clean weights that computes in float32, whatever the precision of the model."""
    return clean_copy(model).float()


class History:
    """Mean of the probabilities that each example got, each time it was trained on."""

    def __init__(self, count: int, classes: int, device: torch.device) -> None:
        self._sums = torch.zeros(count, classes, device=device)

    def __call__(self, batch: tuple[Tensor, ...], scores: Tensor) -> None:
        self._sums[batch[2]] += softmax(scores.float(), 1)

    def mean(self) -> Array:
        """Probabilities, with rows that sum to 1."""
        sums = self._sums.cpu()
        return (sums / sums.sum(1, keepdim=True)).numpy()


def probabilities_of(model: nn.Module, examples: Examples, *, precision: str = "float32") -> Array:
    """What a network as it is makes of the examples, in evaluation mode."""
    check_scores(model, examples)
    model = _copied(model).eval()
    device, found = device_of(model), []
    with torch.no_grad():
        for inputs, *_ in feed(examples, AT_ONCE, shuffle=False, device=device).epoch(0):
            with autocast(device, precision):
                scores = model(inputs)
            found.append(softmax(half_to_float(scores).cpu().double(), 1))
    return torch.cat(found).numpy()


def check_scores(model: nn.Module, examples: Examples) -> None:
    """Refuse a network that does not give one score for each class."""
    scores, classes = scores_of_two(model, examples), len(examples.names)
    if not isinstance(scores, Tensor) or scores.shape != (2, classes):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"model must give one score for each of {classes} classes, shape (2, {classes}) for 2 "
            f"examples, got {got}"
        )


def scores_of_two(model: nn.Module, examples: Examples) -> Any:
    """What a model makes of the first two examples."""
    inputs = _inputs_of_two(examples, device_of(model))
    tried = _copied(model).eval()  # a copy, for a layer may be made by its first input
    try:
        with torch.no_grad():
            return tried(inputs)
    except (RuntimeError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"model does not take inputs of shape {tuple(inputs.shape)}: {reason}"
        ) from error


def _inputs_of_two(examples: Examples, device: torch.device) -> Tensor:
    few = Examples(examples.inputs[:2], np.arange(2), ("first", "second"))
    inputs, *_ = next(iter(feed(few, 2, shuffle=False, device=device).epoch(0)))
    return inputs


def feed(
    examples: Examples,
    size: int,
    *,
    device: torch.device | str,
    seed: int = 0,
    shuffle: bool = True,
) -> EpochsOfBatches:
    """Batches of inputs, labels and numbers; images are normalised, features are as they are."""
    labels, inputs = torch.as_tensor(examples.labels), examples.inputs
    parts = (inputs, labels, torch.arange(len(labels)))
    if inputs.dtype == torch.uint8:
        return Batches(
            parts,
            size,
            seed=seed,
            shuffle=shuffle,
            normalize=normalization(inputs),
            device=device,
        )
    return FeatureBatches(parts, size, seed=seed, shuffle=shuffle, device=device)


class FeatureBatches:
    """Batches of tensors of any kind, whose order depends on the seed and the epoch alone."""

    def __init__(
        self,
        parts: tuple[Tensor, ...],
        size: int,
        *,
        seed: int,
        shuffle: bool,
        device: torch.device | str,
    ) -> None:
        self.size = integer("batch_size", size, low=1)
        self._parts, self._device = parts, device
        self._seed, self._shuffle = integer("seed", seed, low=0), shuffle

    def __len__(self) -> int:
        return (len(self._parts[0]) + self.size - 1) // self.size

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Batches of one epoch, beginning with its batch ``start``."""
        count = len(self._parts[0])
        order = np.arange(count)
        if self._shuffle:
            order = np.random.Generator(np.random.PCG64([self._seed, number])).permutation(count)
        for batch in range(start, len(self)):
            index = torch.from_numpy(order[batch * self.size : (batch + 1) * self.size])
            yield tuple(part[index].to(self._device) for part in self._parts)
