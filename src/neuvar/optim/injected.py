"""Baselines that add noise to the weights and never remove it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from neuvar import noise as noise_
from neuvar.noise import Draw
from neuvar.optim.forward import not_compiled
from neuvar.optim.layout import local
from neuvar.optim.perturbation import Perturbation, Term
from neuvar.optim.wrapper import Wrapper


class PSGD(Wrapper):
    r"""Perturbed SGD, the paper's Algorithm 2.

    .. math:: \theta_t = \theta_{t-1} - \eta\,(g_t + \epsilon_t), \qquad \epsilon_t \sim N(0, b^2)

    The noise is never removed, and its scale is :math:`\eta b`. Arguments are those of
    ``torch.optim.SGD`` and ``b``, ``std``, ``noise``, ``seed`` and ``sampler`` as for
    :class:`~neuvar.NVRM`. Momentum does not gather noise. ``denoised``, ``eval`` and ``train``
    change nothing, so that one training loop serves all.

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

        A step that can move nothing, for want of gradients or with a learning rate of 0, adds none.
        """
        loss = self._closure_loss(closure)
        draws = self._next_draws() if self._is_real_step() else None
        self.inner.step()
        if draws is not None:
            self._add_noise(draws)
        return loss

    @not_compiled()
    def _add_noise(self, draws: list[Draw]) -> None:
        self._record(draws)
        terms: dict[torch.Tensor, Term] = {}
        for group, draw in zip(self.param_groups, draws, strict=True):
            if scale := self._scale(group):
                trained = [p for p in group["params"] if p.grad is not None]
                terms |= {p: Term(self._slots()[p], draw, scale) for p in trained}
        with torch.no_grad():
            Perturbation(terms).add(to=local, factor=-1)

    def _scale(self, group: dict[str, Any]) -> float:
        return float(group["lr"]) * noise_.scale("b", group["b"])


class SGLD(PSGD):
    r"""Stochastic gradient Langevin dynamics (Welling and Teh, 2011).

    .. math:: \theta_t = \theta_{t-1} - \eta\,g_t + \sqrt{2 \eta T}\,\xi_t,
              \qquad \xi_t \sim N(0, 1)

    It differs from :class:`PSGD` only in the size of the noise. For a loss that is a mean over m
    examples, ``temperature=1/m`` samples from the posterior; a group's ``b`` is :math:`\sqrt{2T}`.

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
