"""Penalties against forgetting: EWC, SI and MAS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neuvar import _validate
from neuvar._batches import Data
from neuvar.continual.importance import FISHERS, diagonal_fisher, output_sensitivity
from neuvar.continual.penalty import Penalty, Weights, check_same_parameter, copies
from neuvar.optim.noisy_parameters import as_trained, clean_copy


class EWC(Penalty):
    r"""Elastic weight consolidation: importance is the diagonal Fisher information.

    .. math:: \frac\lambda2 \sum_k \sum_i F_{k,i} (\theta_i - \theta^*_{k,i})^2

    with one term for each task k; or online, with one :math:`F \leftarrow \gamma F + F_k` around
    the weights of the latest task. Time and memory do not grow with the number of tasks in either
    mode, because a sum of quadratics is one quadratic and a constant.

    References:
        Kirkpatrick et al.: Overcoming catastrophic forgetting in neural networks, 2017. Huszár: On
        Quadratic Penalties in Elastic Weight Consolidation, 2017. Schwarz et al.: Progress &
        Compress, 2018.

    Args:
        strength: the factor λ >= 0; with 0 training is bit-identical to training without.
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
        self._protect(model, importance, gamma=self.gamma if self.mode == "online" else None)

    def state_dict(self) -> dict[str, Any]:
        """Copies of all tensors, and plain numbers, with the mode."""
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
        Aljundi et al.: Memory Aware Synapses: Learning what (not) to forget, 2018.

    Args:
        strength: the factor λ >= 0; with 0 training is bit-identical to training without.
        at: "perturbed" or "clean" weights, see :class:`Penalty`.

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
        self._protect(model, output_sensitivity(model, data, **arguments), gamma=1.0)


class SI(Penalty):
    r"""Synaptic intelligence: importance is how much the path of a weight lowered the loss.

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
        Zenke, Poole, Ganguli: Continual Learning Through Synaptic Intelligence, 2017.

    Args:
        strength: the factor λ >= 0; with 0 training is bit-identical to training without.
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
        if not torch.is_grad_enabled():  # only the value is wanted
            return value
        trained = {n: p for n, p in self._parameters(model).items() if p.requires_grad}
        self._reset_step()
        self._before = {name: clean_copy(p) for name, p in trained.items()}
        if self.strength and self.tasks:
            perturbed = self.at == "perturbed"
            at = {n: as_trained(p) for n, p in trained.items()} if perturbed else self._before
            self._penalty_gradient = self._quadratic.gradient(at, self.strength)
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
        """Protect the present clean weights; data is not used."""
        params = self._parameters(model)
        if not self._path:
            raise ValueError("after_task needs at least one step with penalty(model), after_step")
        importance = {}
        for name, path in self._path.items():
            moved = clean_copy(params[name]) - self._start[name]
            importance[name] = path.clamp(min=0) / (moved.square() + self.damping)
        if not any(bool(path.any()) for path in self._path.values()):
            raise ValueError("after_step saw no gradients in this task: call it before zero_grad")
        self._protect(model, importance, gamma=1.0)
        self._start, self._path = {}, {}
        self._reset_step()

    def state_dict(self) -> dict[str, Any]:
        """Copies of all tensors, and plain numbers; includes an unfinished task."""
        return super().state_dict() | {"start": copies(self._start), "path": copies(self._path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another SI."""
        super().load_state_dict(state)
        self._start, self._path = copies(state["start"]), copies(state["path"])
        self._reset_step()

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        params = super()._parameters(model)
        for tensors in (self._start, self._path):
            for name, tensor in tensors.items():
                check_same_parameter(name, tensor, params)
                tensors[name] = tensor.to(params[name].device)
        return params
