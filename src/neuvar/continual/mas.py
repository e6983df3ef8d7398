"""Memory aware synapses."""

from __future__ import annotations

from typing import Any

from torch import nn

from neuvar._batches import Data
from neuvar.continual.importance import output_sensitivity
from neuvar.continual.penalty import Penalty


class MAS(Penalty):
    r"""Memory aware synapses: what matters is how much the outputs depend on a weight.

    Importances, see :func:`output_sensitivity`, add up over tasks and hold to the weights of the
    latest one. The paper's λ has no factor ½: it is half our strength. Labels are not used.

    References:
        Aljundi et al.: Memory Aware Synapses: Learning what (not) to forget, 2018.

    Args:
        strength: the factor λ, not negative; with 0 training is as without, to the bit.
        at: "perturbed" or "clean" weights, see :class:`Penalty`.

    >>> import torch
    >>> model, penalty = nn.Linear(4, 3), MAS(strength=2.0)
    >>> float(penalty(model))
    0.0
    >>> penalty.after_task(model, torch.eye(4))
    >>> _ = model.bias.data.add_(1.0)
    >>> bool(penalty(model) > 0)
    True
    """

    def __init__(self, strength: float, *, at: str = "perturbed") -> None:
        super().__init__(strength, at=at)

    def after_task(self, model: nn.Module, data: Data, **arguments: Any) -> None:
        self._parameters(model)
        self._hold(model, output_sensitivity(model, data, **arguments), gamma=1.0)
