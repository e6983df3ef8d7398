"""Sharpness in the worst direction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuvar._batches import Feed
from neuvar._validate import integer
from neuvar.measures.curvature import gradient
from neuvar.measures.landscape import Landscape, Loss, Parameters
from neuvar.noise import pieces, scale

Point = dict[Any, Tensor]
"""A point of the space that is searched."""


@dataclass(frozen=True)
class Sharpness:
    r"""Sharpness in the worst direction that the search found.

    ``value`` is :math:`100\,(\max L - L) / (1 + L)` from the ``clean`` and the ``highest`` loss. It
    is a lower bound: more ``steps`` and ``starts`` can only raise it. ``evaluations`` is the number
    of points at which loss and gradient were computed.
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
    parameters: Parameters | None = None,
    seed: int = 0,
    feed: Feed | None = None,
    batch_size: int = 1024,
) -> Sharpness:
    r""":math:`(C_\epsilon, A)`-sharpness: the highest loss in a box around the weights.

    .. math::

        \frac{\max_{y \in C_\epsilon} L(\theta + A y) - L(\theta)}{1 + L(\theta)} \cdot 100,
        \qquad C_\epsilon = \{y : |y_i| \le \epsilon\,(|(A^+\theta)_i| + 1)\}

    A is the identity, or has ``subspace`` random columns with standard Gaussian entries. The
    search takes ``steps`` of projected ascent along the sign of the gradient from ``starts`` random
    points; the paper used L-BFGS-B. The other arguments are as for :func:`neural_variability`.

    References:
        Keskar et al.: On Large-Batch Training for Deep Learning: Generalization Gap and Sharp
        Minima, ICLR 2017, metric 2.1.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> x = torch.ones(1, 1)
        >>> data = x, model(x).detach()
        >>> result = keskar_sharpness(model, nn.functional.mse_loss, data, epsilon=0.1)
        >>> abs(result.value - (0.1 * (abs(model.weight.item()) + 1))**2 * 100) < 1e-3
        True
    """
    epsilon = scale("epsilon", epsilon)
    steps, starts = integer("steps", steps, low=1), integer("starts", starts, low=1)
    if subspace is not None:
        subspace = integer("subspace", subspace, low=1)
    landscape = Landscape(
        model, loss, data, parameters=parameters, seed=seed, feed=feed, batch_size=batch_size
    )
    with landscape:
        space = _WholeSpace(landscape) if subspace is None else _Subspace(landscape, subspace)
        width = {key: epsilon * (x.abs() + 1) for key, x in space.coordinates.items()}
        generator = torch.Generator().manual_seed(seed)
        clean = highest = landscape.clean.loss
        for _ in range(starts):
            start = {
                key: w * (2 * torch.rand(w.shape, generator=generator).to(w) - 1)
                for key, w in width.items()
            }
            highest = max(highest, _ascend(landscape, space, start, width, steps))
    return Sharpness(
        value=100 * (highest - clean) / (1 + clean),
        clean=clean,
        highest=highest,
        epsilon=epsilon,
        subspace=subspace,
        evaluations=starts * (steps + 1),
    )


def _ascend(landscape: Landscape, space: _WholeSpace, y: Point, width: Point, steps: int) -> float:
    """Highest loss on an ascent inside the box."""
    highest = -math.inf
    for step in range(steps + 1):
        landscape.move(space.to_weights(y))
        loss = landscape.evaluate().loss
        if not math.isfinite(loss):
            return math.inf
        highest = max(highest, loss)
        if step < steps:
            slope = space.to_coordinates(gradient(landscape))
            # The first step can cross the box; later ones are shorter, for maxima in its inside.
            stride = 2.0 / (1 + step) ** 0.5
            for key, w in width.items():
                y[key] = (y[key] + stride * w * slope[key].sign()).clamp(-w, w)
    return highest


class _WholeSpace:
    """Coordinates y that are the weights themselves, A = identity."""

    def __init__(self, landscape: Landscape) -> None:
        self.coordinates: Point = {p: p.detach().clone() for p in landscape.slots}

    def to_weights(self, y: Point) -> Mapping[Tensor, Tensor]:
        """A y for each parameter."""
        return y

    def to_coordinates(self, slope: dict[Tensor, Tensor]) -> Point:
        """The slope with respect to y."""
        return slope


class _Subspace(_WholeSpace):
    """Coordinates y in a random subspace; the columns of A are drawn again at every use."""

    def __init__(self, landscape: Landscape, dimension: int) -> None:
        weights = sum(p.numel() for p in landscape.slots)
        if dimension > weights:
            raise ValueError(f"subspace must be at most the {weights} weights, got {dimension}")
        self.landscape, self.dimension = landscape, dimension
        gram = torch.zeros(dimension, dimension, dtype=torch.float64)
        for p in landscape.slots:
            for _, _, z in self._columns(p):
                gram += (z @ z.T).double().cpu()
        if torch.linalg.matrix_rank(gram) < dimension:
            raise ValueError(
                f"subspace must be smaller than the number of weights, got {dimension}"
            )
        projected = self.to_coordinates({p: p.detach() for p in landscape.slots})["y"]
        self.coordinates: Point = {"y": torch.linalg.solve(gram, projected)}

    def _columns(self, p: Tensor) -> Iterable[tuple[int, int, Tensor]]:
        """Blocks of rows of A that belong to a parameter, transposed."""
        slot = self.landscape.slots[p]
        draws = (self.landscape.draw._replace(number=k + 1) for k in range(self.dimension))
        for parts in zip(*(pieces(slot, draw, p.device) for draw in draws), strict=True):
            yield parts[0][0], parts[0][1], torch.stack([z for _, _, z in parts])

    def to_weights(self, y: Point) -> Mapping[Tensor, Tensor]:
        shift = {}
        for p in self.landscape.slots:
            rows = [y["y"].to(z) @ z for _, _, z in self._columns(p)]
            shift[p] = torch.cat(rows).view(p.shape) if rows else torch.zeros_like(p)
        return shift

    def to_coordinates(self, slope: dict[Tensor, Tensor]) -> Point:
        total = torch.zeros(self.dimension, dtype=torch.float64)
        for p, g in slope.items():
            flat = g.reshape(-1)
            for low, high, z in self._columns(p):
                total += (z @ flat[low:high].to(z.dtype)).double().cpu()
        return {"y": total}
