"""A scale of noise that sets itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

AUTO = "auto"
SHARE = 0.2
"""What b may cost: a rise of the loss, for each e-fold of b, of this share of what was learned."""
EVERY = 5
"""Steps from one look to the next."""
MEMORY = 0.8
"""Weight of the looks before in the running means."""
RATE = 0.15
"""Largest change of log b after a look: a factor of ten takes at least 75 steps."""


class AutoB(NamedTuple):
    r"""What the control of b carries from step to step, as plain numbers in a parameter group.

    The noise :math:`\epsilon = b\xi` and the gradient g at :math:`\theta + \epsilon` are at hand in
    every step, and their inner product says what noise costs: on average it is how fast the loss
    that is minimised rises with the logarithm of b,

    .. math:: E[\epsilon \cdot g] = \frac{\partial}{\partial \log b} E[L(\theta + b \xi)].

    What has been learned is by how much that loss has fallen since the beginning. b is as large as
    it can be while its price stays a fixed share s of this:

    .. math:: E[\epsilon \cdot g] = s\,\big(L_0 - E[L(\theta + \epsilon)]\big)

    Below, b grows, because more noise costs little; above, it shrinks, because steps undo noise
    rather than learn. As long as nothing is learned b shrinks, so whatever it starts from, training
    begins as it would without noise; the learning itself then brings b up. The rule has no unit: it
    is the same for a loss of another scale.

    Attributes:
        drawn: number of the draw that the next gradient is expected under.
        steps: how many there were.
        looks: how many looks there were.
        cost: running mean of the inner product.
        loss: running mean of the loss at perturbed weights.
        first: the loss at the beginning.
    """

    drawn: int = 1
    steps: int = 0
    looks: int = 0
    cost: float = 0.0
    loss: float = 0.0
    first: float = 0.0

    def seen(self, cost: float, loss: float) -> AutoB:
        """After one more look."""
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

        >>> round(AutoB(first=2.5, loss=0.5, cost=0.4).change, 6)
        0.0
        >>> AutoB(first=2.3, loss=2.4, cost=0.0).change == -RATE
        True
        """
        price = SHARE * (self.first - self.loss)
        if price <= 0:
            return -RATE
        return RATE * min(1.0, (price - self.cost) / max(price, self.cost))


def start(groups: Sequence[dict[str, Any]]) -> float:
    """The scale to begin with: the root mean square of the weights."""
    params = [p.detach() for group in groups for p in group["params"]]
    tensors = [p for p in params if p.ndim > 1] or params
    count = sum(p.numel() for p in tensors)
    size = math.sqrt(sum(float(p.double().square().sum()) for p in tensors) / max(count, 1))
    return size if 0 < size < math.inf else 1e-3


def checked(value: Any) -> AutoB:
    """The state of a control from a state dict."""
    types = tuple(map(type, value)) if isinstance(value, (tuple, list)) else ()
    if types != (int, int, int, float, float, float):
        raise ValueError(f"the state dict's 'auto' is no state of a control of b: {value!r}")
    return AutoB(*value)
