"""Accuracy of a model whose weights are rounded, have bit errors, or are noisy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from neuvar import _validate
from neuvar._batches import DataPasses, Feed, feed_batch, to_device
from neuvar.measures.conversion import several
from neuvar.measures.estimate import Estimate, Proportion
from neuvar.measures.landscape import lists_options
from neuvar.measures.loss_and_accuracy import are_classes, check_classes, half_to_float
from neuvar.measures.perturbed import Parameters, PerturbedModel
from neuvar.measures.plots import new_axes, plot_band
from neuvar.measures.torch_kernels import KERNEL_BITS, quantized_copy
from neuvar.noise import bit_patterns, scale, standard_noise
from neuvar.optim.layout import is_sharded, local
from neuvar.optim.rounding_noise import BY, round_weights, rounding_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class StoredOptions(TypedDict, total=False):
    """Options common to the measures of stored weights; see :func:`rounding`."""

    parameters: Parameters | None
    feed: Feed | None
    batch_size: int
    confidence: float


class StoredWeights(PerturbedModel):
    """A classifier, its data, and the weights that hardware stores."""

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        seed: int,
        *,
        parameters: Parameters | None = None,
        feed: Feed | None = None,
        batch_size: int = 1024,
        confidence: float = 0.95,
    ) -> None:
        if parameters is None and isinstance(model, nn.Module):
            parameters = [name for name, p in model.named_parameters() if p.ndim > 1]
        super().__init__(model, parameters=parameters, seed=seed)
        if any(map(is_sharded, self.slots)):
            raise ValueError("model is sharded; gather its weights first")
        self.batches = DataPasses(data, batch_size=batch_size, model=model)
        self.feed = feed or feed_batch
        self.confidence = _validate.probability("confidence", confidence)

    @torch.no_grad()
    def accuracy(
        self,
        change: Callable[[Tensor, Tensor], Tensor] | None = None,
        of: nn.Module | None = None,
    ) -> Proportion:
        """Accuracy with weights ``change(parameter, clean)``, or of another model ``of`` on CPU."""
        self.move(None)
        if change is not None:
            for p, clean in self._clean_weights.items():
                local(p.data).copy_(change(p, clean))
        right = total = 0
        with self.batches.one_pass() as batches:
            for batch in batches:
                own = batch if of is None else to_device(batch, torch.device("cpu"))
                outputs, targets = self.feed(of or self.model, own)
                if not are_classes(outputs, targets):
                    raise ValueError("accuracy needs a model that returns logits")
                counted = targets >= 0
                check_classes(targets[counted], outputs.shape[1])
                # Damaged weights may give nan scores, which argmax takes for the largest.
                hits = (outputs.argmax(1) == targets) & ~outputs.isnan().any(1) & counted
                right, total = right + int(hits.sum()), total + int(counted.sum())
        self.batches.check_count(total)
        return Proportion(right, total, self.confidence)

    def fault_curve(
        self,
        kind: str,
        levels: list[float],
        draws: int,
        damage: Callable[[float, int, Tensor, Tensor], Tensor],
    ) -> Faults:
        """Mean accuracy over draws; the weights are ``damage(level, draw, parameter, clean)``."""
        _validate.integer("draws", draws, low=2)
        curve = []
        with self:
            clean = self.accuracy()
            for level in levels:
                values = [self.accuracy(partial(damage, level, k)).value for k in range(draws)]
                curve.append(Estimate.of(values, self.confidence, within=(0, 1)))
        return Faults(kind, tuple(levels), tuple(curve), clean, draws)


@dataclass(frozen=True)
class Rounding:
    """Accuracy of a model with weights of few bits.

    Intervals are over examples.

    Attributes:
        clean: Accuracy at full precision.
        accuracies: Accuracy for each ``by`` (``"tensor"``, ``"row"``), then for each of ``bits``.
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
        ax = new_axes() if ax is None else ax
        styles = {"tensor": ("--", "s"), "row": ("-", "o"), "torch kernels": ("", "*")}
        color = None
        for by, points in (*self.accuracies.items(), ("torch kernels", self.kernels)):
            if not points:
                continue
            line, marker = styles[by]
            bits, shares = zip(*points.items(), strict=True)
            y = np.array([share.value for share in shares])
            low, high = np.array([share.interval for share in shares]).T
            name = f"{label}, {by}" if label else by
            style: dict[str, Any] = {"linestyle": line, "marker": marker, "color": color}
            drawn = ax.errorbar(bits, y, [y - low, high - y], label=name, capsize=2, **style)
            color = drawn.lines[0].get_color()
        if not ax.xaxis_inverted():
            ax.invert_xaxis()
        ax.set(xlabel="bits per weight", ylabel="accuracy")
        ax.legend(frameon=False, fontsize="small")
        return ax

    def __str__(self) -> str:
        lines = [f"full precision {self.clean.value:.4g}"]
        for by, points in (*self.accuracies.items(), ("torch kernels", self.kernels)):
            cells = ", ".join(f"{bits}: {share.value:.4g}" for bits, share in points.items())
            lines += [f"{by}: {cells}"] if cells else []
        return "\n".join(lines)


