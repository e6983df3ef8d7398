"""Find wrong labels: train once without memorizing them, and score the labels."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax
from torch.optim import Optimizer

from neuvar._batches import Generators
from neuvar._eval_mode import eval_mode
from neuvar._validate import integer
from neuvar.baselines import SAM
from neuvar.cleaning.cross_validation import cross_validate, is_estimator
from neuvar.cleaning.examples import (
    NUMBERS,
    Examples,
    Parts,
    inputs_of,
    label_array,
    read_labels,
    split_data,
)
from neuvar.cleaning.score import (
    Array,
    LabelIssues,
    check_probabilities,
    compare_with_chance,
    divide_rows,
    judge_checked,
)
from neuvar.data import Batches, normalization
from neuvar.models import build, mlp
from neuvar.optim import NVRMSGD
from neuvar.train import Checkpoint, fit
from neuvar.train.evaluation import autocast, device_of
from neuvar.train.loop import EpochsOfBatches
from neuvar.train.model_setup import avoid_single, check_trainable, copy_clean

Device = torch.device | str

EVALUATION_BATCH = 500
HASHED_BYTES = 1 << 24
"""Bytes that are hashed at once."""
HIDDEN_UNITS = 1024
"""Units in the two hidden layers of the default fully connected network, as in the paper."""
RHO = 0.1
"""Radius of SAM."""
LARGEST_FLAT_IMAGE = 32
"""Gray images with more pixels on a side go to a convolutional network."""


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
    model is trained on the labels as they are, and the probabilities that each example gets in
    training are averaged over all epochs. :func:`judge_labels` then scores the labels.

    By default the perturbation is the worst one in a small radius, that of
    :class:`neuvar.baselines.SAM`. It ranks wrong labels better than weight noise in most of our
    comparisons. SAM takes two gradients per step, and therefore half of the epochs. With ``b`` the
    perturbation is weight noise.

    Args:
        model: any network with one score for each class; it is not changed. Or predicted
            probabilities of shape (n, classes): then nothing is trained. Or any scikit-learn
            classifier with ``predict_proba``: copies of it are fitted in five folds.
        data: a pair of inputs and labels (arrays, tensors), a :class:`neuvar.data.Dataset` or
            :class:`~neuvar.data.Split`, a torch dataset of pairs or dicts, or a folder with one
            subfolder of images for each class. With probabilities, labels alone are enough.
            Integers are tokens if the model has an embedding, otherwise features. uint8 images are
            normalized; other inputs are used as they are, so bring features to a similar scale.
        trained: use the model as it is, without training. A model that has memorized the labels
            finds little. Pass its inputs as floats, preprocessed as in its training.
        rho: radius of SAM.
        b: train with weight noise of this scale, or of scale "auto", instead of SAM.
        epochs: gradients for each example: passes over the data with weight noise, twice the passes
            with SAM. The learning rate is divided by 10 after each third.
        batch_size: examples in a batch.
        lr: initial learning rate of SGD.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD.
        seed: seed of the batch order and the noise, or of the folds; the initial weights are the
            model's.
        device: device to train on.
        precision: "float32", or "bf16" or "fp16" for automatic mixed precision.
        names: name of each class; by default those of the data.
        progress: called with the finished fraction of the training, first at its start.
        checkpoint: file to save the training to every minute. If it exists, the training resumes,
            and the result is the same to the bit as without the interruption. A checkpoint of
            other data or settings is refused. See :class:`neuvar.train.Checkpoint`.

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
    training: dict[str, Any] = {
        "rho": rho,
        "b": b,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "seed": seed,
        "device": device,
        "progress": progress,
        "checkpoint": checkpoint,
    }
    if isinstance(data, nn.Module):
        raise ValueError("data must follow the model: find_label_issues(model, data)")
    if is_estimator(model):
        unused = training | {"trained": trained, "precision": precision, "seed": 0}
        _refuse_unused(unused, "an estimator")
        parts = split_data(data, names=names)
        labels, names = read_labels(parts.labels, parts.names)
        p = cross_validate(model, parts.inputs, labels, len(names), seed)
        return _score(p, labels, names, parts)
    if not isinstance(model, nn.Module):
        _refuse_unused(training | {"trained": trained, "precision": precision}, "probabilities")
        p = check_probabilities(model)
        parts = Parts(None, data, names) if _is_labels(data) else split_data(data, names=names)
        return _score(p, *read_labels(parts.labels, parts.names, classes=p.shape[1]), parts)
    if trained:
        _refuse_unused(training, "a trained model")
        device = device_of(model)
    parts = split_data(data, names=names)
    inputs = inputs_of(parts)
    has_tokens = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in model.modules())
    if inputs.dtype == torch.int64 and not has_tokens:
        inputs = inputs.float()
    examples = Examples(inputs, *read_labels(parts.labels, parts.names), parts.files)
    network, scores = prepare(model, inputs, seed=seed, device=device)
    classes = scores.shape[1] if isinstance(scores, Tensor) and scores.ndim == 2 else 0
    if parts.names is None and classes > len(examples.names):
        # Labels that are numbers may leave out some of the model's classes.
        examples = Examples(inputs, *read_labels(parts.labels, classes=classes), parts.files)
    check_scores(scores, len(examples.names))
    if trained:
        p, last_b = predict(network, examples, precision=precision), None
    else:
        run = train_once(network, examples, precision=precision, **training)
        p, last_b = run.probabilities, run.b
    own, by_chance, errors = compare_with_chance(p, examples.labels)
    if errors <= 2:
        raise ValueError(
            "the network has learned nothing about the labels: it gives them a probability of "
            f"{own:.3g} on average, and {by_chance:.3g} to labels in random order; "
            "bring inputs to a similar scale, or try another lr, more epochs or another network"
        )
    return _score(p, examples.labels, examples.names, parts, last_b, history=not trained)


def _refuse_unused(options: dict[str, Any], beside: str) -> None:
    parameters = inspect.signature(find_label_issues).parameters
    for name, value in options.items():
        if value != parameters[name].default:
            raise ValueError(f"{name} has no effect with {beside}; leave it out")


def _is_labels(data: Any) -> bool:
    """Whether data is labels alone, rather than a pair of inputs and labels."""
    if isinstance(data, (list, tuple)):
        return all(isinstance(value, (str, Real)) or np.ndim(value) == 0 for value in data)
    return getattr(data, "ndim", None) == 1


def _score(
    p: Array,
    labels: Array,
    names: tuple[str, ...],
    parts: Parts,
    b: float | None = None,
    history: bool = False,
) -> LabelIssues:
    """Judge labels, and add the original label of each class, as ``values``."""
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


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network, the mean of its probabilities in training, and b at the end, if any."""

    model: nn.Module
    probabilities: Array
    b: float | None


