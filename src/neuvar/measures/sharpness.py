"""Sharpness in the worst direction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from neuvar._batches import Feed
from neuvar._validate import integer
from neuvar.measures.curvature import gradient
from neuvar.measures.landscape import Landscape, Loss
from neuvar.noise import pieces, scale

Point = dict[Any, Tensor]
"""A point of the space that is searched."""


@dataclass(frozen=True)
class Sharpness:
    r"""Sharpness in the worst direction that was found.

    Attributes:
        value: :math:`100\,(\max L - L) / (1 + L)`. The maximum is searched for, so this is a lower
            bound of the sharpness; more ``steps`` and ``starts`` can only raise it.
        clean: Loss at the model's own weights.
        highest: Highest loss that was found.
        epsilon: Size of the neighbourhood.
        subspace: Dimension of the random subspace, or None for the whole space.
        evaluations: How often loss and gradient over all data were computed.
    """

    value: float
    clean: float
    highest: float
    epsilon: float
    subspace: int | None
    evaluations: int


def keskar_sharpness(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    epsilon: float = 1e-3,
    subspace: int | None = None,
    steps: int = 20,
    starts: int = 1,
    parameters: Iterable[Tensor] | Iterable[str] | None = None,
    seed: int = 0,
    feed: Feed | None = None,
    batch_size: int = 1024,
) -> Sharpness:
    r""":math:`(C_\epsilon, A)`-sharpness: how high the loss gets in a box around the weights.

    .. math::

        \frac{\max_{y \in C_\epsilon} L(\theta + A y) - L(\theta)}{1 + L(\theta)} \cdot 100,
        \qquad C_\epsilon = \{y : |y_i| \le \epsilon\,(|(A^+\theta)_i| + 1)\}

    A is the identity, or has ``subspace`` random columns with standard Gaussian entries. The
    maximum is searched for by projected ascent along the sign of the gradient, from random points
    of the box, where the reference used ten steps of L-BFGS-B.

    References:
        Keskar et al.: On Large-Batch Training for Deep Learning: Generalization Gap and Sharp
        Minima, ICLR 2017, metric 2.1.

    Args:
        model: Any module; it is left as found.
        loss: Mean loss over a batch.
        data: As for :func:`neural_variability`.
        epsilon: Size of the box.
        subspace: Dimension of the random subspace; the whole space by default.
        steps: Steps of ascent from each start.
        starts: How many random starting points.
        parameters: Which weights may move; all by default.
        seed: Fixes the subspace and the starting points.
        feed: ``feed(model, batch)`` returns outputs and targets of unusual batches.
        batch_size: Of a pair of tensors.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> x = torch.ones(1, 1)
        >>> data = x, model(x).detach()
        >>> found = keskar_sharpness(model, nn.functional.mse_loss, data, epsilon=0.1)
        >>> abs(found.value - (0.1 * (abs(model.weight.item()) + 1))**2 * 100) < 1e-3
        True
    """
    epsilon = scale("epsilon", epsilon)
    integer("steps", steps, low=1)
    integer("starts", starts, low=1)
    if subspace is not None:
        integer("subspace", subspace, low=1)
    landscape = Landscape(
        model, loss, data, parameters=parameters, seed=seed, feed=feed, batch_size=batch_size
    )
    with landscape:
        space: _Space = _Whole(landscape) if subspace is None else _Random(landscape, subspace)
        width = {key: epsilon * (x.abs() + 1) for key, x in space.coordinates.items()}
        generator = torch.Generator().manual_seed(seed)
        highest = landscape.clean.loss
        for _ in range(starts):
            start = {
                key: w * (2 * torch.rand(w.shape, generator=generator).to(w) - 1)
                for key, w in width.items()
            }
            highest = max(highest, _ascend(landscape, space, start, width, steps))
    clean = landscape.clean.loss
    return Sharpness(
        value=100 * (highest - clean) / (1 + clean),
        clean=clean,
        highest=highest,
        epsilon=epsilon,
        subspace=subspace,
        evaluations=starts * (steps + 1),
    )


def _ascend(landscape: Landscape, space: _Space, y: Point, width: Point, steps: int) -> float:
    """Highest loss on a path upward inside a box."""
    highest = -math.inf
    for step in range(steps + 1):
        landscape.move(space.shift(y))
        loss = landscape.read().loss
        if not math.isfinite(loss):
            return math.inf
        highest = max(highest, loss)
        if step == steps:
            break
        slope = space.pull(gradient(landscape))
        # The first step can cross the box; shorter ones follow, for maxima that are no corner.
        stride = 2.0 / (1 + step) ** 0.5
        for key, w in width.items():
            y[key] = (y[key] + stride * w * slope[key].sign()).clamp(-w, w)
    return highest


class _Space(Protocol):
    """Where the maximum is searched: coordinates y of the model, and the map to its weights."""

    coordinates: Point

    def shift(self, y: Point) -> Mapping[Tensor, Tensor]:
        """A y, by parameter."""

    def pull(self, slope: Mapping[Tensor, Tensor]) -> Point:
        """The slope with respect to y."""


class _Whole:
    """All weights, A = identity."""

    def __init__(self, landscape: Landscape) -> None:
        self.coordinates: Point = {p: p.detach().clone() for p in landscape.slots}

    def shift(self, y: Point) -> Mapping[Tensor, Tensor]:
        return y

    def pull(self, slope: Mapping[Tensor, Tensor]) -> Point:
        return dict(slope)


class _Random:
    """A subspace that random directions span; they are drawn anew whenever they are needed."""

    def __init__(self, landscape: Landscape, dimension: int) -> None:
        weights = sum(p.numel() for p in landscape.slots)
        if dimension > weights:
            raise ValueError(f"subspace must be at most the {weights} weights, got {dimension}")
        self.landscape, self.dimension = landscape, dimension
        gram = torch.zeros(dimension, dimension, dtype=torch.float64)
        projected = torch.zeros(dimension, dtype=torch.float64)
        for p in landscape.slots:
            flat = p.detach().reshape(-1)
            for low, high, z in self._columns(p):
                gram += (z @ z.T).double().cpu()
                projected += (z @ flat[low:high].to(z.dtype)).double().cpu()
        if torch.linalg.matrix_rank(gram) < dimension:
            raise ValueError(
                f"subspace must be smaller than the number of weights, got {dimension}"
            )
        self.coordinates: Point = {"y": torch.linalg.solve(gram, projected)}

    def _columns(self, p: Tensor) -> Iterable[tuple[int, int, Tensor]]:
        """Blocks of rows of A that belong to a parameter, transposed."""
        slot = self.landscape.slots[p]
        draws = (self.landscape.kind._replace(number=k + 1) for k in range(self.dimension))
        for parts in zip(*(pieces(slot, draw, p.device) for draw in draws), strict=True):
            yield parts[0][0], parts[0][1], torch.stack([z for _, _, z in parts])

    def shift(self, y: Point) -> Mapping[Tensor, Tensor]:
        found = {}
        for p in self.landscape.slots:
            rows = [y["y"].to(z) @ z for _, _, z in self._columns(p)]
            found[p] = torch.cat(rows).view(p.shape) if rows else torch.zeros_like(p)
        return found

    def pull(self, slope: Mapping[Tensor, Tensor]) -> Point:
        total = torch.zeros(self.dimension, dtype=torch.float64)
        for p, g in slope.items():
            flat = g.reshape(-1)
            for low, high, z in self._columns(p):
                total += (z @ flat[low:high].to(z.dtype)).double().cpu()
        return {"y": total}