@lists_options(StoredOptions, StoredWeights)
def rounding(
    model: nn.Module,
    data: Any,
    *,
    bits: int | Iterable[int] = (8, 7, 6, 5, 4, 3, 2),
    by: str | Iterable[str] = BY,
    kernels: bool = False,
    **options: Unpack[StoredOptions],
) -> Rounding:
    r"""Accuracy against the number of bits of the weights.

    .. math:: w \to \Delta\,\mathrm{round}(w / \Delta), \qquad
              \Delta = \max|w| / (2^{bits - 1} - 1)

    Activations keep their precision. The model is not changed.

    Args:
        model: A classifier.
        data: As for :func:`neuvar.neural_variability`.
        bits: One or more numbers from 2 to 16.
        by: ``"tensor"`` for one step per tensor, ``"row"`` for one per slice along the first axis
            (output channel); both by default.
        kernels: Also measure a copy with torch's own quantized linear layers on the CPU, at 8 and 4
            bits. Only ``nn.Linear`` layers are quantized: convolutions, embeddings and all others
            keep their precision, see :func:`neuvar.measures.quantized_copy`.
        options:
            - ``parameters=None``: which to round, as tensors or by name; by default those of two or
              more dimensions, which leaves out biases and normalization layers.
            - ``feed=None``: ``feed(model, batch)`` returns outputs and targets of other batches.
            - ``batch_size=1024``: of a pair of tensors.
            - ``confidence=0.95``: confidence level of the intervals.

    >>> model = nn.Linear(3, 2)
    >>> data = torch.randn(20, 3), torch.arange(20) % 2
    >>> result = rounding(model, data, bits=[8, 2])
    >>> {by: list(points) for by, points in result.accuracies.items()}
    {'tensor': [8, 2], 'row': [8, 2]}
    """
    levels = [_validate.integer("bits", value, low=2, high=16) for value in several("bits", bits)]
    groups = [_validate.one_of("by", group, BY) for group in several("by", by)]
    _validate.boolean("kernels", kernels)
    stored = StoredWeights(model, data, 0, **options)

    def rounded(level: int, group: str) -> Proportion:
        return stored.accuracy(lambda _, w: round_weights(w, level, by=group))

    with stored:
        clean = stored.accuracy()
        accuracies = {group: {n: rounded(n, group) for n in levels} for group in groups}
        stored.move(None)
        copies = {n: quantized_copy(model, bits=n) for n in KERNEL_BITS if kernels}
        by_kernels = {n: stored.accuracy(of=copied) for n, copied in copies.items()}
    names = tuple(name for name, p in model.named_parameters() if p in stored.slots)
    return Rounding(clean, accuracies, by_kernels, names)


