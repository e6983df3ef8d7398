"""Optimizers to compare NVRM with: PSGD, SGLD, SAM, SmoothOut, Anti-PGD, RWP and ARWP."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neuvar import noise as noise_
from neuvar.noise import Draw
from neuvar.optim import NVRMSGD
from neuvar.optim.forward import Noise, not_compiled
from neuvar.optim.noisy_parameters import write_noise
from neuvar.optim.rwp import ARWP, RWP
from neuvar.optim.wrapper import Wrapper, is_real_step

__all__ = ["ARWP", "PSGD", "RWP", "SAM", "SGLD", "AntiPGD", "SmoothOut"]


class PSGD(Wrapper):
    r"""Perturbed SGD, the paper's Algorithm 2.

    .. math:: \theta_t = \theta_{t-1} - \eta\,(g_t + \epsilon_t), \qquad \epsilon_t \sim N(0, b^2)

    The noise is never removed, and its scale is :math:`\eta b`. Arguments are those of
    ``torch.optim.SGD`` and ``b``, ``std``, ``noise``, ``seed`` and ``sampler`` as for
    :class:`~neuvar.NVRM`. Momentum does not accumulate noise. ``denoised``, ``eval`` and ``train``
    are no-ops.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = PSGD(model.parameters(), lr=0.1, b=0.05)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        b: float | None = None,
        std: float | None = None,
        noise: str = "gaussian",
        seed: int = 0,
        sampler: str = "table",
        **inner: Any,
    ) -> None:
        super().__init__(
            torch.optim.SGD(params, lr, **inner),
            b=b,
            std=std,
            noise=noise,
            seed=seed,
            sampler=sampler,
        )

    @not_compiled(recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of SGD, then add fresh noise to the weights that have a gradient.

        Without gradients, or with lr=0, no noise is added.
        """
        loss = None if closure is None else self._closure_loss(closure)
        noise = self._next_noise() if is_real_step(self.param_groups) else None
        self.inner.step()
        if noise is not None:
            self._add_noise(*noise)
        return loss

    @not_compiled()
    def _add_noise(self, draws: list[Draw], eps: Noise) -> None:
        self._record(draws)
        for group in self.param_groups:
            scale = self._scale(group)
            for p in group["params"]:
                if p in eps and p.grad is not None and scale:
                    eps[p] = eps[p]._replace(b=scale)
                else:
                    eps.pop(p, None)
        with torch.no_grad():
            write_noise(eps, factor=-1)

    def _scale(self, group: dict[str, Any]) -> float:
        return float(group["lr"]) * noise_.scale("b", group["b"])


class SGLD(PSGD):
    r"""Stochastic gradient Langevin dynamics (Welling and Teh, 2011).

    .. math:: \theta_t = \theta_{t-1} - \eta\,g_t + \sqrt{2 \eta T}\,\xi_t,
              \qquad \xi_t \sim N(0, 1)

    It differs from :class:`PSGD` only in the size of the noise: a group's ``b`` is
    :math:`\sqrt{2T}`. For a loss that is a mean over m examples, ``temperature=1/m`` samples from
    the posterior.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = SGLD(model.parameters(), lr=0.1, temperature=1 / 50_000)
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, *, temperature: float, **arguments: Any
    ) -> None:
        b = math.sqrt(2 * noise_.scale("temperature", temperature))
        super().__init__(params, lr, b=b, noise="gaussian", **arguments)

    def _scale(self, group: dict[str, Any]) -> float:
        return math.sqrt(float(group["lr"])) * noise_.scale("b", group["b"])


class SmoothOut(NVRMSGD):
    """SmoothOut (Wen et al., 2018): NVRM-SGD with uniform noise."""

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, **options: Any) -> None:
        super().__init__(params, lr, noise="uniform", **options)


class AntiPGD(NVRMSGD):
    """Anti-PGD (Orvieto et al., 2022): anticorrelated noise. The update is that of NVRM-SGD."""


class SAM(Optimizer):
    r"""Sharpness-aware minimization around another optimizer.

    .. math:: \theta \leftarrow \theta - \eta\,\nabla L(\theta + \rho\,g / \|g\|),
              \qquad g = \nabla L(\theta)

    Each step takes two gradients of the same examples: call :meth:`climb` after the first and
    :meth:`step` after the second. Without a climb, or if the first gradient is zero or not finite,
    the step is that of the inner optimizer.

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
        if not isinstance(inner, Optimizer):
            raise ValueError(f"inner must be a torch.optim.Optimizer, got {type(inner).__name__}")
        if isinstance(inner, (SAM, Wrapper)):
            raise ValueError(f"inner must not perturb weights itself, got {type(inner).__name__}")
        if isinstance(inner, torch.optim.LBFGS):
            raise ValueError("inner must evaluate the loss once per step; LBFGS needs several")
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
        for group in self.param_groups:  # the state of a plain optimizer has no rho
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
        """Move to the weights at which the second gradient is taken."""
        self.descend()
        trained = [
            (p, g["rho"]) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        if not trained:
            return
        norms = torch._foreach_norm([p.grad for p, _ in trained])
        # Half precision would be too coarse for a norm.
        wide = reduce(torch.promote_types, (n.dtype for n in norms), torch.float32)
        norm = torch.stack([n.to(norms[0].device, wide) for n in norms]).norm()
        if not bool(norm.isfinite()) or not bool(norm):
            return
        self._before = {p: p.detach().clone() for p, _ in trained}
        for p, rho in trained:
            p.add_(p.grad * (rho / norm).to(p.device, p.dtype))

    @torch.no_grad()
    def descend(self) -> None:
        """Return to the weights before the climb; no-op without one."""
        for p, before in self._before.items():
            p.copy_(before)
        self._before = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return to the weights before the climb and take a step of the inner optimizer."""
        if closure is not None:
            raise ValueError("SAM takes no closure; call climb() between the two gradients")
        self.descend()
        return self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state; an error between :meth:`climb` and :meth:`step`."""
        self._refuse_if_climbed()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state."""
        self.descend()
        self.inner.load_state_dict(state_dict)
        self._share()

    def _refuse_if_climbed(self) -> None:
        if self._before:
            raise RuntimeError("SAM has climbed; save its state after step() or descend()")
