"""The base class of EWC, SI and MAS: a quadratic penalty around the weights of earlier tasks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuvar._batches import Data
from neuvar._validate import one_of
from neuvar.noise import scale
from neuvar.optim.layout import bare
from neuvar.optim.noisy_parameters import as_trained, clean_copy

Weights = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Quadratic:
    r"""The function :math:`\frac12 \sum_i \Omega_i (\theta_i - \theta^*_i)^2` plus a constant."""

    importance: Weights
    anchor: Weights
    constant: float = 0.0

    def to(self, name: str, device: torch.device) -> Quadratic:
        """Move one parameter's tensors to a device."""
        return Quadratic(
            {**self.importance, name: self.importance[name].to(device)},
            {**self.anchor, name: self.anchor[name].to(device)},
            self.constant,
        )

    def __add__(self, other: Quadratic) -> Quadratic:
        r"""The sum of two quadratics, which is one quadratic.

        .. math:: A(\theta-a)^2 + B(\theta-b)^2 = (A+B)\left(\theta - \frac{Aa+Bb}{A+B}\right)^2
                  + \frac{AB}{A+B}(a-b)^2
        """
        importance, anchor = dict(self.importance), dict(self.anchor)
        constant = self.constant + other.constant
        for name, b_anchor in other.anchor.items():
            b = other.importance[name]
            if name not in importance:
                importance[name], anchor[name] = b, b_anchor
                continue
            a, difference = importance[name], b_anchor - anchor[name]
            total = a + b
            # Where both importances are 0, any anchor is right.
            part = torch.where(total > 0, b / total, torch.ones_like(total))
            constant += float((a * part * difference.square()).sum(dtype=torch.float64)) / 2
            importance[name] = total
            anchor[name] = (anchor[name] + part * difference).to(b_anchor.dtype)
        return Quadratic(importance, anchor, constant)

    def value(self, params: Mapping[str, Tensor], at: Mapping[str, Tensor]) -> Tensor:
        """The value at some weights, differentiable with respect to the parameters."""
        terms = [
            QuadraticTerm.apply(  # type: ignore[no-untyped-call]
                params[name], at[name].detach(), anchor, self.importance[name]
            )
            for name, anchor in self.anchor.items()
        ]
        return torch.stack(terms).sum() + self.constant

    def gradient(self, at: Mapping[str, Tensor], factor: float) -> Weights:
        """The gradient at some weights, times a factor."""
        return {
            name: (w.detach() - self.anchor[name]).mul_(self.importance[name]).mul_(factor)
            for name, w in at.items()
            if name in self.anchor
        }


