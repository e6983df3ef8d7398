"""Train once with neural variability, and see which labels the network does not believe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from neuvar.cleaning.inputs import Examples, read_examples
from neuvar.cleaning.issues import Array, LabelIssues
from neuvar.cleaning.judging import checked_labels, judge_labels
from neuvar.data import Batches, normalization
from neuvar.measures.checks import whole_number
from neuvar.optim import NVRMSGD
from neuvar.train import fit
from neuvar.train.evaluation import autocast, device_of, in_evaluation_mode, not_half

DROPS = 3
"""The learning rate is divided by ten after each third of the training."""
AT_ONCE = 500
"""Examples in a batch of an evaluation."""


class Feed(Protocol):
    """Batches of inputs, labels and numbers of examples."""

    def __len__(self) -> int: ...

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]: ...


def find_label_issues(
    model: nn.Module | Any,
    data: Any,
    *,
    trained: bool = False,
    b: float | str = "auto",
    epochs: int = 30,
    batch_size: int = 128,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: str = "float32",
    names: Sequence[str] | None = None,
    progress: Callable[[float], None] | None = None,
) -> LabelIssues:
    """Find wrong labels with one training run.

    A network under weight noise does not fit labels that do not belong. A copy of the model is
    trained on the labels as they are, and the probabilities that each example got whenever its turn
    came, at a network disturbed anew each time, are averaged: a history over epochs and a vote of
    many networks that costs nothing. By these the labels are judged; see :func:`judge_labels`.

    Args:
        model: any classifier that gives one score for each class; it is left as it is. Or
            probabilities from elsewhere, shape (n, classes): then nothing is trained.
        data: a pair of inputs and labels (arrays, tensors), a :class:`neuvar.data.Dataset` or
            :class:`~neuvar.data.Split`, a torch dataset, or a folder with a folder of images for
            each class. Labels alone if the model is probabilities.
        trained: take the model as it is, and do not train; one that has memorized the labels has
            little to say.
        b: scale of the noise, or "auto".
        epochs: how often all examples are seen; the learning rate is divided by ten after each
            third.
        batch_size: examples in a batch.
        lr: learning rate of SGD at the beginning.
        momentum: of SGD.
        weight_decay: of SGD.
        seed: of order and noise; the weights are the model's own.
        device: where to train.
        precision: "float32", or "bf16" or "fp16" with automatic mixed precision.
        names: the name of each class; by default those of the data.
        progress: called with the share of the training that is done.

    >>> from neuvar.data import mnist_excerpt
    >>> from neuvar.labels import corrupt
    >>> from neuvar.models import mlp
    >>> train = mnist_excerpt().train
    >>> given = corrupt("symmetric", train.labels[:1000], 0.2, classes=10, seed=0)
    >>> data = train.images[:1000], given.noisy
    >>> found = find_label_issues(mlp((784, 64, 10), seed=0), data, b=0.03, epochs=5)
    >>> wrong = given.mask.numpy()
    >>> bool(wrong[found.ranked[:100]].mean() > 0.9)
    True
    """
    if not isinstance(model, nn.Module):
        labels = data if _is_bare(data) else read_examples(data).labels
        return judge_labels(model, checked_labels(labels), names=names)
    examples = read_examples(data)
    if trained:
        found = probabilities_of(model, examples, precision=precision)
    else:
        _, found = train_once(
            model,
            examples,
            b=b,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            seed=seed,
            device=device,
            precision=precision,
            progress=progress,
        )
    return judge_labels(found, examples.labels, names=names or examples.names)


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
) -> tuple[nn.Module, Array]:
    """A trained copy of the model, and the mean probabilities that examples got in training."""
    epochs = whole_number("epochs", epochs, least=1)
    check_scores(model, examples)
    trained = copy.deepcopy(model).to(device)
    optimizer = NVRMSGD(
        trained.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay, b=b, seed=seed
    )
    history = History(len(examples.labels), len(examples.names), torch.device(device))
    found = fit(
        trained,
        feed(examples, batch_size, seed=seed, device=device),
        optimizer,
        epochs=epochs,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, -(-epochs // DROPS)),
        precision=precision,
        observe=history,
        progress=progress,
    )
    if not found.finished:
        raise ValueError(f"the training diverged: {found.reason}; try a smaller lr or b")
    return trained, history.mean()


class History:
    """Mean of the probabilities that each example got, each time it was trained on."""

    def __init__(self, count: int, classes: int, device: torch.device) -> None:
        self._sums = torch.zeros(count, classes, dtype=torch.float64, device=device)

    def __call__(self, batch: tuple[Tensor, ...], scores: Tensor) -> None:
        self._sums[batch[2]] += softmax(scores.double(), 1)

    def mean(self) -> Array:
        """Probabilities, with rows that sum to 1."""
        return (self._sums / self._sums.sum(1, keepdim=True)).cpu().numpy()


def probabilities_of(model: nn.Module, examples: Examples, *, precision: str = "float32") -> Array:
    """What a network as it is makes of the examples, in evaluation mode."""
    check_scores(model, examples)
    device, found = device_of(model), []
    with torch.no_grad(), in_evaluation_mode(model):
        for inputs, *_ in feed(examples, AT_ONCE, shuffle=False, device=device).epoch(0):
            with autocast(device, precision):
                scores = model(inputs)
            found.append(softmax(not_half(scores).double(), 1).cpu())
    return torch.cat(found).numpy()


def check_scores(model: nn.Module, examples: Examples) -> None:
    """Refuse a network that does not give one score for each class."""
    first = next(iter(feed(examples, 2, shuffle=False, device=device_of(model)).epoch(0)))
    with torch.no_grad(), in_evaluation_mode(model):
        scores = model(first[0])
    classes, wanted = len(examples.names), len(first[0])
    if not isinstance(scores, Tensor) or scores.shape != (wanted, classes):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"model must give one score for each of {classes} classes, shape ({wanted}, {classes}) "
            f"for {wanted} examples, got {got}"
        )


def feed(
    examples: Examples,
    size: int,
    *,
    device: torch.device | str,
    seed: int = 0,
    shuffle: bool = True,
) -> Feed:
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
        self.size = whole_number("batch_size", size, least=1)
        self._parts, self._device = parts, device
        self._seed, self._shuffle = whole_number("seed", seed, least=0), shuffle

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


def _is_bare(data: Any) -> bool:
    """Whether data is labels alone."""
    pair = isinstance(data, tuple) and len(data) == 2 and not np.isscalar(data[0])
    return not pair and np.ndim(data.cpu() if isinstance(data, Tensor) else data) == 1
