"""Penalties against forgetting: EWC, SI and MAS."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuvar import _validate
from neuvar._batches import Data
from neuvar.continual.importance import FISHERS, Weights, diagonal_fisher, output_sensitivity
from neuvar.noise import scale
from neuvar.optim.layout import bare
from neuvar.optim.noisy_parameters import as_trained, clean_copy


class QuadraticTerm(torch.autograd.Function):
    r"""One parameter's :math:`\frac12 \sum_i \Omega_i (\theta_i - \theta^*_i)^2`.

    Evaluated at the weights ``at``. It is three times as fast as automatic differentiation.
    """

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

    A training loop adds ``penalty(model)`` to its loss and calls ``after_task(model, data)`` after
    each task. SI also needs ``after_step(model)`` after each step of the optimizer and, before
    gradients are clipped, ``before_clip(model)``. Any optimizer works.

    Under NVRM, importances :math:`\Omega` and anchors :math:`\theta^*` are computed at the clean
    weights. With ``at="perturbed"`` the penalty is evaluated at the perturbed weights, like the
    rest of the loss; with ``at="clean"`` at the clean ones. The gradient is linear in the weights,
    so its mean is the same in both cases. With "clean" it lacks the noise
    :math:`\lambda\Omega\epsilon`, and each call copies the weights.

    Attributes:
        strength: the factor λ >= 0. With 0, training is bit-identical to that without penalty.
        at: "perturbed" or "clean" weights.
        tasks: number of tasks that are protected.
        last: the latest value, detached, for logging.
    """

    _tensors: tuple[str, ...] = ("importance", "anchor")
    """Names, without underscore, of the attributes that map parameter names to tensors."""

    def __init__(self, strength: float, *, at: str = "perturbed") -> None:
        self.at: str = _validate.one_of("at", at, ("clean", "perturbed"))
        self.strength = scale("strength", strength)
        self.tasks = 0
        self.last = torch.zeros(())
        self._constant = 0.0
        self._importance: Weights = {}
        self._anchor: Weights = {}

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty at the model's current weights; exactly 0 before the first ``after_task``."""
        params = self._parameters(model)
        if not self.strength or not self.tasks:
            self.last = torch.zeros((), device=next(iter(params.values())).device)
            return self.last
        read = as_trained if self.at == "perturbed" else clean_copy
        terms: list[Tensor] = [
            QuadraticTerm.apply(  # type: ignore[no-untyped-call]
                params[name], read(params[name]).detach(), anchor, self._importance[name]
            )
            for name, anchor in self._anchor.items()
        ]
        value = self.strength * (torch.stack(terms).sum() + self._constant)
        self.last = value.detach()
        return value

    def share(self, total: Tensor | float) -> float:
        r"""The latest penalty divided by the total loss; 0 if the total is 0.

        Under NVRM a penalty at perturbed weights includes :math:`\frac\lambda2 \sum_i \Omega_i
        \epsilon_i^2`. This term has no gradient, but may be most of the penalty.

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

        >>> EWC(300.0).stiffness
        0.0
        """
        largest = [float(x.max()) for x in self._importance.values() if x.numel()]
        return self.strength * max(largest, default=0.0)

    def before_clip(self, model: nn.Module) -> None:  # noqa: B027 - only SI needs it
        """Record the gradients before they are clipped. No-op for EWC and MAS."""

    def after_step(self, model: nn.Module) -> None:  # noqa: B027 - only SI needs it
        """Record what a step of the optimizer did. No-op for EWC and MAS."""

    @abstractmethod
    def after_task(self, model: nn.Module, data: Data, **arguments: Any) -> None:
        """Compute importances, and make the current clean weights the anchor.

        Args:
            model: the network after training on the task.
            data: the task's inputs with labels, or inputs only where labels are not needed: a
                pair of tensors or an iterable of such pairs.
            **arguments: for the model's forward pass, such as the head to use.
        """

    def state_dict(self) -> dict[str, Any]:
        """Copies of all tensors, and plain numbers; for SI, also those of an unfinished task."""
        tensors = {key: _copies(getattr(self, f"_{key}")) for key in self._tensors}
        numbers = {"tasks": self.tasks, "constant": self._constant}
        return {"method": type(self).__name__} | numbers | tensors

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
        self.tasks, self._constant = int(state["tasks"]), float(state["constant"])
        for key in self._tensors:
            setattr(self, f"_{key}", _copies(state[key]))

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters; refuses another model, and moves the state to their devices."""
        params = dict(bare(model).named_parameters())
        for key in self._tensors:
            weights = getattr(self, f"_{key}")
            for name, stored in weights.items():
                p = params.get(name)
                if p is None or p.shape != stored.shape:
                    shape = "none" if p is None else tuple(p.shape)
                    raise ValueError(
                        f"the penalty belongs to another model: it has parameter {name!r} of shape "
                        f"{tuple(stored.shape)}, this model has {shape}"
                    )
                if p.device != stored.device:
                    weights[name] = stored.to(p.device)
        if not params:
            raise ValueError("model has no parameters")
        return params

    def protect(self, model: nn.Module, importance: Weights, *, gamma: float | None = None) -> None:
        r"""Add a term with these importances around the current clean weights.

        With ``gamma``, earlier importances are multiplied by it and move to the current weights.
        With None they stay at their own anchors: the sum of two quadratics is one quadratic,

        .. math:: A(\theta-a)^2 + B(\theta-b)^2 = (A+B)\left(\theta - \frac{Aa+Bb}{A+B}\right)^2
                  + \frac{AB}{A+B}(a-b)^2
        """
        for name, omega in importance.items():
            if not math.isfinite(float(omega.sum())):
                raise ValueError(
                    f"the importance of parameter {name!r} is not finite; check model and data"
                )
        params = self._parameters(model)
        total, anchor, constant = dict(self._importance), dict(self._anchor), self._constant
        if gamma is not None:
            total = {name: gamma * omega for name, omega in total.items()}
            anchor = {name: clean_copy(params[name]) for name in total}
        for name, b in importance.items():
            now = clean_copy(params[name])
            a = total.get(name, torch.zeros_like(b))
            difference = now - anchor.get(name, now)
            # Where both importances are 0, the anchor does not matter.
            share = torch.where(a + b > 0, b / (a + b), torch.ones_like(b))
            constant += float((a * share * difference.square()).sum(dtype=torch.float64)) / 2
            total[name] = a + b
            anchor[name] = (now - (1 - share) * difference).to(now.dtype)
        self._importance, self._anchor, self._constant = total, anchor, constant
        self.tasks += 1


def _copies(weights: Weights) -> Weights:
    return {name: w.detach().clone() for name, w in weights.items()}


class EWC(Penalty):
    r"""Elastic weight consolidation: importance is the diagonal Fisher information.

    .. math:: \frac\lambda2 \sum_k \sum_i F_{k,i} (\theta_i - \theta^*_{k,i})^2

    with one term for each task k; or online, with one :math:`F \leftarrow \gamma F + F_k` around
    the weights of the latest task. Time and memory do not grow with the number of tasks in either
    mode, because a sum of quadratics is one quadratic and a constant.

    References:
        Kirkpatrick et al. 2017, Overcoming catastrophic forgetting in neural networks; Huszár 2017,
        On quadratic penalties in EWC (separate); Schwarz et al. 2018, Progress & compress (online).

    Args:
        strength: the factor λ >= 0.
        fisher: kind of Fisher information, see :func:`diagonal_fisher`.
        mode: "separate" or "online".
        gamma: decay of online importances with each task, in [0, 1].
        seed: seed of the labels for fisher="sampled".
        at: "perturbed" or "clean" weights, see :class:`Penalty`.

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
        super().__init__(strength, at=at)
        self.fisher: str = _validate.one_of("fisher", fisher, FISHERS)
        self.mode: str = _validate.one_of("mode", mode, ("separate", "online"))
        self.gamma = _validate.number("gamma", gamma, low=0, high=1)
        self.seed = _validate.seed(seed)
        if mode == "separate" and gamma != 1:
            raise ValueError(f"gamma must be 1 unless mode is 'online', got {gamma!r}")

    def after_task(self, model: nn.Module, data: Data, **arguments: Any) -> None:
        self._parameters(model)  # refuse another model before the expensive part
        seed = (self.seed + self.tasks) % 2**32
        importance = diagonal_fisher(model, data, kind=self.fisher, seed=seed, **arguments)
        self.protect(model, importance, gamma=self.gamma if self.mode == "online" else None)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mode": self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another EWC of the same mode."""
        if state.get("mode", self.mode) != self.mode:
            raise ValueError(
                f"the state dict must be one of mode {self.mode!r}, got {state['mode']!r}"
            )
        super().load_state_dict(state)