class QuadraticTerm(torch.autograd.Function):
    """One parameter's term; three times as fast as automatic differentiation."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, at: Tensor, anchor: Tensor, importance: Tensor) -> Tensor:
        difference = at - anchor
        slope = importance * difference
        ctx.save_for_backward(p, at, anchor, importance, slope)
        return torch.dot(slope.flatten(), difference.to(slope.dtype).flatten()) / 2

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        p, at, anchor, importance, slope = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            slope = importance * (p - p.detach() + at - anchor)
        return (outer[0] * slope).to(p.dtype), None, None, None


class Penalty(ABC):
    r"""The base of EWC, SI and MAS: :math:`\frac\lambda2 \sum_i \Omega_i (\theta_i-\theta^*_i)^2`.

    A training loop adds ``penalty(model)`` to its loss, calls ``after_step(model)`` after each step
    of the optimizer, and ``after_task(model, data)`` after each task. If it clips gradients, it
    calls ``before_clip(model)`` first. EWC and MAS need only ``after_task``. Any optimizer works.

    Under NVRM, importances :math:`\Omega` and anchors :math:`\theta^*` are computed at the clean
    weights. With ``at="perturbed"`` the penalty is evaluated at the perturbed weights, like the
    rest of the loss; with ``at="clean"`` at the clean ones. The gradient is linear in the weights,
    so both have the same mean; "clean" leaves out the noise :math:`\lambda\Omega\epsilon` of the
    gradient, and copies the weights at each call.

    Attributes:
        strength: the factor λ.
        at: "perturbed" or "clean" weights.
        tasks: number of tasks that are protected.
        last: the latest value, detached, for logging.
    """

    def __init__(self, strength: float, *, at: str) -> None:
        self.at: str = one_of("at", at, ("clean", "perturbed"))
        self.strength = scale("strength", strength)
        self.tasks = 0
        self.last = torch.zeros(())
        self._quadratic = Quadratic({}, {})

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty at the model's present weights; exactly 0 before the first task ends."""
        params = self._parameters(model)
        if not self.strength or not self.tasks:
            self.last = torch.zeros((), device=next(iter(params.values())).device)
            return self.last
        read = as_trained if self.at == "perturbed" else clean_copy
        at = {name: read(params[name]) for name in self._quadratic.anchor}
        value = self.strength * self._quadratic.value(params, at)
        self.last = value.detach()
        return value

    def share(self, total: Tensor | float) -> float:
        r"""The share of the latest penalty in a total loss; 0 if the total is 0.

        Under NVRM a penalty at perturbed weights includes :math:`\frac\lambda2 \sum_i \Omega_i
        \epsilon_i^2`, which has no gradient and may be most of it; with at="clean" it does not.

        >>> from neuvar.continual import EWC
        >>> penalty = EWC(300.0)
        >>> penalty.last = torch.tensor(0.5)
        >>> penalty.share(torch.tensor(2.0))
        0.25
        """
        whole = float(total.detach() if isinstance(total, Tensor) else total)
        return float(self.last) / whole if whole else 0.0

    @property
    def stiffness(self) -> float:
        r"""The largest :math:`\lambda\Omega_i`. SGD diverges if its lr is above 2 / stiffness.

        >>> from neuvar.continual import EWC
        >>> EWC(300.0).stiffness
        0.0
        """
        largest = [float(x.max()) for x in self._quadratic.importance.values() if x.numel()]
        return self.strength * max(largest, default=0.0)

    def before_clip(self, model: nn.Module) -> None:  # noqa: B027 - only SI needs it
        """Record the gradients before they are clipped. No-op for EWC and MAS."""

    def after_step(self, model: nn.Module) -> None:  # noqa: B027 - only SI needs it
        """Record what a step of the optimizer did. No-op for EWC and MAS."""

    @abstractmethod
    def after_task(self, model: nn.Module, data: Data, **arguments: Any) -> None:
        """Protect the present clean weights.

        Args:
            model: the network after training on the task.
            data: the task's inputs with labels, or inputs only where labels are not needed: a
                pair of tensors or an iterable of such pairs.
            **arguments: for the model's forward pass, such as the head to use.
        """

    def state_dict(self) -> dict[str, Any]:
        """Copies of all tensors, and plain numbers."""
        return {
            "method": type(self).__name__,
            "tasks": self.tasks,
            "importance": copies(self._quadratic.importance),
            "anchor": copies(self._quadratic.anchor),
            "constant": self._quadratic.constant,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another penalty of the same method."""
        if state.get("method") != type(self).__name__:
            raise ValueError(
                f"the state dict must be one of {type(self).__name__}, "
                f"got one of {state.get('method')!r}"
            )
        expected = self.state_dict().keys()
        if state.keys() != expected:
            raise ValueError(
                f"the state dict must have the keys {sorted(expected)}, got {sorted(state)}"
            )
        if state["importance"].keys() != state["anchor"].keys():
            raise ValueError("the state dict has importance and anchor of different parameters")
        self.tasks = int(state["tasks"])
        self._quadratic = Quadratic(
            copies(state["importance"]), copies(state["anchor"]), float(state["constant"])
        )

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters, checked against the anchors, which move to their devices."""
        params = dict(bare(model).named_parameters())
        for name, anchor in self._quadratic.anchor.items():
            check_same_parameter(name, anchor, params)
            if anchor.device != params[name].device:
                self._quadratic = self._quadratic.to(name, params[name].device)
        if not params:
            raise ValueError("model has no parameters")
        return params

    def _protect(self, model: nn.Module, importance: Weights, *, gamma: float | None) -> None:
        """Add the present clean weights with their importance.

        With ``gamma``, earlier importances are multiplied by it and move to the present weights;
        with None they stay at their own anchors.
        """
        for name, omega in importance.items():
            if not math.isfinite(float(omega.sum())):
                raise ValueError(
                    f"the importance of parameter {name!r} is not finite; check model and data"
                )
        params = self._parameters(model)
        if gamma is None:
            now = {name: clean_copy(params[name]) for name in importance}
            self._quadratic += Quadratic(importance, now)
        else:
            total = {name: gamma * omega for name, omega in self._quadratic.importance.items()}
            for name, omega in importance.items():
                total[name] = total[name] + omega if name in total else omega
            self._quadratic = Quadratic(total, {name: clean_copy(params[name]) for name in total})
        self.tasks += 1


def check_same_parameter(name: str, known: Tensor, params: Mapping[str, Tensor]) -> None:
    """Raise if a model does not have the parameter that a penalty knows."""
    shape = tuple(params[name].shape) if name in params else None
    if shape != tuple(known.shape):
        raise ValueError(
            f"the penalty belongs to another model: it has parameter {name!r} of shape "
            f"{tuple(known.shape)}, this model {'has none' if shape is None else f'has {shape}'}"
        )


def copies(weights: Weights) -> Weights:
    """Detached copies."""
    return {name: w.detach().clone() for name, w in weights.items()}
