"""Synaptic intelligence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neuvar._batches import Data
from neuvar.continual.penalty import Penalty, copies
from neuvar.continual.quadratic import Weights, pull
from neuvar.noise import scale
from neuvar.optim.noisy_parameters import as_trained, clean_copy


class SI(Penalty):
    r"""Synaptic intelligence: what matters is how much a weight's own way lowered the loss.

    .. math:: \Omega_i = \sum_k \frac{\max(\omega_{k,i}, 0)}{\Delta_{k,i}^2 + \xi}, \qquad
              \omega_{k,i} = -\sum_t g_{t,i} (\theta_{t+1,i} - \theta_{t,i})

    where :math:`\Delta_k` is how far task k moved the weight and :math:`g_t` the gradient of the
    task's loss, without the penalty's. Importances add up over tasks and hold to the weights of the
    latest one. The paper's c has no factor ½: it is half our strength. Under NVRM
    :math:`\theta_t` are the clean weights, so :math:`\omega` is the fall of the neural variable
    risk; the difference of two noises is no way that the weights went.

    Call ``after_step(model)`` right after each step, before gradients are set to zero. A loop that
    clips gradients, or changes them otherwise, must call ``before_clip(model)`` before it does so:
    from the clipped gradient of the whole loss that of the task alone cannot be found, and the
    importances would be wrong.

    References:
        Zenke, Poole, Ganguli: Continual Learning Through Synaptic Intelligence, 2017.

    Args:
        strength: the factor λ, not negative; with 0 training is as without, to the bit.
        damping: the number ξ, positive, which bounds the importance of weights that hardly moved.
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
        if not scale("damping", damping):
            raise ValueError(f"damping must be a finite number > 0, got {damping!r}")
        super().__init__(strength, at=at)
        self.damping = float(damping)
        self._start: Weights = {}
        self._path: Weights = {}
        self._before: Weights = {}
        self._pull: Weights = {}
        self._noted: Weights = {}

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty, see :class:`Penalty`; it also notes where the step to come starts."""
        found = super().__call__(model)
        if torch.is_grad_enabled():  # otherwise somebody only wants to know the value
            params = self._parameters(model)
            trained = {name: p for name, p in params.items() if p.requires_grad}
            self._before = {name: clean_copy(p) for name, p in trained.items()}
            self._pull, self._noted = {}, {}
            if self.strength and self.tasks:
                perturbed = self.at == "perturbed"
                at = {n: as_trained(p) for n, p in trained.items()} if perturbed else self._before
                self._pull = pull(self._held, at, self.strength)
            for name, clean in self._before.items():
                if name not in self._start:
                    self._start[name] = clean.clone()
                    wide = torch.promote_types(clean.dtype, torch.float32)
                    self._path[name] = torch.zeros_like(clean, dtype=wide)
        return found

    @torch.no_grad()
    def before_clip(self, model: nn.Module) -> None:
        """Note the gradients as they are; with a gradient scaler, call its ``unscale_`` first."""
        params = self._parameters(model)
        if not self._before:
            raise ValueError("before_clip must follow a loss that had penalty(model) in it")
        grads = {name: params[name].grad for name in self._before}
        self._noted = {name: g.detach().clone() for name, g in grads.items() if g is not None}
        if not self._noted:
            raise ValueError("before_clip must come after backward: there are no gradients")

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Add what the step of the optimizer did to the path; gradients must still be there."""
        params = self._parameters(model)
        if not self._before:
            raise ValueError("after_step must follow a step whose loss had penalty(model) in it")
        if all(params[name].grad is None for name in self._before):
            raise ValueError("after_step must come before zero_grad: there are no gradients")
        for name, before in self._before.items():
            if (gradient := self._noted.get(name, params[name].grad)) is None:
                continue
            moved = clean_copy(params[name]).sub_(before)
            if not moved.any():
                continue  # a step that a gradient scaler left out: gradients may be infinite
            if name in self._pull:
                gradient = self._pull[name].neg_().add_(gradient)
            path = self._path[name]
            path.addcmul_(gradient.to(path.dtype), moved.to(path.dtype), value=-1)
        self._before, self._pull, self._noted = {}, {}, {}

    def after_task(self, model: nn.Module, data: Data | None = None, **arguments: Any) -> None:
        """Hold to the weights as they stand now, without their noise; data is not used."""
        params = self._parameters(model)
        if not self._path:
            raise ValueError("after_task needs at least one step with penalty(model), after_step")
        importance = {}
        for name, path in self._path.items():
            moved = clean_copy(params[name]) - self._start[name]
            importance[name] = path.clamp(min=0) / (moved.square() + self.damping)
        if not any(bool(path.any()) for path in self._path.values()):
            raise ValueError("after_step saw no gradients in this task: call it before zero_grad")
        self._hold(model, importance, gamma=1.0)
        self._start, self._path = {}, {}
        self._before, self._pull, self._noted = {}, {}, {}

    def state_dict(self) -> dict[str, Any]:
        """All that has been gathered, also of a task that is not finished."""
        return super().state_dict() | {"start": copies(self._start), "path": copies(self._path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what another penalty of the same method has gathered."""
        super().load_state_dict(state)
        self._start, self._path = copies(state["start"]), copies(state["path"])
        self._before, self._pull, self._noted = {}, {}, {}

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters; what an unfinished task has gathered follows them, too."""
        params = super()._parameters(model)
        for gathered in (self._start, self._path):
            for name, tensor in gathered.items():
                if name not in params or params[name].shape != tensor.shape:
                    raise ValueError(
                        f"model is another one than before: the penalty knows parameter {name!r} "
                        f"of shape {tuple(tensor.shape)}"
                    )
                gathered[name] = tensor.to(params[name].device)
        return params
