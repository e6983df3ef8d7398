"""Train once with neural variability, and see which labels the network does not believe."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuvar.cleaning.inputs import Examples, read_examples, read_given
from neuvar.cleaning.issues import Array, LabelIssues
from neuvar.cleaning.judging import checked_probabilities, judge_labels
from neuvar.cleaning.training import probabilities_of, scores_of_two, train_once

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
    scores = scores_of_two(model, examples)
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
