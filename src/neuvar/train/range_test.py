"""Which b? A short training and a look at the loss around the scale it led to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neuvar import data as data_
from neuvar._batches import Batches, Generators, feed_batch, to_device
from neuvar._validate import integer
from neuvar.measures.curve import Curve, variability_curve
from neuvar.measures.variability import neural_variability
from neuvar.optim import NVRM
from neuvar.optim.auto_b import LEAST, SHARE
from neuvar.train.evaluation import Loss
from neuvar.train.preparing import (
    check_trainable,
    clean_copy,
    examples_in,
    first_examples,
    make_layers,
    parts_of,
    ready_batches,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FACTORS = tuple(2.0 ** (k / 2) for k in range(-4, 7))
"""Where the loss is looked at, times the scale that training led to: a quarter to eight times."""
DRAWS = 4
PASSES = len(FACTORS) * DRAWS + 4
"""How often each example is looked at, the looks at clean weights included."""
LOOKED_AT = (100, 300)
"""On how many examples, at least and at most."""


@dataclass(frozen=True)
class FoundB:
    """A suggestion for b.

    Attributes:
        b: the suggestion.
        curve: loss against b, at the weights after the short training.
        first: the loss before it.
        steps: how many steps it had.
        because: why this b, in a sentence.
    """

    b: float
    curve: Curve
    first: float
    steps: int
    because: str

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the loss against b, and the place that was chosen."""
        ax = self.curve.plot(ax)
        top = max(self.first, min(point.perturbed for point in self.curve.points)) * 1.15
        ax.axhline(self.first, color="0.6", linewidth=1, linestyle=":")
        ax.annotate(
            "before training",
            (self.curve.b[0], self.first),
            xytext=(0, 3),
            textcoords="offset points",
            color="0.4",
            fontsize="small",
        )
        ax.axvline(self.b, color="C1", linewidth=1.5)
        ax.annotate(
            f"b = {self.b:.2g}",
            (self.b, 0),
            xytext=(4, 6),
            textcoords="offset points",
            color="C1",
        )
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

    A copy of the model is trained for a part of the epochs with ``b="auto"``. Then its loss is
    measured at scales of noise around the one that this led to, and b is taken where the curve
    becomes too steep for what was learned, by the rule of :class:`neuvar.optim.auto_b.AutoB`:

    .. math:: \frac{\partial L}{\partial \log b} = s \sqrt{(L_0 - L(b))\,L_0}

    The curve, on 100 to 300 examples, costs as much as training on 1,600 to 4,800. So with fewer
    than 32,000 examples in all epochs together it is more than a tenth: a sixth with 15,000, a
    third with 6,000.

    Args:
        model: any network; it is left as it is.
        loss: a mean over the examples of a batch.
        data: a pair of tensors, arrays or lists of numbers, whose floats get the type of the
            model's weights; a ``DataLoader``, or a list or another iterable of batches that can be
            gone through many times. A batch is a tuple, whose last item is the target, or a dict
            with a key such as ``"labels"``. Or a :class:`neuvar.data.Split`, whose images become
            floats from 0 to 1, as :class:`neuvar.data.Batches` makes them.
        epochs: how many the real training will have.
        optimizer: makes the inner optimizer of the real training from parameters; SGD with a
            learning rate of .1 and a momentum of .9 by default.
        batch_size: of a pair or a split; a little more where a last batch would have one example.
        noise: family of the noise.
        seed: of all that is random: noise, order and dropout.

    >>> from neuvar.data import mnist_excerpt
    >>> from neuvar.models import mlp
    >>> train = mnist_excerpt().train
    >>> data = train.images.flatten(1) / 255, train.labels
    >>> found = find_b(mlp((784, 64, 10), seed=0), nn.functional.cross_entropy, data)
    >>> 0.005 < found.b < 0.5
    True
    """
    epochs = integer("epochs", epochs, low=1)
    check_trainable(model)
    trained = clean_copy(model).train()
    batches = ready_batches(data, trained, batch_size, seed)
    with Generators(batches.device, batches.batches).seeded(seed):
        count = _length(batches)
        with closing(_forever(batches)) as stream:
            one = next(stream)
            steps, examples = _affordable(epochs * count / 10, examples_in(one), count)
            rest = itertools.islice(stream, count - 1)
            some = first_examples(itertools.chain([one], rest), examples)
        first = _first_loss(trained, loss, some)
        inner = (optimizer or _plain_sgd)(trained.parameters())
        noisy = NVRM(inner, model=trained, b="auto", noise=noise, seed=seed)
        groups = [group for group in noisy.param_groups if "auto" in group]
        weights = [p for group in groups for p in group["params"] if p.requires_grad]
        if not weights:
            raise ValueError("optimizer has no trained weights whose b is to be found")
        with closing(_forever(batches)) as stream:
            _train(trained, loss, itertools.islice(stream, steps), noisy)
        noisy.eval()
        curve = variability_curve(
            trained,
            loss,
            some,
            b=[groups[0]["b"] * f for f in FACTORS],
            draws=DRAWS,
            noise=noise,
            parameters=weights,  # as in training
            seed=seed,
        )
    chosen, because = _chosen(curve, first)
    return FoundB(chosen, curve, first, steps, f"After {steps} steps {because}")


def _plain_sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _affordable(steps: float, size: int, count: int) -> tuple[int, int]:
    """How many steps to train and how many examples to look at for the cost of so many steps.

    A pass forward is about a third of a step. Training keeps three quarters, and half where data
    are few, since b comes out too small after little of it.

    >>> _affordable(141, 128, 47), _affordable(12, 128, 4)
    ((105, 282), (6, 100))
    """
    each = PASSES / 3 / max(size, 1)  # steps that it costs to look at an example
    least, most = LOOKED_AT
    examples = min(max(int(steps / 4 / each), least), most, max(size, 1) * count)
    return max(int(steps - examples * each), math.ceil(steps / 2)), examples


def _length(batches: Batches) -> int:
    try:
        count = len(batches.batches)
    except TypeError:
        count = sum(1 for _ in _one_pass(batches, 0))
    if not count:
        raise ValueError("data is empty; a training needs at least one batch")
    return count


def _one_pass(batches: Batches, number: int) -> Iterator[Any]:
    """Go through the data once, in an order of its own where that is random."""
    data: Any = batches.batches
    for batch in data.epoch(number) if isinstance(data, data_.Batches) else data:
        yield batch if batches.device is None else to_device(batch, batches.device)


def _forever(batches: Batches) -> Generator[Any, None, None]:
    for number in itertools.count():
        found = False
        for batch in _one_pass(batches, number):
            found = True
            yield batch
        if not found:
            raise ValueError("data is empty when it is gone through again; give a list of batches")


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
    """The loss before anything is trained, of a model that then has all its layers."""
    try:
        make_layers(model, lambda: feed_batch(model, batches[0]))
        return neural_variability(model, loss, batches, b=0.0, draws=4).clean
    except RuntimeError as error:
        kinds = {part.dtype for part in parts_of(batches[0]) if isinstance(part, Tensor)}
        if torch.uint8 not in kinds:
            raise
        raise ValueError(
            "the model does not take bytes (uint8); give floats, such as images / 255, or a "
            "neuvar.data.Split"
        ) from error


def _chosen(curve: Curve, first: float) -> tuple[float, str]:
    """Where the curve is steeper than its price, and why that is the place."""
    logs = [math.log(b) for b in curve.b]
    heights = [point.perturbed for point in curve.points]
    learned = first - heights[0]
    if not learned > LEAST * abs(first):
        raise ValueError(
            f"nothing was learned: the loss was {first:.3g} before and {heights[0]:.3g} after "
            "a short training; try another learning rate, or more epochs"
        )
    before = (logs[0], -1.0)
    for (x, low), (y, high) in itertools.pairwise(zip(logs, heights, strict=True)):
        middle, cost = (x + y) / 2, (high - low) / (y - x)
        learned = first - (low + high) / 2
        price = SHARE * math.sqrt(max(learned * abs(first), 0.0))
        excess = 1.0 if price <= 0 else cost / price - 1
        if not math.isfinite(excess) or excess >= 0:
            share = -before[1] / (min(excess, 10.0) - before[1]) if math.isfinite(excess) else 0.0
            b = math.exp(before[0] + share * (middle - before[0]))
            return b, (
                f"the loss had fallen from {first:.3g} to {heights[0]:.3g} under little noise; "
                f"beyond b = {b:.2g} each e-fold of b would cost more than {price:.2g}"
            )
        before = (middle, excess)
    return curve.b[-1], (
        f"noise up to b = {curve.b[-1]:.2g}, the largest that was looked at, costs less than its "
        "price"
    )
