"""A penalty that holds a network near weights that earlier tasks found important."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from neuvar._batches import Data
from neuvar.continual.quadratic import Quadratic, Weights, joined, value
from neuvar.noise import scale
from neuvar.optim.layout import bare
from neuvar.optim.noisy_parameters import as_trained, clean_copy

WEIGHTS = ("clean", "perturbed")


class Penalty(ABC):
    r"""What EWC, SI and MAS share: :math:`\frac\lambda2 \sum_i \Omega_i (\theta_i-\theta^*_i)^2`.

    The methods differ in how they find the importances :math:`\Omega` and what they do with those
    of several tasks. A training loop adds ``penalty(model)`` to its loss, calls
    ``after_step(model)`` after each step of the optimizer, and ``after_task(model, data)`` after
    each task; if it clips gradients, also ``before_clip(model)`` before it does so. Only SI does
    something with ``after_step`` and ``before_clip``. The optimizer may be any.

    Under NVRM the importances and the weights that they hold to are those of the clean weights,
    always. Where ``at`` is "perturbed" the penalty, like the rest of the loss, is taken at the
    weights with their noise, which is what minimising the neural variable risk of the whole loss
    means; where it is "clean", without. The gradient is linear in the weights, so on average over
    the noise both pull alike; "clean" leaves out the noise :math:`\lambda\Omega\epsilon` of the
    pull and what noise adds to the value, and copies the weights at each call.

    Attributes:
        strength: the factor λ.
        at: at which weights the penalty is taken.
        tasks: how many tasks it holds to.
        last: the latest value, not differentiable, for a log.
    """

    def __init__(self, strength: float, *, at: str) -> None:
        if at not in WEIGHTS:
            raise ValueError(f"at must be one of {', '.join(WEIGHTS)}, got {at!r}")
        self.strength = scale("strength", strength)
        self.at = at
        self.tasks = 0
        self.last = torch.zeros(())
        self._held = Quadratic({}, {}, 0.0)

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty for the model's weights as they stand; exactly 0 before the first task."""
        params = self._parameters(model)
        if not self.strength or not self.tasks:
            device = next(iter(params.values())).device
            self.last = torch.zeros((), device=device)
            return self.last
        look = as_trained if self.at == "perturbed" else clean_copy
        at = {name: look(params[name]) for name in self._held}
        found = self.strength * value(self._held, params, at)
        self.last = found.detach()
        return found

    def share(self, total: Tensor | float) -> float:
        r"""Which part of a total loss the latest penalty made up; 0 if the total is 0.

        Under NVRM a penalty at perturbed weights has :math:`\frac\lambda2 \sum_i \Omega_i
        \epsilon_i^2` in it, which pulls at nothing and may be most of it; at="clean" leaves it out.

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
        r"""The largest :math:`\lambda\Omega_i`; SGD needs a learning rate below 2 / stiffness.

        Above that each step goes too far, and the weights fly apart. Adam and its like divide by
        the size of gradients and have no such limit.

        >>> from neuvar.continual import EWC
        >>> EWC(300.0).stiffness
        0.0
        """
        peaks = [float(omega.max()) for omega in self._held.importance.values() if omega.numel()]
        return self.strength * max(peaks, default=0.0)

    def before_clip(self, model: nn.Module) -> None:  # noqa: B027 - not every method needs it
        """Look at the gradients before they are clipped. EWC and MAS have no need to."""

    def after_step(self, model: nn.Module) -> None:  # noqa: B027 - not every method needs it
        """Look at what a step of the optimizer did. EWC and MAS have no need to."""

    @abstractmethod
    def after_task(self, model: nn.Module, data: Data, **arguments: Any) -> None:
        """Hold to the weights as they stand now, without their noise.

        Args:
            model: the network that has learned the task.
            data: the task's inputs with labels, or inputs alone where labels are not needed: a
                pair of tensors or an iterable of such pairs.
            **arguments: for the model's forward pass, such as the head to use.
        """

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """All that has been gathered, as copies: plain numbers and tensors."""
        return {
            "method": type(self).__name__,
            "tasks": self.tasks,
            "importance": copies(self._held.importance),
            "anchor": copies(self._held.anchor),
            "constant": self._held.constant,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what another penalty of the same method has gathered."""
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
        self._held = Quadratic(
            copies(state["importance"]), copies(state["anchor"]), float(state["constant"])
        )

    # What methods use.

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters, if they are those that the penalty knows; it follows a move."""
        params = dict(bare(model).named_parameters())
        for name, anchor in self._held.anchor.items():
            shape = params[name].shape if name in params else None
            if shape != anchor.shape:
                has = f"has it with shape {tuple(shape)}" if shape is not None else "has none such"
                raise ValueError(
                    f"model is another one than before: the penalty knows parameter {name!r} of "
                    f"shape {tuple(anchor.shape)}, the model {has}"
                )
            if anchor.device != params[name].device:
                self._held = self._held.to(name, params[name].device)
        if not params:
            raise ValueError("model has no parameters")
        return params

    def _hold(self, model: nn.Module, importance: Weights, *, gamma: float | None) -> None:
        """Hold to the present clean weights as well; gamma None keeps earlier ones where they are.

        Otherwise earlier importances, times gamma, move to the present weights.
        """
        for name, omega in importance.items():
            if not math.isfinite(float(omega.sum())):
                raise ValueError(
                    f"the importance of parameter {name!r} is not finite; model or data are not"
                )
        params = self._parameters(model)
        if gamma is None:
            now = {name: clean_copy(params[name]) for name in importance}
            self._held = joined(self._held, Quadratic(importance, now, 0.0))
        else:
            total = {name: gamma * omega for name, omega in self._held.importance.items()}
            for name, omega in importance.items():
                total[name] = total[name] + omega if name in total else omega
            now = {name: clean_copy(params[name]) for name in total}
            self._held = Quadratic(total, now, 0.0)
        self.tasks += 1


def copies(weights: Weights) -> Weights:
    """Copies that nobody else writes to."""
    return {name: w.detach().clone() for name, w in weights.items()}