class MAS(Penalty):
    r"""Memory aware synapses: importance is the sensitivity of the outputs to a weight.

    Importances, see :func:`output_sensitivity`, add up over tasks; the anchor is the weights of the
    latest task. The paper's λ has no factor ½: it is half our strength. Labels are not used.

    References:
        Aljundi et al. 2018, Memory aware synapses: learning what (not) to forget.

    Args:
        strength: the factor λ >= 0.
        at: "perturbed" or "clean" weights, see :class:`Penalty`.

    >>> model, penalty = nn.Linear(4, 3), MAS(strength=2.0)
    >>> penalty.after_task(model, torch.eye(4))
    >>> _ = model.bias.data.add_(1.0)
    >>> bool(penalty(model) > 0)
    True
    """

    def after_task(self, model: nn.Module, data: Data, **arguments: Any) -> None:
        self._parameters(model)
        self.protect(model, output_sensitivity(model, data, **arguments), gamma=1.0)


class SI(Penalty):
    r"""Synaptic intelligence: importance is how much the steps of a weight lowered the loss.

    .. math:: \Omega_i = \sum_k \frac{\max(\omega_{k,i}, 0)}{\Delta_{k,i}^2 + \xi}, \qquad
              \omega_{k,i} = -\sum_t g_{t,i} (\theta_{t+1,i} - \theta_{t,i})

    where :math:`\Delta_k` is the change of the weight in task k and :math:`g_t` the gradient of the
    task's loss without the penalty. Importances add up over tasks; the anchor is the weights of the
    latest task. The paper's c has no factor ½: it is half our strength. Under NVRM
    :math:`\theta_t` are the clean weights.

    Call ``after_step(model)`` right after each step, before ``zero_grad()``. If gradients are
    clipped or changed otherwise, call ``before_clip(model)`` first: the task's own gradient cannot
    be recovered from the clipped one.

    References:
        Zenke et al. 2017, Continual learning through synaptic intelligence.

    Args:
        strength: the factor λ >= 0.
        damping: the number ξ > 0, which limits the importance of weights that hardly moved.
        at: "perturbed" or "clean" weights, see :class:`Penalty`.

    >>> model, penalty = nn.Linear(4, 3), SI(strength=1.0)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step in range(3):
    ...     optimizer.zero_grad()
    ...     loss = model(torch.eye(4)).square().mean() + penalty(model)
    ...     loss.backward()
    ...     optimizer.step()
    ...     penalty.after_step(model)
    >>> penalty.after_task(model)
    >>> penalty.tasks
    1
    """

    _tensors = ("importance", "anchor", "start", "path")

    def __init__(self, strength: float, *, damping: float = 0.1, at: str = "perturbed") -> None:
        super().__init__(strength, at=at)
        self.damping = _validate.number("damping", damping, above=0)
        self._start: Weights = {}
        self._path: Weights = {}
        self._reset_step()

    def _reset_step(self) -> None:
        self._before: Weights = {}
        self._penalty_gradient: Weights = {}
        self._unclipped: Weights = {}

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty, see :class:`Penalty`; also records the weights before the next step."""
        value = super().__call__(model)
        if not torch.is_grad_enabled():  # no training step follows
            return value
        trained = {n: p for n, p in self._parameters(model).items() if p.requires_grad}
        self._reset_step()
        self._before = {name: clean_copy(p) for name, p in trained.items()}
        if self.strength and self.tasks:
            perturbed = self.at == "perturbed"
            at = {n: as_trained(p) for n, p in trained.items()} if perturbed else self._before
            self._penalty_gradient = {
                n: (at[n].detach() - anchor).mul_(self._importance[n]).mul_(self.strength)
                for n, anchor in self._anchor.items()
                if n in at
            }
        for name, clean in self._before.items():
            if name not in self._start:
                self._start[name] = clean.clone()
                wide = torch.promote_types(clean.dtype, torch.float32)
                self._path[name] = torch.zeros_like(clean, dtype=wide)
        return value

    @torch.no_grad()
    def before_clip(self, model: nn.Module) -> None:
        """Record the gradients; with a gradient scaler, call its ``unscale_`` first."""
        params = self._parameters(model)
        if not self._before:
            raise ValueError("before_clip must follow a loss that had penalty(model) in it")
        grads = {name: params[name].grad for name in self._before}
        self._unclipped = {name: g.detach().clone() for name, g in grads.items() if g is not None}
        if not self._unclipped:
            raise ValueError("before_clip must come after backward: there are no gradients")

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Add the optimizer's step to the path; needs the step's gradients."""
        params = self._parameters(model)
        if not self._before:
            raise ValueError("after_step must follow a step whose loss had penalty(model) in it")
        if all(params[name].grad is None for name in self._before):
            raise ValueError("after_step must come before zero_grad: there are no gradients")
        for name, before in self._before.items():
            if (gradient := self._unclipped.get(name, params[name].grad)) is None:
                continue
            moved = clean_copy(params[name]).sub_(before)
            if not moved.any():
                continue  # a gradient scaler skipped the step: gradients may be infinite
            if name in self._penalty_gradient:
                gradient = self._penalty_gradient[name].neg_().add_(gradient)
            path = self._path[name]
            path.addcmul_(gradient.to(path.dtype), moved.to(path.dtype), value=-1)
        self._reset_step()

    def after_task(self, model: nn.Module, data: Data | None = None, **arguments: Any) -> None:
        """Compute importances from the recorded steps; data is not used."""
        params = self._parameters(model)
        if not self._path:
            raise ValueError("after_task needs at least one step with penalty and after_step")
        if not any(bool(path.any()) for path in self._path.values()):
            raise ValueError("after_step got only zero gradients: call it before zero_grad")
        importance = {}
        for name, path in self._path.items():
            moved = clean_copy(params[name]) - self._start[name]
            importance[name] = path.clamp(min=0) / (moved.square() + self.damping)
        self.protect(model, importance, gamma=1.0)
        self._start, self._path = {}, {}
        self._reset_step()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._reset_step()


PENALTIES: dict[str, Callable[..., Penalty]] = {
    "ewc": EWC,
    "si": lambda strength, **_: SI(strength),
    "mas": lambda strength, **_: MAS(strength),
}
"""Functions by name, called as ``function(strength, fisher=..., seed=...)``; you may add your own.

They are the values of ``penalty`` of :class:`neuvar.experiments.Tasks`.
"""
