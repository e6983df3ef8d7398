"""Suggest b: train briefly with b="auto", then measure the loss at scales around the result."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from neuvar import data as data_
from neuvar._batches import DataPasses, Generators, feed_batch, length, to_device
from neuvar._eval_mode import eval_mode
from neuvar._validate import integer
from neuvar.measures.loss_and_accuracy import Loss
from neuvar.measures.variability import Curve, neural_variability, variability_curve
from neuvar.optim import NVRM
from neuvar.optim.auto_b import LEAST, SHARE
from neuvar.train.model_setup import avoid_single, check_trainable, copy_clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FACTORS = tuple(2.0 ** (k / 2) for k in range(-4, 7))
"""Scales at which the loss is measured, relative to the result of b="auto"."""
DRAWS = 4
PASSES = len(FACTORS) * DRAWS + 4
"""Forward passes for each measured example, including those at clean weights."""
MEASURED = (100, 300)
"""Minimum and maximum number of measured examples."""


@dataclass(frozen=True)
class FoundB:
    """The result of :func:`find_b`.

    Attributes:
        b: the suggestion.
        curve: loss against b, after the short training.
        first: the loss before the short training.
        steps: the number of steps of the short training.
        because: a sentence that explains the choice.
    """

    b: float
    curve: Curve = field(repr=False)
    first: float
    steps: int
    because: str

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the loss against b, and the suggested b."""
        ax = self.curve.plot(ax)
        top = max(self.first, min(point.perturbed for point in self.curve.points)) * 1.15
        style: dict[str, Any] = {"fontsize": "small", "va": "bottom"}
        ax.axhline(self.first, color="0.6", linewidth=1, linestyle=":")
        ax.text(self.curve.b[0], self.first, "before training", color="0.4", **style)
        ax.axvline(self.b, color="C1", linewidth=1.5)
        ax.text(self.b * 1.04, 0, f"b = {self.b:.2g}", color="C1", **style)
        ax.set_xscale("log")
        ax.set_ylim(0, top)
        return ax


def find_b(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    epochs: int = 30,
    optimizer: Callable[[Any], Optimizer] | None = None,
    batch_size: int = 128,
    noise: str = "gaussian",
    seed: int = 0,
) -> FoundB:
    r"""Suggest b for a training, at about a tenth of its cost.

    Trains a copy of the model for a few epochs with ``b="auto"``. Then measures its loss at several
    scales of noise. The suggested b is where the loss begins to rise too fast for what was learned,
    by the rule of :class:`neuvar.optim.auto_b.AutoB`:

    .. math:: \frac{\partial L}{\partial \log b} = s \sqrt{(L_0 - L(b))\,L_0}

    with the loss :math:`L_0` before training and s = 0.25.

    Measuring takes 100 to 300 examples, and costs as much as training on 1,600 to 4,800. If the
    training has fewer than 32,000 examples, all epochs together, the whole cost is more than a
    tenth: a sixth for 15,000, a third for 6,000.

    Args:
        model: any network; it is not modified.
        loss: a mean over the examples of a batch.
        data: a pair of tensors, arrays or lists of numbers (floats are converted to the type of the
            weights); a :class:`neuvar.data.Split`, whose images become floats from 0 to 1; or a
            ``DataLoader``, a list or another iterable of batches that can be iterated many times.
            A batch is a tuple with the target last, or a dict with a key such as ``"labels"``.
        epochs: number of epochs of the real training.
        optimizer: makes the inner optimizer of the real training from parameters; SGD with a
            learning rate of 0.1 and a momentum of 0.9 by default.
        batch_size: for a pair or a split; increased if the last batch would have one example.
        noise: noise family.
        seed: seed of the noise, the order of the data, and dropout.

    >>> from neuvar.data import mnist_excerpt
    >>> from neuvar.models import mlp
    >>> train = mnist_excerpt().train
    >>> data = train.images.flatten(1) / 255, train.labels
    >>> result = find_b(mlp((784, 64, 10), seed=0), nn.functional.cross_entropy, data)
    >>> 0.005 < result.b < 0.5
    True
    """
    epochs = integer("epochs", epochs, low=1)
    check_trainable(model)
    trained = copy_clean(model).train()
    batches = _as_batches(data, trained, batch_size, seed)
    with Generators(batches.device, batches.batches).seeded(seed):
        count = length(batches.batches)
        count = sum(1 for _ in _one_pass(batches, 0)) if count is None else count
        if not count:
            raise ValueError("data is empty; a training needs at least one batch")
        with closing(_repeat(batches)) as stream:
            one = next(stream)
            steps, examples = _budget(epochs * count / 10, _examples_in(one), count)
            rest = itertools.islice(stream, count - 1)
            measured = first_examples(itertools.chain([one], rest), examples)
        first = _first_loss(trained, loss, measured)
        params = trained.parameters()
        inner = optimizer(params) if optimizer else torch.optim.SGD(params, lr=0.1, momentum=0.9)
        noisy = NVRM(inner, model=trained, b="auto", noise=noise, seed=seed)
        groups = [group for group in noisy.param_groups if "auto" in group]
        weights = [p for group in groups for p in group["params"] if p.requires_grad]
        if not weights:
            raise ValueError("optimizer has no trained weights with b='auto'")
        with closing(_repeat(batches)) as stream:
            _train(trained, loss, itertools.islice(stream, steps), noisy)
        noisy.eval()
        curve = variability_curve(
            trained,
            loss,
            measured,
            b=[groups[0]["b"] * f for f in FACTORS],
            draws=DRAWS,
            noise=noise,
            parameters=weights,  # as in training
            seed=seed,
        )
    chosen, because = _choose(curve, first)
    return FoundB(chosen, curve, first, steps, f"After {steps} steps {because}")


