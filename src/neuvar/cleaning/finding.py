"""Train once with neural variability, and see which labels the network does not believe."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuvar.cleaning.inputs import Examples, read_examples, read_given
from neuvar.cleaning.inputs.examples import is_labels, parts_of_data
from neuvar.cleaning.inputs.labels import NUMBERS, plain_labels
from neuvar.cleaning.issues import Array, LabelIssues
from neuvar.cleaning.judging import checked_probabilities, judge_labels, known_of_labels
from neuvar.cleaning.training import probabilities_of, scores_of_two, train_once

NO_INPUTS = np.empty(0)
"""Stands for inputs where labels alone are read, and is no label."""


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
        p = checked_probabilities(model)
        data, given, names = _read_once((NO_INPUTS, data) if is_labels(data) else data, names)
        if not isinstance(data, Examples):
            data = NO_INPUTS, given
        labels, known = read_given(data, p.shape[1], names)
        return _judged(p, labels, known, given, files=getattr(data, "files", ()))
    if trained:
        _refuse_unused(training, "a trained model")
    examples, given = _for_the_scores_of(model, data, names)
    if trained:
        found, last = probabilities_of(model, examples, precision=precision), None
    else:
        run = train_once(model, examples, precision=precision, **training)
        found, last = run.probabilities, run.b
    _refuse_nothing_learned(found, examples)
    return _judged(found, examples.labels, examples.names, given, files=examples.files, b=last)


def _refuse_unused(options: dict[str, Any], beside: str) -> None:
    """An option that would be ignored is a mistake of whoever gave it."""
    known = inspect.signature(find_label_issues).parameters
    for name, value in options.items():
        if value != known[name].default:
            raise ValueError(f"{name} is of no use for {beside}; leave it out")


def _judged(p: Array, labels: Array, names: Sequence[str], given: Any, **more: Any) -> LabelIssues:
    """A judgement that knows the labels as they were given."""
    return replace(
        judge_labels(p, labels, names=names), values=_values(given, labels, names), **more
    )


def _values(given: Any, labels: Array, names: Sequence[str]) -> Array:
    """The label of each class as its first example has it, or as an example of it would."""
    found = plain_labels(given)
    classes, first = np.unique(labels, return_index=True)
    if found.dtype.kind in NUMBERS:
        values = np.arange(len(names)).astype(np.uint64 if found.dtype == np.uint64 else np.int64)
    else:
        values = np.array(names, dtype=object)
    values[classes] = found[first]
    return values.astype(str) if all(isinstance(value, str) for value in values) else values


def _read_once(data: Any, names: Sequence[str] | None) -> tuple[Any, Any, Sequence[str] | None]:
    """Data that cost nothing to read again, labels as they were given, and names if known."""
    if isinstance(data, Examples):
        return data, data.labels, names
    if isinstance(data, (str, os.PathLike)):
        examples = read_examples(data, names=names)
        return examples, np.array(examples.names)[examples.labels], None
    inputs, given, own = parts_of_data(data, None)
    return (inputs, given), given, own if names is None else names


def _for_the_scores_of(
    model: nn.Module, data: Any, names: Sequence[str] | None
) -> tuple[Examples, Any]:
    """The examples, with as many classes as the model has scores if labels are numbers.

    And the labels as they were given.
    """
    data, given, names = _read_once(data, names)
    examples = _as_it_takes_them(model, read_examples(data, names=names))
    scores = scores_of_two(model, examples)
    classes = scores.shape[1] if isinstance(scores, Tensor) and scores.ndim == 2 else 0
    if names is None and classes > len(examples.names) and not isinstance(data, Examples):
        labels, known = read_given((NO_INPUTS, given), classes)
        examples = replace(examples, labels=labels, names=known)
    return examples, given


def _as_it_takes_them(model: nn.Module, examples: Examples) -> Examples:
    """Whole numbers are words for a model that embeds them, and features for any other."""
    embeds = any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) for part in model.modules())
    if embeds or examples.inputs.dtype != torch.int64:
        return examples
    return replace(examples, inputs=examples.inputs.float())


def _refuse_nothing_learned(probabilities: Array, examples: Examples) -> None:
    """A network that gives labels no more than labels in another order knows nothing about them."""
    own, by_chance, errors = known_of_labels(probabilities, examples.labels)
    if errors <= 2:
        raise ValueError(
            "the network has learned nothing about the labels: it gives them a probability of "
            f"{own:.3g} on average, and {by_chance:.3g} to labels in random order; "
            "bring inputs to a similar scale, or try another lr, more epochs or another network"
        )
