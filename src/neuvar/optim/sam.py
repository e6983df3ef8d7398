"""Sharpness-aware minimization: a baseline with two gradients a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neuvar import noise as noise_
from neuvar.optim.wrapper import Wrapper


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
        _check_inner(inner)
        rho = noise_.scale("rho", rho)
        radii = [noise_.scale("rho", group.get("rho", rho)) for group in inner.param_groups]
        self.inner = inner
        self._before: dict[Tensor, Tensor] = {}
        for group, radius in zip(inner.param_groups, radii, strict=True):
            group["rho"] = radius
        super().__init__(inner.param_groups, inner.defaults | {"rho": rho})
        self._share()

    def _share(self) -> None:
        # Groups and state are the inner optimizer's own, so that schedulers and scalers reach them.
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for group in self.param_groups:  # one that a plain optimizer saved has none
            group.setdefault("rho", self.defaults["rho"])

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_if_climbed()
        return {"inner": self.inner, "defaults": self.defaults, "_before": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which the inner optimizer trains as well."""
        if "rho" in param_group:
            noise_.scale("rho", param_group["rho"])
        super().add_param_group(param_group)

    @torch.no_grad()
    def climb(self) -> None:
        """Go to the weights at which the second gradient is to be taken."""
        self.descend()
        found = [
            (p, g["rho"]) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        if not found:
            return
        norms = torch._foreach_norm([p.grad for p, _ in found])
        # Half precision would be too coarse for a norm.
        wide = reduce(torch.promote_types, (n.dtype for n in norms), torch.float32)
        norm = torch.stack([n.to(norms[0].device, wide) for n in norms]).norm()
        if not bool(norm.isfinite()) or not bool(norm):
            return
        self._before = {p: p.detach().clone() for p, _ in found}
        for p, rho in found:
            p.add_(p.grad * (rho / norm).to(p.device, p.dtype))

    @torch.no_grad()
    def descend(self) -> None:
        """Return to where the climb began; nothing happens without one."""
        for p, before in self._before.items():
            p.copy_(before)
        self._before = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return to where the climb began and take a step of the inner optimizer from there."""
        if closure is not None:
            raise ValueError("SAM takes no closure; call climb() between the two gradients")
        self.descend()
        return self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state; between :meth:`climb` and :meth:`step` there is none."""
        self._refuse_if_climbed()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave."""
        self.descend()
        self.inner.load_state_dict(state_dict)
        self._share()

    def _refuse_if_climbed(self) -> None:
        if self._before:
            raise RuntimeError("SAM has climbed; save its state after step() or descend()")


def _check_inner(inner: object) -> None:
    if not isinstance(inner, Optimizer):
        raise ValueError(f"inner must be a torch.optim.Optimizer, got {type(inner).__name__}")
    if isinstance(inner, (SAM, Wrapper)):
        raise ValueError(
            f"inner must be an optimizer that leaves weights alone, got {type(inner).__name__}"
        )
    if isinstance(inner, torch.optim.LBFGS):
        raise ValueError("inner must evaluate the loss once a step; LBFGS needs several")