def _budget(steps: float, size: int, count: int) -> tuple[int, int]:
    """Number of training steps, and of measured examples, that together cost this many steps.

    A forward pass costs about a third of a step. Training gets three quarters of the cost. It gets
    at least half, because b is too small after a very short training.

    >>> _budget(141, 128, 47), _budget(12, 128, 4)
    ((105, 282), (6, 100))
    """
    each = PASSES / 3 / max(size, 1)  # steps per measured example
    least, most = MEASURED
    examples = min(max(int(steps / 4 / each), least), most, max(size, 1) * count)
    return max(int(steps - examples * each), math.ceil(steps / 2)), examples


def _as_batches(data: Any, model: nn.Module, batch_size: int, seed: int) -> DataPasses:
    """Data as batches: a pair or a split in random order, others in their own order."""
    if isinstance(data, data_.Split):
        data = data_.Batches(data, avoid_single(len(data.images), batch_size), seed=seed)
    elif isinstance(data, (tuple, list)) and len(data) == 2 and all(map(_is_numeric, data)):
        inputs, targets = (_as_tensor(part, model) for part in data)
        if not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool):
            targets = targets.long()
        data = inputs, targets
        if inputs.ndim and targets.ndim and len(inputs) == len(targets):
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
            data = tuple(part[order.to(part.device)] for part in data)
            batch_size = avoid_single(len(order), batch_size)
    return DataPasses(data, batch_size=batch_size, model=model)


def _is_numeric(part: Any) -> bool:
    """Whether this is a tensor, an array or a nested list of numbers; a list of tensors is not."""
    if not isinstance(part, (tuple, list)):
        return isinstance(part, (Tensor, np.ndarray))
    return all(
        isinstance(item, numbers.Number) or (isinstance(item, (tuple, list)) and _is_numeric(item))
        for item in part
    )


def _as_tensor(part: Any, model: nn.Module) -> Tensor:
    """A tensor, array or list as a tensor; floats get the type of the model's weights."""
    if not isinstance(part, Tensor):
        array = np.asarray(part)
        if array.dtype.kind not in "biufc":
            raise ValueError(f"data must be numbers, got an array of {array.dtype}")
        # A copy in native byte order: torch supports no other, and warns of read-only arrays.
        part = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    tensor: Tensor = part.to(kind) if part.is_floating_point() else part
    return tensor


