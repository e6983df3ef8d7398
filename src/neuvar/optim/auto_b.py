"""A scale of noise that sets itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuvar.noise import Term, b_from_std, family, pieces
from neuvar.optim.forward import Noise
from neuvar.optim.layout import local

AUTO = "auto"
NOISE = 5.2
"""What the noise of all layers adds up to after the second rise; see :class:`AutoB`."""
LARGEST = 0.08
"""Where b rises to at the most."""
FIRST = 0.6
"""The part of it that b rises to at first."""
SHARE = 0.25
"""What noise may cost at the most."""
LEAST = 0.01
"""Share of the loss below which nothing has been learned."""
BAND = 4.0
"""How much less it may cost before b grows."""
EVERY = 5
"""Steps from one look to the next."""
RISE = 5
"""Looks of the first rise, from nothing."""
WAIT = 30
"""Looks before the second rise, and before b follows its cost: networks first get used to noise."""
SECOND_RISE = 20
"""Looks of the second rise."""
MEMORY = 0.8
"""Weight of the looks before in the running means."""
SPEED = 0.015
"""Change of log b after a look, for each factor of e that the cost is off."""
MOST_OFF = 5.0
"""Factors of e beyond which b changes no faster: a factor of ten takes at least 155 steps."""
TOO_LARGE = 0.5
"""Share of the loss beyond which it comes from weights that are too large; see :class:`AutoB`."""
LATEST = EVERY * WAIT
"""Steps after which the beginning is over, wherever the loss comes from."""
TOO_HIGH = 4.0
"""Multiple of the first loss beyond which b is too large, also in the first looks."""
RETREAT = 0.7
"""What b is multiplied with at each look as long as it is."""
RANGE = (1e-3, 1e3)
"""Between which multiples of the scale that it rises to b stays, so that it can come back."""


class AutoB(NamedTuple):
    r"""What the control of b carries from step to step, as plain numbers in a parameter group.

    **Where b begins.** A layer that sums n inputs keeps the size of its signal if its weights are
    of the size :math:`\sqrt{2/n}` (He et al., 2015), so noise of scale b disturbs it by
    :math:`b\sqrt{n/2}` of its size. In two rises b comes to where this adds up to 5.2 over
    all layers: much for wide and shallow networks, little for deep ones. Within 25 steps it rises
    to .6 of that, since more noise before anything is learned makes the loss explode and weights
    grow, which costs accuracy where labels are clean; between steps 150 and 250 to the whole.

    **When b changes.** The noise :math:`\epsilon = b\xi` and the gradient g at
    :math:`\theta + \epsilon` are at hand in every step, and their inner product says what noise
    costs: on average it is how fast the loss that is minimised rises with the logarithm of b,

    .. math:: E[\epsilon \cdot g] = \frac{\partial}{\partial \log b} E[L(\theta + b \xi)].

    What has been learned is by how much that loss has fallen since the beginning, :math:`L_0 - L`.
    The price of noise is a share s of the geometric mean of what has been learned and of what
    there was to learn, :math:`s \sqrt{(L_0 - L)\,L_0}`. As long as noise costs between a quarter of
    its price and the whole of it, b is left alone, because a network that gets used to noise pays
    less for it by and by. Above, b shrinks, because steps undo noise rather than learn; below, it
    grows, because more noise costs little. As long as less than a hundredth of the loss is learned
    it shrinks, whatever it costs: a network that noise has blinded pays nothing for it. All this
    begins after 150 steps and is slow, but the faster the further the cost is off; where b would
    shrink, there is no second rise. Only where the loss rises to four times its first value does b
    give way at once.

    A share of what has been learned alone would be too little where labels are so noisy that little
    can be learned: b would shrink, and the network would learn them by heart. The rule has no unit:
    it is the same for a loss of another scale.

    **What the beginning is.** Usually the first step. But where weights are too large to begin
    with, such as those of ``nn.Embedding`` where it is also the last layer, the network is sure of
    what it does not know, and its loss says nothing about what there is to learn. How fast the loss
    rises with the size of a tensor of weights, :math:`\theta \cdot g`, shows it: for the cross
    entropy and the last layer it is the loss less the entropy of the predictions. As long as it is
    more than half of the loss for any tensor, :math:`L_0` is not taken and b waits, for 150 steps
    at the most.

    Attributes:
        drawn: number of the draw that the next gradient is expected under.
        steps: how many there were.
        looks: how many looks there were.
        cost: running mean of the inner product.
        loss: running mean of the loss at perturbed weights.
        first: the loss at the beginning; infinite before it is known.
        start: the scale after the second rise, as the shapes of the weights suggest it.
        reported: how many losses were reported for the next step.
        new_weight: sum of the weights of these losses in the gradient.
        new_cost: inner product of the noise with the gradient.
        new_loss: weighted sum of these losses.
        new_size: largest θ·g of a tensor, as long as ``first`` is not known.
    """

    drawn: int = 0
    steps: int = 0
    looks: int = 0
    cost: float = 0.0
    loss: float = 0.0
    first: float = math.inf
    start: float = 1.0
    reported: int = 0
    new_weight: float = 0.0
    new_cost: float = 0.0
    new_loss: float = 0.0
    new_size: float = 0.0

    @property
    def due(self) -> bool:
        """Whether the step that comes is looked at."""
        return not self.begun or (self.steps + 1) % EVERY == 0

    @property
    def begun(self) -> bool:
        """Whether the loss at the beginning is known."""
        return not math.isinf(self.first)

    def accumulate(self, reports: Reports) -> AutoB:
        """Add what was reported for the next step, and read it from the device."""
        weight, loss, cost = (float(sum(parts)) for parts in reports.sums)
        return self._replace(
            reported=self.reported + reports.count,
            new_weight=self.new_weight + weight,
            new_loss=self.new_loss + loss,
            new_cost=self.new_cost + cost,
            new_size=max([self.new_size, *map(float, reports.sizes)]),
        )

    def reset(self) -> AutoB:
        """Drop the reports for the next step."""
        return self._replace(reported=0, new_weight=0.0, new_cost=0.0, new_loss=0.0, new_size=0.0)

    def update(self, cost: float, loss: float, size: float = 0.0) -> AutoB:
        """Add a look to the running means."""
        if not (math.isfinite(cost) and math.isfinite(loss)):
            return self
        if not self.begun:
            too_large = size > TOO_LARGE * abs(loss) and self.steps < LATEST
            return self if too_large else self._replace(first=loss)
        # The mean of few looks is their plain mean, so that it does not start from nothing.
        memory = min(MEMORY, self.looks / (self.looks + 1))
        return self._replace(
            looks=self.looks + 1,
            cost=memory * self.cost + (1 - memory) * cost,
            loss=memory * self.loss + (1 - memory) * loss,
        )

    @property
    def change(self) -> float:
        """By how much log b changes now.

        >>> AutoB(looks=99, first=2.3, loss=2.4).change == -SPEED * MOST_OFF  # nothing learned
        True
        >>> AutoB(looks=99, first=2.3, loss=0.3).change == SPEED * MOST_OFF  # noise costs nothing
        True
        >>> AutoB(looks=99, first=2.3, loss=0.3, cost=0.3).change
        0.0
        """
        learned = self.first - self.loss
        if self.loss > TOO_HIGH * abs(self.first):
            return math.log(RETREAT)
        if self.looks < WAIT:
            return math.log(1 + 1 / self.looks) if 0 < self.looks < RISE else 0.0
        price = SHARE * math.sqrt(max(learned * abs(self.first), 0.0))
        if learned <= LEAST * abs(self.first):
            off = -MOST_OFF
        elif self.cost > price:
            off = math.log(price / self.cost)
        elif self.looks < WAIT + SECOND_RISE:
            return -math.log(FIRST) / SECOND_RISE
        elif self.cost < price / BAND:
            off = math.log(price / BAND / self.cost) if self.cost > 0 else MOST_OFF
        else:
            off = 0.0
        return SPEED * min(max(off, -MOST_OFF), MOST_OFF)

    def applied(self, b: float) -> float:
        """The scale after the change."""
        low, high = (self.start * end for end in RANGE)
        return min(max(b * math.exp(self.change), low), high)


class Reports:
    """Losses reported for the next step, and what their gradients say; not yet read from a device.

    A loss has a weight c in what ``backward()`` is called on: the factor of a gradient scaler, one
    over the number of micro-batches, or 1. The gradient that arrives at a parameter is that of the
    weighted sum. It is seen here before it is unscaled or clipped.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._hooks: list[Any] = []
        self.clear()

    def clear(self) -> None:
        """Drop what was seen so far, and go on watching."""
        self.count = 0
        self.backwards: Counter[int] = Counter()
        self.sums: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        self.sizes: list[Any] = []
        self._weight: Any = 1.0

    def add(self, loss: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Note a loss whose backward pass has begun."""
        self.count += 1
        wide = [x.detach().double() if isinstance(x, Tensor) else float(x) for x in (loss, weight)]
        self._weight = wide[1]
        self.sums[0].append(wide[1])
        self.sums[1].append(wide[1] * wide[0])

    def expect(self, loss: Tensor) -> None:
        """Note a loss as soon as its backward pass begins."""
        value, seen = loss.detach(), list[bool]()
        self.waiting += 1

        def on_backward(weight: Tensor) -> None:
            if not seen:  # a gradient of it may be taken several times
                seen.append(True)
                self.waiting -= 1
                self.add(value, weight)

        loss.register_hook(on_backward)

    def watch(self, params: Iterable[Tensor], eps: Noise, *, sizes: bool) -> None:
        """Look at the gradients of parameters when they arrive; once for each step."""
        if self._hooks:
            return

        def on_gradient(index: int, p: Tensor, g: Tensor) -> None:
            self.backwards[index] += 1
            if p in eps:
                self.sums[2].append(inner_product(eps[p], g.detach()))
            if sizes:
                self.sizes.append((p.detach().float() * g.detach().float()).sum() / self._weight)

        for index, p in enumerate(params):
            if p.requires_grad:
                self._hooks.append(p.register_hook(partial(on_gradient, index, p)))

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop to look at gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def inner_product(term: Term, g: Tensor) -> Tensor:
    """Inner product of a parameter's noise with its gradient, in double precision."""
    flat = local(g).contiguous().view(-1)
    drawn = pieces(term.slot, term.draw, flat.device)
    parts = [(flat[low:high].float() * z).sum() for low, high, z in drawn]
    return term.draw.sign * term.b * torch.stack(parts).sum().double()


def begin(new: Sequence[dict[str, Any]], known: Sequence[dict[str, Any]]) -> None:
    """Let the b of new groups set itself, under the control of the known groups if there are any.

    Only weights that carry noise count: those that are trained, of the groups given here.
    """
    if known:
        control, b = known[0]["auto"], known[0]["b"]
    else:
        std = suggested_std([p.shape for g in new for p in g["params"] if p.requires_grad])
        start = b_from_std(new[0]["noise"], std)
        control, b = tuple(AutoB(start=start)), FIRST * start / RISE
    share([*known, *new], b, control)


def share(groups: Sequence[dict[str, Any]], b: float, control: tuple[Any, ...]) -> None:
    """Give groups the state of their one control, and noise of the same standard deviation.

    The scale b is that of the first one's noise; so is the ``start`` of the control.
    """
    std = family(groups[0]["noise"]).std
    for group in groups:
        group |= {"auto": control, "b": b * (std / family(group["noise"]).std)}


def suggested_std(shapes: Iterable[Sequence[int]]) -> float:
    """Standard deviation of the noise after the second rise, for weights of these shapes.

    Each tensor of two dimensions or more is a layer, whose first dimension is that of its outputs.
    Narrow layers have larger weights, but fewer inputs to average noise away; so there is a limit.
    Tensors of shape (1, n, m) are no layers but class tokens and tables of positions, of which each
    output reads one weight. Tables of words look like layers, and count as such.

    >>> round(suggested_std([(1024, 784), (1024,), (1024, 1024), (10, 1024)]), 4)
    0.0799
    """
    layers = [s for s in shapes if len(s) > 1 and not (len(s) == 3 and s[0] == 1)]
    inputs = [math.prod(shape[1:]) for shape in layers] or [1]
    return min(LARGEST, NOISE / sum(math.sqrt(max(n, 1) / 2) for n in inputs))


def checked(value: Any) -> AutoB:
    """The state of a control from a state dict."""
    types = tuple(map(type, value)) if isinstance(value, (tuple, list)) else ()
    if types != tuple(map(type, AutoB())):
        raise ValueError(f"the state dict's 'auto' is not the state of b='auto': {value!r}")
    return AutoB(*value)