def prepare(
    model: nn.Module, inputs: Tensor, *, seed: int, device: Device
) -> tuple[nn.Module, Any]:
    """A float32 copy of a model at its clean weights, and its scores of the first two inputs.

    The forward pass also initializes lazy layers, from the seed.
    """
    network, device = copy_clean(model).float().to(device), torch.device(device)
    two = Examples(inputs[:2], np.arange(2), ("first", "second"))
    first, *_ = next(iter(make_batches(two, 2, shuffle=False, device=device).epoch(0)))
    with Generators(device).seeded(seed), torch.no_grad(), eval_mode(network):
        try:
            return network, network(first)
        except (RuntimeError, TypeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"model does not take inputs of shape {tuple(first.shape)}: {reason}"
            ) from error


def check_scores(scores: Any, classes: int) -> None:
    """Refuse a model's scores of two examples unless there is one for each class."""
    if not isinstance(scores, Tensor) or scores.shape != (2, classes):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"model must give one score for each of {classes} classes, shape (2, {classes}) for 2 "
            f"examples, got {got}"
        )


def train_once(
    network: nn.Module,
    examples: Examples,
    *,
    b: float | str | None,
    epochs: int,
    batch_size: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    seed: int,
    device: Device,
    precision: str,
    rho: float = RHO,
    weights: Array | None = None,
    progress: Callable[[float], None] | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
) -> Trained:
    """Train a network in place, and average the probabilities that each example gets.

    Without b it is trained by SAM, for half of the epochs. The loss of each example is multiplied
    by its weight, divided by the mean of all weights.
    """
    epochs = integer("epochs", epochs, low=1)
    if b is not None and rho != RHO:
        raise ValueError("rho has no effect with b, which replaces SAM by weight noise; give one")
    check_trainable(network)
    network.to(device).train()
    history = History(len(examples), len(examples.names), torch.device(device))
    with Generators(torch.device(device)).seeded(seed):  # for dropout
        options: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        optimizer: Optimizer
        if b is None:
            optimizer = SAM(torch.optim.SGD(network.parameters(), **options), rho=rho)
            epochs = -(-epochs // 2)
        else:
            optimizer = NVRMSGD(network, b=b, seed=seed, **options)
        batch_size = avoid_single(len(examples), batch_size)
        batches = make_batches(examples, batch_size, seed=seed, device=device, weights=weights)
        done = 0.0
        if checkpoint is not None:
            if not isinstance(checkpoint, Checkpoint):
                checkpoint = Checkpoint(checkpoint)
            done = min(history.resume(checkpoint, examples, len(batches)) / epochs, 1.0)
        if progress is not None:
            progress(done)
        result = fit(
            network,
            batches,
            optimizer,
            epochs=epochs,
            loss=cross_entropy if weights is None else weighted_cross_entropy,
            schedule=torch.optim.lr_scheduler.StepLR(optimizer, -(-epochs // 3)),
            precision=precision,
            observe=history,
            progress=progress,
            checkpoint=checkpoint,
        )
    if not result.finished:
        raise ValueError(f"the training diverged: {result.reason}; try a smaller lr, rho or b")
    last_b = None if b is None else float(optimizer.param_groups[0]["b"])
    return Trained(network, history.mean(), last_b)


def weighted_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean of the weighted losses; the columns of the targets are labels and weights."""
    labels, weights = targets.unbind(1)
    return (weights * cross_entropy(scores, labels.long(), reduction="none")).mean()


class History:
    """Mean of the probabilities that each example gets in training."""

    def __init__(self, count: int, classes: int, device: torch.device) -> None:
        self._sums = torch.zeros(count, classes, device=device)

    def __call__(self, batch: tuple[Tensor, ...], scores: Tensor) -> None:
        self._sums[batch[2]] += softmax(scores.float(), 1)

    def resume(self, checkpoint: Checkpoint, examples: Examples, batches: int) -> float:
        """Continue from a checkpoint, if it has a state, and save the sums with it from now on.

        Returns the number of epochs that are done. :func:`~neuvar.train.fit` compares the settings
        and the model, but only some of the inputs.
        """
        own, done = hash_examples(examples), 0.0
        if checkpoint.read() and (saved := checkpoint.saved) is not None:
            sums = checkpoint.outer.get("history")
            if not isinstance(sums, Tensor) or checkpoint.outer.get("examples") != own:
                raise ValueError(
                    f"{checkpoint.path} is the checkpoint of other inputs or labels; remove it or "
                    "use another path"
                )
            self._sums = sums.to(self._sums)
            done = saved.get("epoch", 0) + saved.get("batch", 0) / batches
        checkpoint.outer = {"history": self._sums, "examples": own}
        return done

    def mean(self) -> Array:
        """Mean probabilities, with rows that sum to 1; computed in place of the sums."""
        sums = self._sums.cpu()
        return divide_rows(sums.numpy(), sums.sum(1).numpy())


def hash_examples(examples: Examples) -> str:
    """Hash of all inputs, labels and class names."""
    inputs, names = examples.inputs, examples.names
    hasher = hashlib.blake2b(f"{tuple(inputs.shape)} {inputs.dtype} {names}".encode())
    hasher.update(examples.labels.tobytes())
    rows = max(1, HASHED_BYTES // (inputs[0].numel() * inputs.element_size()))
    for part in inputs.split(rows):
        hasher.update(part.contiguous().numpy().tobytes())
    return hasher.hexdigest()


def predict(network: nn.Module, examples: Examples, *, precision: str = "float32") -> Array:
    """Probabilities of a network in evaluation mode."""
    device = device_of(network)
    p = torch.empty(len(examples), len(examples.names))
    batches = make_batches(examples, EVALUATION_BATCH, shuffle=False, device=device)
    with torch.no_grad(), eval_mode(network), autocast(device, precision):
        for part, (inputs, *_) in zip(p.split(EVALUATION_BATCH), batches.epoch(0), strict=True):
            part.copy_(softmax(network(inputs).double(), 1))
    return check_probabilities(p)


def make_batches(
    examples: Examples,
    size: int,
    *,
    device: Device,
    seed: int = 0,
    shuffle: bool = True,
    weights: Array | None = None,
) -> EpochsOfBatches:
    """Batches of inputs, labels and indices; images are normalized.

    With weights, the labels are the targets of :func:`weighted_cross_entropy`.
    """
    inputs, labels = examples.inputs, torch.as_tensor(examples.labels)
    if weights is not None:
        labels = torch.from_numpy(np.stack([labels, weights / weights.mean()], 1)).float()
    parts = (inputs, labels, torch.arange(len(labels)))
    if inputs.dtype != torch.uint8:
        return FeatureBatches(parts, size, seed if shuffle else None, device)
    normalize = normalization(inputs)
    return Batches(parts, size, seed=seed, shuffle=shuffle, normalize=normalize, device=device)


class FeatureBatches:
    """Batches of any tensors, in an order that depends only on the seed and the epoch."""

    def __init__(
        self, parts: tuple[Tensor, ...], size: int, seed: int | None, device: Device
    ) -> None:
        self.size = integer("batch_size", size, low=1)
        self.seed = None if seed is None else integer("seed", seed, low=0)
        self._parts, self._device = parts, device

    def __len__(self) -> int:
        return math.ceil(len(self._parts[0]) / self.size)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Batches of one epoch from batch ``start`` on."""
        order = np.arange(len(self._parts[0]))
        if self.seed is not None:
            order = np.random.Generator(np.random.PCG64([self.seed, number])).permutation(order)
        for batch in range(start, len(self)):
            index = torch.from_numpy(order[batch * self.size : (batch + 1) * self.size])
            yield tuple(part[index].to(self._device) for part in self._parts)


def network_for(examples: Examples, *, seed: int) -> nn.Module:
    """A default network: the paper's fully connected one, or a ResNet-10 of width 16 for images.

    Features and gray images of at most 32 x 32 pixels go to the fully connected network with two
    hidden layers of 1024 units. An example of two or three dimensions is an image.
    """
    shape, classes = tuple(examples.inputs.shape[1:]), len(examples.names)
    gray = len(shape) == 2 or shape[:1] == (1,)
    if len(shape) in (2, 3) and not (gray and max(shape) <= LARGEST_FLAT_IMAGE):
        network = build("resnet-10", classes=classes, seed=seed, shape=(1, *shape)[-3:])
        if len(shape) == 3 or examples.inputs.dtype == torch.uint8:
            return network
        # Batches of uint8 images have a channel, other inputs do not.
        return nn.Sequential(nn.Unflatten(1, (1, shape[0])), network)
    return mlp((examples.inputs[0].numel(), HIDDEN_UNITS, HIDDEN_UNITS, classes), seed=seed)
