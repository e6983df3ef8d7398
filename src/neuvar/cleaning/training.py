"""Train a network on noisy labels, and average its predicted probabilities over the epochs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from neuvar.cleaning.examples import Examples
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.score import check_probabilities
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
"""Bytes hashed at once."""
HIDDEN_UNITS = 1024
"""Units of each hidden layer of the default fully connected network, as in the paper."""
RHO = 0.1
"""Default radius of SAM."""
LARGEST_FLAT_IMAGE = 32
"""Larger gray images get a convolutional network by default."""


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of :func:`train_once`.

    Attributes:
        model: the trained network.
        probabilities: predicted probabilities of each example, averaged over the training.
        b: noise scale at the end of training; None without noise.
    """

    model: nn.Module
    probabilities: Array
    b: float | None


def prepare(
    model: nn.Module, inputs: Tensor, *, seed: int, device: Device
) -> tuple[nn.Module, Any]:
    """A float32 copy of a model at its clean weights, and its logits for the first two inputs.

    The forward pass also initializes lazy layers from the seed.
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


def check_logits(logits: Any, classes: int) -> None:
    """Refuse logits of two examples unless there is one per class."""
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"model must return one logit for each of {classes} classes, shape (2, {classes}) for "
            f"2 examples, got {got}"
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
    """Train a network in place, and average the predicted probabilities of each example.

    Without b it is trained by SAM for half of the epochs. The loss of each example is multiplied by
    its weight, divided by the mean weight.
    """
    epochs = integer("epochs", epochs, low=1)
    settings: dict[str, Any] = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "seed": seed,
        "precision": precision,
        "rho": rho,
        "b": b,
    }
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
            _check_settings(checkpoint, settings)
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


def _check_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    """Refuse a checkpoint of other settings by naming them, and save these with it from now on."""
    saved = checkpoint.outer.get("settings", settings)
    other = [f"{name}={value}" for name, value in saved.items() if value != settings[name]]
    if other and checkpoint.strict:
        raise ValueError(
            f"{checkpoint.path} is the checkpoint of another training, with {', '.join(other)}; "
            "use these settings, or remove it"
        )
    checkpoint.outer["settings"] = settings


def weighted_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of the weighted losses; the targets have a column of labels and one of weights."""
    labels, weights = targets.unbind(1)
    return (weights * cross_entropy(logits, labels.long(), reduction="none")).mean()


class History:
    """Mean of the predicted probabilities of each example over the training."""

    def __init__(self, count: int, classes: int, device: torch.device) -> None:
        self._sums = torch.zeros(count, classes, device=device)

    def __call__(self, batch: tuple[Tensor, ...], logits: Tensor) -> None:
        self._sums[batch[2]] += softmax(logits.float(), 1)

    def resume(self, checkpoint: Checkpoint, examples: Examples, batches: int) -> float:
        """Load the sums from a checkpoint that has any, and save them with it from now on.

        Returns the number of finished epochs. All inputs are compared here, because
        :func:`~neuvar.train.fit` compares the settings and the model, but only some inputs.
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
        checkpoint.outer |= {"history": self._sums, "examples": own}
        return done

    def mean(self) -> Array:
        """Mean probabilities, rows sum to 1. On the CPU they overwrite the sums."""
        sums = self._sums.cpu()
        return sums.div_(sums.sum(1, keepdim=True)).numpy()


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
    """Batches of inputs, targets and indices; uint8 images are normalized.

    The targets are labels, or with weights the targets of :func:`weighted_cross_entropy`.
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
    """Batches of any tensors; their order depends only on the seed and the epoch."""

    def __init__(
        self, parts: tuple[Tensor, ...], size: int, seed: int | None, device: Device
    ) -> None:
        self.size = integer("batch_size", size, low=1)
        self.seed = None if seed is None else integer("seed", seed, low=0)
        self._parts, self._device = parts, device

    def __len__(self) -> int:
        return math.ceil(len(self._parts[0]) / self.size)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The batches of one epoch, from number ``start`` on."""
        order = torch.arange(len(self._parts[0]))
        if self.seed is not None:
            random = np.random.default_rng([self.seed, number])
            order = torch.from_numpy(random.permutation(len(order)))
        for index in order.split(self.size)[start:]:
            yield tuple(part[index].to(self._device) for part in self._parts)


def network_for(examples: Examples, *, seed: int) -> nn.Module:
    """A default network for some examples.

    Features and gray images of at most 32 x 32 pixels get a fully connected network with two hidden
    layers of 1024 units, as in the paper. Other images get a ResNet-10 of width 16. Examples with
    two or three dimensions are images.
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
