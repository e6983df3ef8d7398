"""``b="auto"``: a scale of noise that is set during training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuvar.noise import Term, b_from_std, family, pieces
from neuvar.optim.forward import Noise
from neuvar.optim.layout import local

AUTO = "auto"
TOTAL_NOISE = 5.2
"""Sum of the relative noise of all layers after the second rise; see :class:`AutoB`."""
LARGEST_STD = 0.08
"""Upper limit of the standard deviation of the noise after the second rise."""
FIRST_HEIGHT = 0.6
"""b after the first rise, as a fraction of b after the second."""
SHARE = 0.25
"""Factor s of the budget for noise; see :class:`AutoB`."""
LEAST = 0.01
"""If the loss has fallen by less than this fraction of the first loss, b shrinks."""
BAND = 4.0
"""b grows if the cost is below budget / BAND."""
UPDATE_EVERY = 5
"""Steps between two updates of b."""
FIRST_RISE = 5
"""Updates of the first rise, which begins at 1 / FIRST_RISE of its height."""
WAIT = 30
"""Updates before the second rise, and before b follows its cost."""
SECOND_RISE = 20
"""Updates of the second rise."""
DECAY = 0.8
"""Decay rate of the running means."""
SPEED = 0.015
"""Change of log b per update, divided by log(budget / cost)."""
MAX_LOG_RATIO = 5.0
"""Upper limit of abs(log(budget / cost)): a factor of 10 in b takes at least 155 steps."""
LARGE_WEIGHTS = 0.5
"""Threshold on θ·g / loss above which the initial weights are too large."""
LATEST_FIRST_LOSS = UPDATE_EVERY * WAIT
"""Number of steps after which the loss becomes the first loss, however large the weights."""
HIGH_LOSS = 4.0
"""Multiple of the first loss above which b shrinks at once."""
SHRINK = 0.7
"""Factor of b per update while the loss is that high."""
RANGE = (1e-3, 1e3)
"""Limits of b, in multiples of its value after the second rise."""


class AutoB(NamedTuple):
    r"""State of the control of b: plain numbers, stored in a parameter group.

    **Initial value.** A layer with n inputs preserves the size of its signal if its weights have
    size :math:`\sqrt{2/n}` (He et al., 2015), so noise of scale b changes the signal by a
    relative :math:`b\sqrt{n/2}`. b rises to the value at which this sums to 5.2 over all layers,
    but to at most 0.08: the wider and deeper a network, the smaller its b. It rises to 0.6 of that
    value in the first 25 steps, and to all of it between steps 150 and 250. More noise at the start
    makes the loss explode, and accuracy on clean labels suffers.

    **Updates.** The inner product of the noise :math:`\epsilon = b\xi` and the gradient g at
    :math:`\theta + \epsilon` is the cost of noise. Its expectation is the slope of the loss in
    log b:

    .. math:: E[\epsilon \cdot g] = \frac{\partial}{\partial \log b} E[L(\theta + b \xi)].

    With :math:`L_0` the loss at the start, :math:`L_0 - L` has been learned. The budget is
    :math:`s \sqrt{(L_0 - L)\,L_0}` with s = 0.25. If the cost is above the budget, b shrinks,
    because steps undo noise instead of learning. If it is below a quarter of the budget, b grows.
    In between, b does not change, because a network adapts to noise and its cost falls over time.
    If less than a hundredth of :math:`L_0` has been learned, b shrinks in any case. These updates
    begin after 150 steps. Until step 250, b rises as above unless it shrinks. If the loss exceeds
    four times :math:`L_0`, b shrinks at once. The budget is not a fraction of :math:`L_0 - L`
    alone: with very noisy labels little can be learned, so b would shrink, and the network would
    memorize the labels. The rule does not depend on the scale of the loss.

    **First loss.** :math:`L_0` is usually the loss of the first step. If the initial weights are
    too large, as for ``nn.Embedding`` that is also the last layer, the network is overconfident and
    this loss is too high. The product :math:`\theta \cdot g` of a tensor shows it: for the cross
    entropy and the last layer it is the loss minus the entropy of the predictions. While it is
    above half of the loss for any tensor, :math:`L_0` is not taken and b waits, for at most 150
    steps.

    Attributes:
        drawn: number of the draw of the next gradient.
        steps: number of steps.
        updates: number of updates of the running means.
        cost: running mean of the inner product.
        loss: running mean of the loss at perturbed weights.
        first: the first loss; infinite before it is known.
        start: b after the second rise, computed from the shapes of the weights.
        reported: number of losses reported for the next step.
        new_weight: sum of the weights of these losses in the gradient.
        new_cost: inner product of the noise with the gradient.
        new_loss: weighted sum of these losses.
        new_sizes: θ·g of each tensor, while ``first`` is not known.
    """

    drawn: int = 0
    steps: int = 0
    updates: int = 0
    cost: float = 0.0
    loss: float = 0.0
    first: float = math.inf
    start: float = 1.0
    reported: int = 0
    new_weight: float = 0.0
    new_cost: float = 0.0
    new_loss: float = 0.0
    new_sizes: tuple[float, ...] = ()

    @property
    def due(self) -> bool:
        """Whether the next step reads the reports, to update b or to get the first loss."""
        return not self.begun or (self.steps + 1) % UPDATE_EVERY == 0

    @property
    def begun(self) -> bool:
        """Whether the first loss is known."""
        return not math.isinf(self.first)

    def accumulate(self, reports: Reports) -> AutoB:
        """Add the reports for the next step, read from the device."""
        weight, loss, cost = (float(sum(parts)) for parts in reports.sums)
        return self._replace(
            reported=self.reported + reports.count,
            new_weight=self.new_weight + weight,
            new_loss=self.new_loss + loss,
            new_cost=self.new_cost + cost,
            new_sizes=tuple(
                old + float(new)
                for old, new in zip_longest(self.new_sizes, reports.sizes, fillvalue=0)
            ),
        )

    def reset(self) -> AutoB:
        """Drop the reports for the next step."""
        return self._replace(reported=0, new_weight=0.0, new_cost=0.0, new_loss=0.0, new_sizes=())

    def update(self, cost: float, loss: float, size: float = 0.0) -> AutoB:
        """Update the running means."""
        if not (math.isfinite(cost) and math.isfinite(loss)):
            return self
        if not self.begun:
            too_large = size > LARGE_WEIGHTS * abs(loss) and self.steps < LATEST_FIRST_LOSS
            return self if too_large else self._replace(first=loss)
        # The first updates average over the few values so far, without a bias towards 0.
        memory = min(DECAY, self.updates / (self.updates + 1))
        return self._replace(
            updates=self.updates + 1,
            cost=memory * self.cost + (1 - memory) * cost,
            loss=memory * self.loss + (1 - memory) * loss,
        )

    @property
    def change(self) -> float:
        """The change of log b now.

        >>> AutoB(updates=99, first=2.3, loss=2.4).change == -SPEED * MAX_LOG_RATIO  # no progress
        True
        >>> AutoB(updates=99, first=2.3, loss=0.3).change == SPEED * MAX_LOG_RATIO  # no cost
        True
        >>> AutoB(updates=99, first=2.3, loss=0.3, cost=0.3).change
        0.0
        """
        learned = self.first - self.loss
        if self.loss > HIGH_LOSS * abs(self.first):
            return math.log(SHRINK)
        if self.updates < WAIT:
            return math.log(1 + 1 / self.updates) if 0 < self.updates < FIRST_RISE else 0.0
        budget = SHARE * math.sqrt(max(learned * abs(self.first), 0.0))
        if learned <= LEAST * abs(self.first):
            log_ratio = -MAX_LOG_RATIO
        elif self.cost > budget:
            log_ratio = math.log(budget / self.cost)
        elif self.updates < WAIT + SECOND_RISE:
            return -math.log(FIRST_HEIGHT) / SECOND_RISE
        elif self.cost < budget / BAND:
            log_ratio = math.log(budget / BAND / self.cost) if self.cost > 0 else MAX_LOG_RATIO
        else:
            log_ratio = 0.0
        return SPEED * min(max(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO)

    def applied(self, b: float) -> float:
        """Apply the change to b."""
        low, high = (self.start * end for end in RANGE)
        return min(max(b * math.exp(self.change), low), high)


class Reports:
    """Losses reported for the next step, and inner products with their gradients.

    ``backward()`` is called on a multiple of a loss: its weight is the factor of a gradient scaler,
    one over the number of micro-batches, or 1. Gradients are read in hooks, before they are
    unscaled or clipped, and values stay on the device.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._hooks: list[Any] = []
        self.clear()

    def clear(self) -> None:
        """Drop the values so far; hooks stay."""
        self.count = 0
        self.backwards: Counter[int] = Counter()
        self.sums: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        self.sizes: list[Any] = []

    def add(self, loss: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add a loss whose backward pass has begun."""
        self.count += 1
        wide = [x.detach().double() if isinstance(x, Tensor) else float(x) for x in (loss, weight)]
        self.sums[0].append(wide[1])
        self.sums[1].append(wide[1] * wide[0])

    def expect(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        """Add ``loss / scale`` when the backward pass of ``loss`` begins."""
        value, seen = loss.detach().double() / scale, list[bool]()
        self.waiting += 1

        def on_backward(weight: Tensor) -> None:
            if not seen:  # its gradient may be computed several times
                seen.append(True)
                self.waiting -= 1
                self.add(value, weight.double() * scale)

        loss.register_hook(on_backward)

    def watch(self, params: Iterable[Tensor], eps: Noise, *, sizes: bool) -> None:
        """Register hooks on the gradients of parameters, once per step."""
        if self._hooks:
            return

        def on_gradient(index: int, p: Tensor, g: Tensor) -> None:
            self.backwards[index] += 1
            if p in eps:
                self.sums[2].append(inner_product(eps[p], g.detach()))
            if sizes:
                self.sizes += [0.0] * (index + 1 - len(self.sizes))
                self.sizes[index] += (p.detach().float() * g.detach().float()).sum().double()

        for index, p in enumerate(params):
            if p.requires_grad:
                self._hooks.append(p.register_hook(partial(on_gradient, index, p)))

    @property
    def unreported(self) -> int:
        """Number of backward passes without a report, since the first report of the step."""
        # The minimum: checkpointed segments that share a weight compute several gradients of it.
        return max(0, min(self.backwards.values(), default=0) - self.count)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def inner_product(term: Term, g: Tensor, size: Tensor | None = None) -> Tensor:
    """Inner product of a parameter's noise with its gradient, in double precision.

    ``size`` is what noise relative to the weights is multiplied by.
    """
    g = local(g) if size is None else local(g) * size
    flat = g.contiguous().view(-1)
    drawn = pieces(term.slot, term.draw, flat.device)
    parts = [(flat[low:high].float() * z).sum() for low, high, z in drawn]
    return term.draw.sign * term.b * torch.stack(parts).sum().double()


def begin(new: Sequence[dict[str, Any]], known: Sequence[dict[str, Any]]) -> None:
    """Start to control the b of new groups, together with that of known groups if there are any."""
    if known:
        control, b = known[0]["auto"], known[0]["b"]
    else:
        std = suggested_std([p.shape for g in new for p in g["params"] if p.requires_grad])
        start = b_from_std(new[0]["noise"], std)
        control, b = tuple(AutoB(start=start)), FIRST_HEIGHT * start / FIRST_RISE
    share([*known, *new], b, control)


def share(groups: Sequence[dict[str, Any]], b: float, control: tuple[Any, ...]) -> None:
    """Store the state of the control in all groups, with noise of the same standard deviation.

    ``b`` and the control's ``start`` are for the noise family of the first group.
    """
    std = family(groups[0]["noise"]).std
    for group in groups:
        group |= {"auto": control, "b": b * (std / family(group["noise"]).std)}


def suggested_std(shapes: Iterable[Sequence[int]]) -> float:
    """Standard deviation of the noise after the second rise, for weights of these shapes.

    Each tensor with two or more dimensions counts as a layer; its first dimension is the outputs.
    Tensors of shape (1, n, m) do not count: they are class tokens and position embeddings.

    >>> round(suggested_std([(1024, 784), (1024,), (1024, 1024), (10, 1024)]), 4)
    0.0799
    """
    layers = [s for s in shapes if len(s) > 1 and not (len(s) == 3 and s[0] == 1)]
    inputs = [math.prod(shape[1:]) for shape in layers] or [1]
    return min(LARGEST_STD, TOTAL_NOISE / sum(math.sqrt(max(n, 1) / 2) for n in inputs))


def check_state(value: Any) -> None:
    """Validate the state of the control of b from a state dict."""
    types = tuple(map(type, value)) if isinstance(value, (tuple, list)) else ()
    if types != tuple(map(type, AutoB())):
        raise ValueError(f"the state dict's 'auto' is not the state of b='auto': {value!r}")
