"""A scale of noise that sets itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from neuvar.noise import b_from_std

AUTO = "auto"
NOISE = 5.2
"""What the noise of all layers adds up to after the second rise; see :class:`AutoB`."""
LARGEST = 0.08
"""Where b rises to at the most."""
FIRST = 0.6
"""The part of it that b rises to at first."""
SHARE = 0.25
"""What noise may cost at the most."""
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
    grows, because more noise costs little. As long as nothing is learned it shrinks. All this
    begins after 150 steps and is slow, but the faster the further the cost is off; where b would
    shrink, there is no second rise. Only where the loss rises to four times its first value does b
    give way at once.

    A share of what has been learned alone would be too little where labels are so noisy that little
    can be learned: b would shrink, and the network would learn them by heart. The rule has no unit:
    it is the same for a loss of another scale.

    Attributes:
        drawn: number of the draw that the next gradient is expected under.
        steps: how many there were.
        looks: how many looks there were.
        cost: running mean of the inner product.
        loss: running mean of the loss at perturbed weights.
        first: the loss at the beginning; infinite before it is known.
        start: the scale after the second rise, as the shapes of the weights suggest it.
        told: how often a loss was told for the step that comes.
        new_cost: inner product for the step that comes.
        new_loss: sum of the losses told for it.
    """

    drawn: int = 0
    steps: int = 0
    looks: int = 0
    cost: float = 0.0
    loss: float = 0.0
    first: float = math.inf
    start: float = 1.0
    told: int = 0
    new_cost: float = 0.0
    new_loss: float = 0.0

    @property
    def due(self) -> bool:
        """Whether the step that comes is looked at."""
        return math.isinf(self.first) or (self.steps + 1) % EVERY == 0

    def hears(self, loss: float, cost: float) -> AutoB:
        """After a loss was told for the step that comes, if it is looked at."""
        return self._replace(new_loss=self.new_loss + loss, new_cost=cost)

    def forgets(self) -> AutoB:
        """Nothing was told for the step that comes."""
        return self._replace(told=0, new_cost=0.0, new_loss=0.0)

    def sees(self, cost: float, loss: float) -> AutoB:
        """After one more look."""
        if not (math.isfinite(cost) and math.isfinite(loss)):
            return self
        if math.isinf(self.first):
            return self._replace(first=loss)
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
        price = SHARE * math.sqrt(max((self.first - self.loss) * abs(self.first), 0.0))
        if self.loss > TOO_HIGH * abs(self.first):
            return math.log(RETREAT)
        if self.looks < WAIT:
            return math.log(1 + 1 / self.looks) if 0 < self.looks < RISE else 0.0
        if price <= 0:
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


def beginning(groups: Sequence[dict[str, Any]], noise: str) -> dict[str, Any]:
    """Options of a group whose b sets itself, for a family of noise.

    Groups that are added later join the control of those that are there.
    """
    for group in groups:
        if "auto" in group:
            return {"b": group["b"], "auto": group["auto"]}
    std = suggested_std([p.shape for group in groups for p in group["params"]])
    start = b_from_std(noise, std)
    return {"b": FIRST * start / RISE, "auto": tuple(AutoB(start=start))}


def suggested_std(shapes: Iterable[Sequence[int]]) -> float:
    """Standard deviation of the noise after the second rise, for weights of these shapes.

    Each tensor of two dimensions or more is a layer, whose first dimension is that of its outputs.
    Narrow layers have larger weights, but fewer inputs to average noise away; so there is a limit.

    >>> round(suggested_std([(1024, 784), (1024,), (1024, 1024), (10, 1024)]), 4)
    0.0799
    """
    inputs = [math.prod(shape[1:]) for shape in shapes if len(shape) > 1] or [1]
    return min(LARGEST, NOISE / sum(math.sqrt(max(n, 1) / 2) for n in inputs))


def checked(value: Any) -> AutoB:
    """The state of a control from a state dict."""
    types = tuple(map(type, value)) if isinstance(value, (tuple, list)) else ()
    if types != tuple(map(type, AutoB())):
        raise ValueError(f"the state dict's 'auto' is no state of a control of b: {value!r}")
    return AutoB(*value)
