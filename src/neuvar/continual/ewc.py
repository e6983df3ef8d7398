"""Elastic weight consolidation."""

from __future__ import annotations

from typing import Any

from torch import nn

from neuvar._batches import Data
from neuvar.continual.importance import check_fisher, check_seed, diagonal_fisher
from neuvar.continual.penalty import Penalty
from neuvar.noise import scale

MODES = ("separate", "online")


class EWC(Penalty):
    r"""Elastic weight consolidation: the importance of a weight is its Fisher information.

    .. math:: \frac\lambda2 \sum_k \sum_i F_{k,i} (\theta_i - \theta^*_{k,i})^2

    with one term for each task k; or online, with one :math:`F \leftarrow \gamma F + F_k` around
    the weights of the latest task. Time and memory do not grow with the number of tasks either
    way: a sum of quadratics is one quadratic and a constant.

    References:
        Kirkpatrick et al.: Overcoming catastrophic forgetting in neural networks, 2017. Huszár: On
        Quadratic Penalties in Elastic Weight Consolidation, 2017. Schwarz et al.: Progress &
        Compress, 2018.

    Args:
        strength: the factor λ, not negative; with 0 training is as without, to the bit.
        fisher: which Fisher information, see :func:`diagonal_fisher`.
        mode: "separate" or "online".
        gamma: by how much online importances fade with each task, in [0, 1].
        seed: seed of the labels that fisher="sampled" draws.
        at: "perturbed" or "clean" weights, see :class:`Penalty`.

    >>> import torch
    >>> from torch.nn.functional import cross_entropy
    >>> model, penalty = nn.Linear(4, 3), EWC(strength=300.0)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> x, y = torch.eye(4), torch.tensor([0, 1, 2, 0])
    >>> for task in range(2):
    ...     for step in range(10):
    ...         optimizer.zero_grad()
    ...         loss = cross_entropy(model(x), (y + task) % 3) + penalty(model)
    ...         loss.backward()
    ...         optimizer.step()
    ...     penalty.after_task(model, x)
    >>> penalty.tasks, 0 < penalty.share(loss) < 1
    (2, True)
    """

    def __init__(
        self,
        strength: float,
        *,
        fisher: str = "exact",
        mode: str = "separate",
        gamma: float = 1.0,
        seed: int = 0,
        at: str = "perturbed",
    ) -> None:
        check_fisher("fisher", fisher)
        check_seed(seed)
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if not 0 <= scale("gamma", gamma) <= 1 or (mode == "separate" and gamma != 1):
            raise ValueError(
                f"gamma must be in [0, 1], and 1 unless mode is 'online', got {gamma!r}"
            )
        super().__init__(strength, at=at)
        self.fisher, self.mode, self.gamma, self.seed = fisher, mode, float(gamma), seed

    def after_task(self, model: nn.Module, data: Data, **arguments: Any) -> None:
        self._parameters(model)  # refuse another model before the long part
        found = diagonal_fisher(
            model, data, kind=self.fisher, seed=self.seed + self.tasks, **arguments
        )
        self._hold(model, found, gamma=self.gamma if self.mode == "online" else None)

    def state_dict(self) -> dict[str, Any]:
        """All that has been gathered, and in which mode, as copies: plain numbers and tensors."""
        return super().state_dict() | {"mode": self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what another penalty of the same mode has gathered."""
        if state.get("mode", self.mode) != self.mode:
            raise ValueError(
                f"the state dict must be one of mode {self.mode!r}, got {state['mode']!r}"
            )
        super().load_state_dict(state)
