"""Sharpness-aware minimization: a baseline with two gradients a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neuvar import noise as noise_


class SAM(Optimizer):
    r"""Sharpness-aware minimization around another optimizer.

    .. math:: \theta \leftarrow \theta - \eta\,\nabla L(\theta + \rho\,g / \|g\|),
              \qquad g = \nabla L(\theta)

    A training loop takes two gradients a step: after the first it calls :meth:`climb`, after the
    second, of the same examples, :meth:`step`. A step without a climb is one of the inner
    optimizer, and so is one whose first gradient is zero or not finite.

    References:
        Foret et al.: Sharpness-Aware Minimization for Efficiently Improving Generalization, 2021.

    Args:
        inner: the optimizer that takes the step.
        rho: radius ρ of the climb, not negative.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    >>> def passes():
    ...     optimizer.zero_grad()
    ...     model(torch.ones(3, 4)).square().mean().backward()
    >>> passes()
    >>> optimizer.climb()
    >>> passes()
    >>> optimizer.step()
    """

    def __init__(self, inner: Optimizer, *, rho: float = 0.05) -> None:
        self.inner = inner
        self._before: dict[Tensor, Tensor] = {}
        for group in inner.param_groups:
            group.setdefault("rho", noise_.scale("rho", rho))
        super().__init__(inner.param_groups, inner.defaults | {"rho": rho})
        self._share()

    def _share(self) -> None:
        # Groups and state are the inner optimizer's own, so that schedulers and scalers reach them.
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @torch.no_grad()
    def climb(self) -> None:
        """Go to the weights at which the second gradient is to be taken."""
        self._descend()
        found = [
            (p, g["rho"]) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        if not found:
            return
        norms = torch._foreach_norm([p.grad for p, _ in found])
        norm = torch.stack([n.float() for n in norms]).norm()
        if not bool(norm.isfinite()) or not bool(norm):
            return
        self._before = {p: p.detach().clone() for p, _ in found}
        for p, rho in found:
            p.add_(p.grad * (rho / norm).to(p.dtype))

    @torch.no_grad()
    def _descend(self) -> None:
        for p, before in self._before.items():
            p.copy_(before)
        self._before = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return to where the climb began and take a step of the inner optimizer from there."""
        if closure is not None:
            raise ValueError("SAM takes no closure; call climb() between the two gradients")
        self._descend()
        return self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state; between :meth:`climb` and :meth:`step` there is none."""
        if self._before:
            raise RuntimeError("SAM has climbed; save its state after step()")
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave."""
        self._descend()
        self.inner.load_state_dict(state_dict)
        self._share()
