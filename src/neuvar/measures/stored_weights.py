"""Accuracy of a model whose weights are rounded, damaged or stored on imprecise hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from neuvar import _validate
from neuvar._batches import Batches, Feed, feed_batch
from neuvar.measures.estimate import Estimate, Proportion
from neuvar.measures.loss_and_accuracy import are_classes, check_classes
from neuvar.measures.perturbed import Parameters, PerturbedModel
from neuvar.measures.plots import plot_faults, plot_rounding
from neuvar.measures.torch_kernels import KERNEL_BITS, quantized_copy
from neuvar.noise import scale, standard_noise
from neuvar.optim.layout import is_sharded, local
from neuvar.optim.rounding import BY, round_weights, rounding_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Rounding:
    """Accuracy of a model with weights of few bits.

    Intervals are over examples.

    Attributes:
        clean: Accuracy at full precision.
        accuracies: Accuracy by what shares a step (``"tensor"``, ``"row"``), then by bits.
        kernels: Accuracy with torch's own quantized linear layers, by bits; see
            :func:`neuvar.measures.quantized_copy`.
        parameters: Names of the rounded parameters.
    """

    clean: Proportion
    accuracies: Mapping[str, Mapping[int, Proportion]]
    kernels: Mapping[int, Proportion]
    parameters: tuple[str, ...] = field(repr=False)

    def plot(self, ax: Axes | None = None, *, label: str | None = None) -> Axes:
        """Plot accuracy against bits, with the interval as bars, on ``ax`` or new axes."""
        return plot_rounding(self, ax, label)

    def __str__(self) -> str:
        lines = [f"full precision {self.clean.value:.4g}"]
        for by, points in (*self.accuracies.items(), ("torch kernels", self.kernels)):
            cells = ", ".join(f"{bits}: {own.value:.4g}" for bits, own in points.items())
            lines += [f"{by}: {cells}"] if cells else []
        return "\n".join(lines)


def rounding(
    model: nn.Module,
    data: Any,
    *,
    bits: Iterable[int] = (8, 7, 6, 5, 4, 3, 2),
    by: str | Iterable[str] = BY,
    kernels: bool = False,
    parameters: Parameters | None = None,
    feed: Feed | None = None,
    batch_size: int = 1024,
    confidence: float = 0.95,
) -> Rounding:
    r"""Accuracy against the number of bits of the weights.

    .. math:: w \to \Delta\,\mathrm{round}(w / \Delta), \qquad
              \Delta = \max|w| / (2^{bits - 1} - 1)

    Activations keep their precision. The model is not changed.

    Args:
        model: A classifier.
        data: As for :func:`neuvar.neural_variability`.
        bits: 2 to 16.
        by: ``"tensor"`` for one step per tensor, ``"row"`` for one per slice along the first axis
            (output channel); both by default.
        kernels: Also measure a copy with torch's own quantized linear layers, at 8 and 4 bits.
        parameters: Which to round, as tensors or by name; by default those of two or more
            dimensions, which leaves out biases and normalization layers.
        feed: ``feed(model, batch)`` returns outputs and targets of other batches.
        batch_size: Of a pair of tensors.
        confidence: Confidence level of the intervals.

    >>> model = nn.Linear(3, 2)
    >>> data = torch.randn(20, 3), torch.arange(20) % 2
    >>> result = rounding(model, data, bits=[8, 2])
    >>> {by: list(points) for by, points in result.accuracies.items()}
    {'tensor': [8, 2], 'row': [8, 2]}
    """
    levels = [_validate.integer("bits", value, low=2, high=16) for value in bits]
    groups = [_validate.one_of("by", own, BY) for own in ([by] if isinstance(by, str) else by)]
    _validate.boolean("kernels", kernels)
    _validate.probability("confidence", confidence)
    stored = _StoredWeights(model, parameters, 0)
    stored.read(data, feed, batch_size)
    with stored:
        clean = stored.accuracy(confidence)
        accuracies = {
            own: {
                level: stored.accuracy(confidence, partial(_rounded, bits=level, by=own))
                for level in levels
            }
            for own in groups
        }
        real = {}
        for level in KERNEL_BITS if kernels else ():
            stored.put(None)
            real[level] = stored.accuracy(confidence, of=quantized_copy(model, bits=level))
    return Rounding(clean, accuracies, real, tuple(stored.names))


@dataclass(frozen=True)
class Faults:
    """Accuracy against the size or the rate of random faults in the weights.

    Intervals are over faults; the data are fixed.

    Attributes:
        kind: What the faults are.
        levels: Their sizes or rates.
        accuracies: Mean accuracy at each level.
        clean: Accuracy without faults.
        draws: Number of damaged models per level.
    """

    kind: str
    levels: tuple[float, ...]
    accuracies: tuple[Estimate, ...]
    clean: Proportion
    draws: int

    def plot(self, ax: Axes | None = None, *, label: str | None = None) -> Axes:
        """Plot accuracy against the level, with the interval as a band, on ``ax`` or new axes."""
        return plot_faults(self, ax, label)

    def __str__(self) -> str:
        points = zip(self.levels, self.accuracies, strict=True)
        cells = [f"{level:g}: {accuracy}" for level, accuracy in points]
        return f"{self.kind}; none: {self.clean.value:.4g}; {'; '.join(cells)}"


def bit_flips(
    model: nn.Module,
    data: Any,
    *,
    rates: Iterable[float],
    bits: int | None = 8,
    by: str = "row",
    draws: int = 16,
    parameters: Parameters | None = None,
    seed: int = 0,
    feed: Feed | None = None,
    batch_size: int = 1024,
    confidence: float = 0.95,
) -> Faults:
    """Accuracy when bits of the stored weights flip at random, as in memory at low voltage.

    Args:
        model: A classifier.
        data: As for :func:`neuvar.neural_variability`.
        rates: Probabilities that a bit flips.
        bits: The weights are stored as signed integers of this many bits, 2 to 8; None for their
            own floating point format, in which one flip can make a weight huge. Outputs that are
            not numbers count as wrong.
        by: What shares a step of rounding to integers: ``"row"`` or ``"tensor"``.
        draws: Number of damaged models per rate.
        parameters: Which are stored; by default those of two or more dimensions.
        seed: Of the faults.
        feed: ``feed(model, batch)`` returns outputs and targets of other batches.
        batch_size: Of a pair of tensors.
        confidence: Confidence level of the intervals.

    >>> model = nn.Linear(3, 2)
    >>> data = torch.randn(20, 3), torch.arange(20) % 2
    >>> bit_flips(model, data, rates=[0.001, 0.1], draws=4).levels
    (0.001, 0.1)
    """
    shares = tuple(_validate.number("rates", rate, low=0, high=1) for rate in rates)
    if bits is not None:
        _validate.integer("bits", bits, low=2, high=8)
    _validate.one_of("by", by, BY)
    seed = _validate.seed(seed)

    def damage(stored: _StoredWeights, rate: float, draw: int, p: Tensor, w: Tensor) -> Tensor:
        key = np.random.SeedSequence([seed, draw, stored.slots[p].number])
        generator = np.random.Generator(np.random.PCG64(key))
        return flip_bits(w, rate, generator, bits=bits, by=by)

    what = "floating point weights" if bits is None else f"{bits}-bit weights"
    stored = _StoredWeights(model, parameters, seed)
    stored.read(data, feed, batch_size)
    return _fault_curve(stored, f"rate of bit flips in {what}", shares, damage, draws, confidence)


def analog_noise(
    model: nn.Module,
    data: Any,
    *,
    scales: Iterable[float],
    kind: str = "multiplicative",
    draws: int = 16,
    parameters: Parameters | None = None,
    seed: int = 0,
    feed: Feed | None = None,
    batch_size: int = 1024,
    confidence: float = 0.95,
) -> Faults:
    r"""Accuracy under the weight noise of analog hardware.

    .. math:: w\,(1 + \sigma z) \quad\text{or}\quad w + \sigma z \max|w|, \qquad z \sim N(0, 1)

    Args:
        model: A classifier.
        data: As for :func:`neuvar.neural_variability`.
        scales: Values of σ.
        kind: ``"multiplicative"``, or ``"additive"`` relative to the largest weight of each tensor.
        draws: Number of noisy models per scale. All scales use the same draws.
        parameters: Which are noisy; by default those of two or more dimensions.
        seed: Of the noise.
        feed: ``feed(model, batch)`` returns outputs and targets of other batches.
        batch_size: Of a pair of tensors.
        confidence: Confidence level of the intervals.

    >>> model = nn.Linear(3, 2)
    >>> data = torch.randn(20, 3), torch.arange(20) % 2
    >>> analog_noise(model, data, scales=[0.05, 0.2], draws=4).kind
    'multiplicative noise σ of the weights'
    """
    _validate.one_of("kind", kind, ("multiplicative", "additive"))
    sigmas = tuple(scale("scales", value) for value in scales)

    def damage(stored: _StoredWeights, sigma: float, draw: int, p: Tensor, w: Tensor) -> Tensor:
        z = standard_noise(stored.slots[p], stored.draw._replace(number=draw + 1), w.device)
        size = w.abs() if kind == "multiplicative" else w.abs().max()
        return w + sigma * z.to(w.dtype) * size

    stored = _StoredWeights(model, parameters, seed)
    stored.read(data, feed, batch_size)
    name = f"{kind} noise σ of the weights"
    return _fault_curve(stored, name, sigmas, damage, draws, confidence)


def flip_bits(
    weights: Tensor,
    rate: float,
    generator: np.random.Generator,
    *,
    bits: int | None = 8,
    by: str = "row",
) -> Tensor:
    """Store weights as integers or in their own format, flip bits, and read them back."""
    width = 8 * weights.element_size() if bits is None else bits
    total = weights.numel() * width
    positions = generator.choice(total, generator.binomial(total, rate), replace=False)
    masks = np.zeros(weights.numel(), np.int64)
    # Several flips may hit one weight; the bits of a mask are distinct, so adding sets them.
    np.add.at(masks, positions // width, np.left_shift(np.int64(1), positions % width))
    flips = torch.from_numpy(masks).to(weights.device).view(weights.shape)
    if bits is None:
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weights.element_size()]
        return (weights.contiguous().view(kind) ^ flips.to(kind)).view(weights.dtype)
    step = rounding_step(weights, bits, by=by)
    safe = torch.where(step > 0, step, torch.ones_like(step))
    stored = ((weights / safe).round().long() & (2**bits - 1)) ^ flips
    signed = torch.where(stored >= 2 ** (bits - 1), stored - 2**bits, stored)
    return signed.to(weights.dtype) * step


Damage = Callable[["_StoredWeights", float, int, Tensor, Tensor], Tensor]
"""New weights, given the level, the number of the draw, the parameter and its clean weights."""


def _rounded(p: Tensor, w: Tensor, *, bits: int, by: str) -> Tensor:
    return round_weights(w, bits, by=by)


def _fault_curve(
    stored: _StoredWeights,
    kind: str,
    levels: tuple[float, ...],
    damage: Damage,
    draws: int,
    confidence: float,
) -> Faults:
    if not levels:
        raise ValueError("there must be at least one level of faults")
    _validate.integer("draws", draws, low=2)
    _validate.probability("confidence", confidence)
    curve = []
    with stored:
        clean = stored.accuracy(confidence)
        for level in levels:
            changes = [partial(damage, stored, level, draw) for draw in range(draws)]
            values = [stored.accuracy(confidence, change).value for change in changes]
            curve.append(Estimate.of(values, confidence))
    return Faults(kind, levels, tuple(curve), clean, draws)


class _StoredWeights(PerturbedModel):
    """A classifier, its data, and the weights that hardware stores."""

    def __init__(self, model: nn.Module, parameters: Parameters | None, seed: int) -> None:
        if parameters is None and isinstance(model, nn.Module):
            parameters = [name for name, p in model.named_parameters() if p.ndim > 1]
        super().__init__(model, parameters=parameters, seed=seed)
        if any(map(is_sharded, self.slots)):
            raise ValueError("model is sharded; gather its weights first")
        self.names = [name for name, p in model.named_parameters() if p in self.slots]

    def read(self, data: Any, feed: Feed | None, batch_size: int) -> None:
        """Set the data to measure the accuracy on."""
        self.batches = Batches(data, batch_size=batch_size, model=self.model)
        self.feed = feed or feed_batch

    @torch.no_grad()
    def put(self, change: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        """Set the weights to ``change(parameter, clean weights)``; None restores them."""
        self.move(None)
        if change is not None:
            for p, clean in self._clean_weights.items():
                local(p.data).copy_(change(p, clean))

    @torch.no_grad()
    def accuracy(
        self,
        confidence: float,
        change: Callable[[Tensor, Tensor], Tensor] | None = None,
        of: nn.Module | None = None,
    ) -> Proportion:
        """Accuracy of the model with changed weights, or of another model."""
        self.put(change)
        right = total = 0
        with self.batches.one_pass() as batches:
            for batch in batches:
                outputs, targets = self.feed(of or self.model, batch)
                if not are_classes(outputs, targets):
                    raise ValueError("accuracy needs a model that returns scores of classes")
                counted = targets >= 0
                check_classes(targets[counted], outputs.shape[1])
                # Damaged weights may give nan, which argmax would take for the largest score.
                hits = (outputs.argmax(1) == targets) & ~outputs.isnan().any(1) & counted
                right, total = right + int(hits.sum()), total + int(counted.sum())
        self.batches.check_count(total)
        return Proportion(right, total, confidence)
