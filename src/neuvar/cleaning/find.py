"""Find wrong labels with one training run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuvar.cleaning.class_indices import NUMBERS, label_array, read_labels
from neuvar.cleaning.cross_validation import cross_validate, is_estimator
from neuvar.cleaning.examples import Examples, Parts, inputs_of, split_data
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.score import (
    LabelIssues,
    check_probabilities,
    compare_with_chance,
    judge_checked,
)
from neuvar.cleaning.training import RHO, Device, check_logits, predict, prepare, train_once
from neuvar.train import Checkpoint
from neuvar.train.evaluation import device_of

LEARNED = 0.09
"""Smallest mean confidence, from 0 at chance to 1, of a network that has learned enough."""


def find_label_issues(
    model: nn.Module | Any,
    data: Any,
    *,
    trained: bool = False,
    rho: float = RHO,
    b: float | str | None = None,
    epochs: int = 30,
    batch_size: int = 128,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    seed: int = 0,
    device: Device = "cpu",
    precision: str = "float32",
    names: Sequence[str] | None = None,
    progress: Callable[[float], None] | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
) -> LabelIssues:
    """Find wrong labels with one training run.

    A network whose weights are perturbed in training memorizes few wrong labels. A copy of the
    model is trained on the given labels. The probabilities that it predicts for each example in
    training are averaged over all epochs. :func:`judge_labels` then scores the labels.

    By default :class:`neuvar.baselines.SAM` perturbs the weights in the direction of the gradient.
    In most of our comparisons it ranks wrong labels better than weight noise. SAM takes two
    gradients per step, so it trains for half of the epochs. With ``b``, the weights are perturbed
    by noise instead.

    Args:
        model: any network with one logit per class; it is not changed. Or predicted probabilities
            of shape (n, classes): nothing is trained. Or any scikit-learn classifier with
            ``predict_proba``: copies of it are fitted in five folds.
        data: a pair of inputs and labels (arrays, tensors), a :class:`neuvar.data.Dataset` or
            :class:`~neuvar.data.Split`, a torch dataset of pairs or dicts, or a folder with one
            subfolder of images per class. With probabilities, labels alone are enough. Integers
            are tokens if the model has an embedding layer, otherwise features. uint8 images are
            normalized; other inputs are not, so bring features to a similar scale.
        trained: use the model without training it. A model that has memorized the labels finds
            few wrong ones. Pass its inputs as floats, preprocessed as in its training.
        rho: radius of SAM.
        b: train with weight noise of this scale, or of scale "auto", instead of SAM.
        epochs: gradients per example. One pass over the data takes one with weight noise, and two
            with SAM. The learning rate is divided by 10 after each third.
        batch_size: examples per batch.
        lr: initial learning rate of SGD.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD.
        seed: seed of the batch order and the noise, or of the folds. The training starts from the
            model's own weights.
        device: device to train on.
        precision: "float32", or "bf16" or "fp16" for automatic mixed precision.
        names: name of each class; by default those of the data.
        progress: called with the finished fraction of the training, first at its start.
        checkpoint: file to save the training to every minute. If it exists, the training resumes,
            and the result is bit-identical to an uninterrupted one. A checkpoint of other data or
            settings is refused. See :class:`neuvar.train.Checkpoint`.

    >>> from neuvar.data import mnist_excerpt
    >>> from neuvar.labels import corrupt
    >>> from neuvar.models import mlp
    >>> train = mnist_excerpt().train
    >>> noisy = corrupt("symmetric", train.labels[:1000], 0.2, classes=10, seed=0)
    >>> data = train.images[:1000], noisy.noisy
    >>> issues = find_label_issues(mlp((784, 64, 10), seed=0), data, b=0.03, epochs=5)
    >>> wrong = noisy.mask.numpy()
    >>> bool(wrong[issues.ranked[:100]].mean() > 0.9)
    True
    """
    training = dict(locals())
    for name in ("model", "data", "trained", "names"):
        del training[name]
    _check_arguments(model, data)
    if is_estimator(model):
        _refuse_unused(training | {"trained": trained, "seed": 0}, "an estimator")
        parts = split_data(data, names=names)
        labels, names = read_labels(parts.labels, parts.names)
        p = cross_validate(model, parts.inputs, labels, len(names), seed)
        return _judge(p, labels, names, parts)
    if not isinstance(model, nn.Module):
        _refuse_unused(training | {"trained": trained}, "probabilities")
        p = check_probabilities(model)
        parts = Parts(None, data, names) if _is_labels(data) else split_data(data, names=names)
        return _judge(p, *read_labels(parts.labels, parts.names, classes=p.shape[1]), parts)
    if trained:
        _refuse_unused(training | {"precision": "float32"}, "a trained model")
        device = device_of(model)
    parts = split_data(data, names=names)
    inputs = inputs_of(parts)
    has_tokens = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in model.modules())
    if inputs.dtype == torch.int64 and not has_tokens:
        inputs = inputs.float()
    examples = Examples(inputs, *read_labels(parts.labels, parts.names), parts.files)
    network, logits = prepare(model, inputs, seed=seed, device=device)
    classes = logits.shape[1] if isinstance(logits, Tensor) and logits.ndim == 2 else 0
    if parts.names is None and classes > len(examples.names):
        # Numeric labels need not contain all classes of the model.
        examples = Examples(inputs, *read_labels(parts.labels, classes=classes), parts.files)
    check_logits(logits, len(examples.names))
    if trained:
        p, last_b = predict(network, examples, precision=precision), None
    else:
        run = train_once(network, examples, **training)
        p, last_b = run.probabilities, run.b
    own, by_chance, errors = compare_with_chance(p, examples.labels)
    if errors <= 2:
        raise ValueError(
            "the network has learned nothing about the labels: their mean probability is "
            f"{own:.3g}, and {by_chance:.3g} for labels in random order; "
            "bring inputs to a similar scale, or try another lr, more epochs or another network"
        )
    if not trained:
        _warn_if_unlearned(p)
    return _judge(p, examples.labels, examples.names, parts, last_b, history=not trained)


def _warn_if_unlearned(p: Array) -> None:
    """Warn if the mean probabilities are near those of a network that knows nothing.

    Then most flags may be mistakes. docs/log.md has the measurements.
    """
    mean, chance = float(p.max(1).mean()), 1 / p.shape[1]
    if mean - chance < LEARNED * (1 - chance):
        warnings.warn(
            f"the network may not have learned enough: its mean confidence is {mean:.2f}, near "
            f"{chance:.2f} by chance, so many flags may be mistakes; try more epochs",
            UserWarning,
            stacklevel=3,
        )


def _check_arguments(model: Any, data: Any) -> None:
    """Say which order is right."""
    if isinstance(model, type):
        raise ValueError(f"model must be an instance, got the class {model.__name__}")
    if isinstance(data, nn.Module):
        raise ValueError("data must be the second argument: find_label_issues(model, data)")
    if getattr(data, "ndim", 0) == 2 and _is_labels(model):
        raise ValueError(
            "probabilities must be the first argument: find_label_issues(probabilities, labels)"
        )


def _refuse_unused(options: dict[str, Any], beside: str) -> None:
    parameters = inspect.signature(find_label_issues).parameters
    for name, value in options.items():
        if value != parameters[name].default:
            raise ValueError(f"{name} has no effect with {beside}; leave it out")


def _is_labels(data: Any) -> bool:
    """Whether data are labels without inputs."""
    if isinstance(data, (list, tuple)):
        return all(isinstance(value, (str, Real)) or np.ndim(value) == 0 for value in data)
    return getattr(data, "ndim", None) == 1


def _judge(
    p: Array,
    labels: Array,
    names: tuple[str, ...],
    parts: Parts,
    b: float | None = None,
    history: bool = False,
) -> LabelIssues:
    """Judge labels, and add the original label of each class as ``values``."""
    original = label_array(parts.labels)
    classes, first = np.unique(labels, return_index=True)
    if original.dtype.kind in NUMBERS:
        values = np.arange(len(names), dtype=np.uint64 if original.dtype == np.uint64 else np.int64)
    else:
        values = np.array(names, dtype=object)
    values[classes] = original[first]
    if all(isinstance(value, str) for value in values):
        values = values.astype(str)
    issues = judge_checked(p, labels, names=names, history=history)
    return replace(issues, values=values, files=parts.files, b=b)