@dataclass(frozen=True)
class Faults:
    """Accuracy against the size or the rate of random faults in the weights.

    Intervals are over random faults; the data are fixed.

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
        mean = [accuracy.mean for accuracy in self.accuracies]
        ends = zip(*(accuracy.interval for accuracy in self.accuracies), strict=True)
        ax = plot_band(ax, self.levels, mean, ends, label, marker="o", markersize=3.5)
        if min(self.levels) > 0 and max(self.levels) > 20 * min(self.levels):
            ax.set_xscale("log")
        ax.set(xlabel=self.kind, ylabel="accuracy")
        return ax

    def __str__(self) -> str:
        points = zip(self.levels, self.accuracies, strict=True)
        cells = [f"{level:g}: {accuracy}" for level, accuracy in points]
        return f"{self.kind}; none: {self.clean.value:.4g}; {'; '.join(cells)}"


@lists_options(StoredOptions, StoredWeights)
def bit_flips(
    model: nn.Module,
    data: Any,
    *,
    rates: float | Iterable[float],
    bits: int | None = 8,
    by: str = "row",
    draws: int = 16,
    seed: int = 0,
    **options: Unpack[StoredOptions],
) -> Faults:
    """Accuracy under random bit flips in the stored weights, as in memory at low voltage.

    Args:
        model: A classifier.
        data: As for :func:`neuvar.neural_variability`.
        rates: One or more probabilities that a bit flips.
        bits: The weights are stored as signed integers of this many bits, 2 to 8; None for their
            own floating-point format, in which one flip can make a weight very large. Predictions
            from nan scores count as wrong.
        by: Which weights share a rounding step: each ``"row"`` or each ``"tensor"``.
        draws: Number of damaged models per rate.
        seed: Of the faults.
        options: As for :func:`rounding`.

    >>> model = nn.Linear(3, 2)
    >>> data = torch.randn(20, 3), torch.arange(20) % 2
    >>> bit_flips(model, data, rates=[0.001, 0.1], draws=4).levels
    (0.001, 0.1)
    """
    rates = [_validate.number("rates", rate, low=0, high=1) for rate in several("rates", rates)]
    if bits is not None:
        _validate.integer("bits", bits, low=2, high=8)
    _validate.one_of("by", by, BY)
    seed = _validate.seed(seed)
    stored = StoredWeights(model, data, seed, **options)

    def damage(rate: float, draw: int, p: Tensor, w: Tensor) -> Tensor:
        key = np.random.SeedSequence([seed, draw, stored.slots[p].number])
        generator = np.random.Generator(np.random.PCG64(key))
        return flip_bits(w, rate, generator, bits=bits, by=by)

    what = "floating-point weights" if bits is None else f"{bits}-bit weights"
    return stored.fault_curve(f"rate of bit flips in {what}", rates, draws, damage)


@lists_options(StoredOptions, StoredWeights)
def analog_noise(
    model: nn.Module,
    data: Any,
    *,
    scales: float | Iterable[float],
    kind: str = "multiplicative",
    draws: int = 16,
    seed: int = 0,
    **options: Unpack[StoredOptions],
) -> Faults:
    r"""Accuracy under the weight noise of analog hardware.

    .. math:: w\,(1 + \sigma z) \quad\text{or}\quad w + \sigma z \max|w|, \qquad z \sim N(0, 1)

    Args:
        model: A classifier.
        data: As for :func:`neuvar.neural_variability`.
        scales: One or more values of σ.
        kind: ``"multiplicative"``, or ``"additive"`` relative to the largest weight of each tensor.
        draws: Number of noisy models per scale. All scales use the same draws.
        seed: Of the noise.
        options: As for :func:`rounding`.

    >>> model = nn.Linear(3, 2)
    >>> data = torch.randn(20, 3), torch.arange(20) % 2
    >>> analog_noise(model, data, scales=[0.05, 0.2], draws=4).kind
    'multiplicative noise σ of the weights'
    """
    _validate.one_of("kind", kind, ("multiplicative", "additive"))
    sigmas = [scale("scales", value) for value in several("scales", scales)]
    stored = StoredWeights(model, data, seed, **options)

    def damage(sigma: float, draw: int, p: Tensor, w: Tensor) -> Tensor:
        z = standard_noise(stored.slots[p], stored.draw._replace(number=draw + 1), w.device)
        size = w.abs() if kind == "multiplicative" else w.abs().max()
        return w + sigma * z.to(w.dtype) * size

    return stored.fault_curve(f"{kind} noise σ of the weights", sigmas, draws, damage)


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
    # One weight may have several flips. Positions are distinct, so adding sets each bit once.
    np.add.at(masks, positions // width, np.left_shift(np.int64(1), positions % width))
    flips = torch.from_numpy(masks).to(weights.device).view(weights.shape)
    if bits is None:
        stored = bit_patterns(weights.contiguous())
        return (stored ^ flips.to(stored.dtype)).view(weights.dtype)
    # In half precision a quotient may round to 2 ** (bits - 1), which does not fit.
    exact = half_to_float(weights)
    step = rounding_step(exact, bits, by=by)
    levels = (exact / step.masked_fill(step == 0, 1)).round().long()
    stored = (levels & (2**bits - 1)) ^ flips
    signed = torch.where(stored >= 2 ** (bits - 1), stored - 2**bits, stored)
    return (signed * step).to(weights.dtype)