def _one_pass(batches: DataPasses, number: int) -> Iterator[Any]:
    """One epoch; the order of shuffled data depends on its number."""
    data: Any = batches.batches
    for batch in data.epoch(number) if isinstance(data, data_.Batches) else data:
        yield batch if batches.device is None else to_device(batch, batches.device)


def _repeat(batches: DataPasses) -> Generator[Any, None, None]:
    for number in itertools.count():
        empty = True
        for batch in _one_pass(batches, number):
            empty = False
            yield batch
        if empty:
            raise ValueError("data is empty in a second pass; pass a list of batches")


def first_examples(batches: Iterator[Any], left: int) -> list[Any]:
    """The first batches, with ``left`` examples in all; the last batch is cut."""
    few: list[Any] = []
    for batch in batches:
        count = _examples_in(batch)
        cut = [
            part[:left] if isinstance(part, Tensor) and part.ndim and len(part) == count else part
            for part in _parts(batch)
        ]
        if isinstance(batch, Mapping):
            few.append(dict(zip(batch, cut, strict=True)))
        else:
            few.append(tuple(cut) if cut else batch)
        left -= count
        if left <= 0:
            break
    return few


def _parts(batch: Any) -> list[Any]:
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return list(parts) if isinstance(batch, (Mapping, tuple, list)) else []


def _examples_in(batch: Any) -> int:
    """Number of examples: the most common length of the tensors in a batch."""
    lengths = [len(part) for part in _parts(batch) if isinstance(part, Tensor) and part.ndim]
    return max(set(lengths), key=lengths.count) if lengths else 1


def _train(model: nn.Module, loss: Loss, batches: Iterator[Any], optimizer: NVRM) -> None:
    for batch in batches:
        optimizer.zero_grad()
        value = loss(*feed_batch(model, batch))
        if not math.isfinite(float(value.detach())):
            raise ValueError("the loss is not finite; try a smaller learning rate")
        optimizer.report_loss(value)
        value.backward()
        optimizer.step()


def _first_loss(model: nn.Module, loss: Loss, batches: list[Any]) -> float:
    """The loss before training; also initializes lazy layers."""
    try:
        if any(map(is_lazy, model.parameters())):
            with torch.no_grad(), eval_mode(model):
                feed_batch(model, batches[0])
        return neural_variability(model, loss, batches, b=0.0, draws=4).clean
    except RuntimeError as error:
        kinds = {part.dtype for part in _parts(batches[0]) if isinstance(part, Tensor)}
        if torch.uint8 not in kinds:
            raise
        raise ValueError(
            "the model does not support uint8 inputs; pass floats, such as images / 255, or a "
            "neuvar.data.Split"
        ) from error


def _choose(curve: Curve, first: float) -> tuple[float, str]:
    """The b where the slope of the curve reaches the limit, and the reason in words."""
    logs = [math.log(b) for b in curve.b]
    losses = [point.perturbed for point in curve.points]
    learned = first - losses[0]
    if not learned > LEAST * abs(first):
        raise ValueError(
            f"nothing was learned: the loss was {first:.3g} before and {losses[0]:.3g} after "
            "a short training; try another learning rate, or more epochs"
        )
    before = (logs[0], -1.0)
    for (x, low), (y, high) in itertools.pairwise(zip(logs, losses, strict=True)):
        middle, slope = (x + y) / 2, (high - low) / (y - x)
        learned = first - (low + high) / 2
        limit = SHARE * math.sqrt(max(learned * abs(first), 0.0))
        excess = 1.0 if limit <= 0 else slope / limit - 1
        if not math.isfinite(excess) or excess >= 0:
            share = -before[1] / (min(excess, 10.0) - before[1]) if math.isfinite(excess) else 0.0
            b = math.exp(before[0] + share * (middle - before[0]))
            return b, (
                f"the loss had fallen from {first:.3g} to {losses[0]:.3g} at little noise; above "
                f"b = {b:.2g} it would rise by more than {limit:.2g} when b grows by a factor of e"
            )
        before = (middle, excess)
    return curve.b[-1], f"noise up to b = {curve.b[-1]:.2g}, the largest measured, costs little"
