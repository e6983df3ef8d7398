"""A scale of noise that sets itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

AUTO = "auto"
SHARE = 0.13
"""What b may cost; see :class:`AutoB`."""
EVERY = 5
"""Steps from one look to the next."""
MEMORY = 0.8
"""Weight of the looks before in the running means."""
RATE = 0.15
"""Largest change of log b after a look: a factor of ten takes at least 75 steps."""
RANGE = (1e-3, 1e3)
"""Between which multiples of the scale that it began with b stays, so that it can come back."""


class AutoB(NamedTuple):
    r"""What the control of b carries from step to step, as plain numbers in a parameter group.

    The noise :math:`\epsilon = b\xi` and the gradient g at :math:`\theta + \epsilon` are at hand in
    every step, and their inner product says what noise costs: on average it is how fast the loss
    that is minimised rises with the logarithm of b,

    .. math:: E[\epsilon \cdot g] = \frac{\partial}{\partial \log b} E[L(\theta + b \xi)].

    What has been learned is by how much that loss has fallen since the beginning, :math:`L_0 - L`.
    b is as large as it can be while its cost stays below a price, which is a share s of the
    geometric mean of what has been learned and of what there was to learn:

    .. math:: E[\epsilon \cdot g] = s \sqrt{(L_0 - L)\,L_0}

    Below, b grows, because more noise costs little; above, it shrinks, because steps undo noise
    rather than learn. As long as nothing is learned b shrinks, whatever it starts from; learning
    brings it up. A share of what has been learned alone would be too little where labels are so
    noisy that little can be learned: b would shrink, and the network would learn them by heart.
    The rule has no unit: it is the same for a loss of another scale.

    Attributes:
        drawn: number of the draw that the next gradient is expected under.
        steps: how many there were.
        looks: how many looks there were.
        cost: running mean of the inner product.
        loss: running mean of the loss at perturbed weights.
        first: the loss at the beginning; infinite before it is known.
        start: the scale at the beginning.
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

        >>> AutoB(first=2.3, loss=2.4, cost=0.0).change == -RATE
        True
        >>> AutoB(first=2.3, loss=0.3, cost=0.0).change == RATE
        True
        """
        learned = self.first - self.loss
        price = SHARE * math.sqrt(max(learned * abs(self.first), 0.0))
        if price <= 0:
            return -RATE
        return RATE * min(1.0, (price - self.cost) / max(price, self.cost))

    def applied(self, b: float) -> float:
        """The scale after the change."""
        low, high = (self.start * end for end in RANGE)
        return min(max(b * math.exp(self.change), low), high)


def beginning(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Options of a group whose b sets itself: it begins with the root mean square of the weights.

    Groups that are added later join the control of those that are there.
    """
    for group in groups:
        if "auto" in group:
            return {"b": group["b"], "auto": group["auto"]}
    params = [p.detach() for group in groups for p in group["params"]]
    tensors = [p for p in params if p.ndim > 1] or params
    count = sum(p.numel() for p in tensors)
    size = math.sqrt(sum(float(p.double().square().sum()) for p in tensors) / max(count, 1))
    start = size if 0 < size < math.inf else 1e-3
    return {"b": start, "auto": tuple(AutoB(start=start))}


def checked(value: Any) -> AutoB:
    """The state of a control from a state dict."""
    types = tuple(map(type, value)) if isinstance(value, (tuple, list)) else ()
    if types != tuple(map(type, AutoB())):
        raise ValueError(f"the state dict's 'auto' is no state of a control of b: {value!r}")
    return AutoB(*value)
