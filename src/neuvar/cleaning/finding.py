"""Train once with neural variability, and see which labels the network does not believe."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax
from torch.nn.parameter import is_lazy

from neuvar.cleaning.inputs import Examples, read_examples, read_given
from neuvar.cleaning.issues import Array, LabelIssues
from neuvar.cleaning.judging import checked_probabilities, judge_labels
from neuvar.data import Batches, normalization
from neuvar.measures.batches import Generators
from neuvar.measures.checks import whole_number
from neuvar.optim import NVRMSGD
from neuvar.optim.weights import held_clean
from neuvar.train import fit
from neuvar.train.evaluation import autocast, device_of, in_evaluation_mode, not_half
from neuvar.train.loop import EpochsOfBatches

DROPS = 3
"""The learning rate is divided by ten after each third of the training."""
AT_ONCE = 500
"""Examples in a batch of an evaluation."""
WITH_NAMES = (Examples, str, os.PathLike)
"""Data that say what their classes are."""


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
            :class:`~neuvar.data.Split`, a torch dataset of pairs or dicts, or a folder with a
            folder of images for each class. Labels alone if the model is probabilities. Whole
            numbers are words if the model embeds them, else features. Images of bytes are
            normalised by their own mean and deviation; other inputs are taken as they are, so bring
            features to a similar scale.
        trained: take the model as it is, and do not train; one that has memorized the labels has
            little to say. Give it the inputs that it was trained on, as floats.
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
    training: dict[str, Any] = {
        "b": b,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "seed": seed,
        "device": device,
        "progress": progress,
    }
    if not isinstance(model, nn.Module):
        _refuse_unused(training | {"trained": trained, "precision": precision}, "probabilities")
        given = checked_probabilities(model)
        labels, known = read_given(data, given.shape[1], names)
        return judge_labels(given, labels, names=known)
    if trained:
        _refuse_unused(training, "a trained model")
    examples = _for_the_scores_of(model, data, names)
    if trained:
        found, last = probabilities_of(model, examples, precision=precision), None
    else:
        run = train_once(model, examples, precision=precision, **training)
        found, last = run.probabilities, run.b
    _refuse_nothing_learned(found, examples)
    return replace(judge_labels(found, examples.labels, names=examples.names), b=last)


def _refuse_unused(options: dict[str, Any], beside: str) -> None:
    """An option that would be ignored is a mistake of whoever gave it."""
    known = inspect.signature(find_label_issues).parameters
    for name, value in options.items():
        if value != known[name].default:
            raise ValueError(f"{name} is of no use for {beside}; leave it out")


def _for_the_scores_of(model: nn.Module, data: Any, names: Sequence[str] | None) -> Examples:
    """The examples, with as many classes as the model has scores if labels are numbers."""
    examples = _as_it_takes_them(model, read_examples(data, names=names))
    scores = _scores_of_two(model, examples)
    classes = scores.shape[1] if isinstance(scores, Tensor) and scores.ndim == 2 else 0
    if names is None and classes > len(examples.names) and not isinstance(data, WITH_NAMES):
        labels, known = read_given(data, classes)
        return Examples(examples.inputs, labels, known, examples.files)
    return examples


def _as_it_takes_them(model: nn.Module, examples: Examples) -> Examples:
    """Whole numbers are words for a model that embeds them, and features for any other."""
    embeds = any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) for part in model.modules())
    if embeds or examples.inputs.dtype != torch.int64:
        return examples
    return replace(examples, inputs=examples.inputs.float())


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
    epochs = whole_number("epochs", epochs, least=1)
    check_scores(model, examples)
    trained = _copied(model).to(device).train()
    history = History(len(examples.labels), len(examples.names), torch.device(device))
    # Of dropout, and of layers yet to be made.
    with Generators(torch.device(device)).seeded(seed):
        _make_layers(trained, examples)
        optimizer = NVRMSGD(
            trained.parameters(),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            b=b,
            seed=seed,
        )
        found = fit(
            trained,
            feed(examples, _no_single(len(examples), batch_size), seed=seed, device=device),
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
    with held_clean(model.parameters()):
        return copy.deepcopy(model).float()


def _make_layers(model: nn.Module, examples: Examples) -> None:
    """Let layers that are made by their first input see one."""
    if any(map(is_lazy, model.parameters())):
        with torch.no_grad(), in_evaluation_mode(model):
            model(_inputs_of_two(examples, device_of(model)))


def _no_single(count: int, size: int) -> int:
    """A batch size that leaves no last batch of one example, which batch normalisation refuses."""
    size = whole_number("batch_size", size, least=1)
    while 1 < size < count and count % size == 1:
        size += 1
    return size


def _refuse_nothing_learned(probabilities: Array, examples: Examples) -> None:
    """A network that gives labels no more than labels in another order knows nothing about them."""
    n, labels = len(examples), examples.labels
    own = probabilities[np.arange(n), labels].astype(np.float64)
    shares = np.bincount(labels, minlength=probabilities.shape[1]) / n
    by_chance = probabilities @ shares
    gain = own - by_chance
    if gain.mean() <= 2 * gain.std() / math.sqrt(n):
        raise ValueError(
            "the network has learned nothing about the labels: it gives them a probability of "
            f"{own.mean():.3g} on average, and {by_chance.mean():.3g} to labels in random order; "
            "bring inputs to a similar scale, or try another lr, more epochs or another network"
        )


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
            found.append(softmax(not_half(scores).cpu().double(), 1))
    return torch.cat(found).numpy()


def check_scores(model: nn.Module, examples: Examples) -> None:
    """Refuse a network that does not give one score for each class."""
    scores, classes = _scores_of_two(model, examples), len(examples.names)
    if not isinstance(scores, Tensor) or scores.shape != (2, classes):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"model must give one score for each of {classes} classes, shape (2, {classes}) for 2 "
            f"examples, got {got}"
        )


def _scores_of_two(model: nn.Module, examples: Examples) -> Any:
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
