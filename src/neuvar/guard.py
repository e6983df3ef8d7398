"""Keep evaluation and checkpoints clean: what a model shows of perturbed weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuvar.optim import NVRM


class Guard:
    """What :func:`guard` returns; call :meth:`remove` to end it."""

    def __init__(self, model: nn.Module, optimizer: NVRM) -> None:
        self._model = model
        self._base = type(model)
        self._optimizer: NVRM | None = optimizer
        self._handles = []
        for module in model.modules():
            self._handles += [
                module.register_state_dict_post_hook(partial(_clean_state, self)),
                module.register_load_state_dict_pre_hook(partial(_before_load, self)),
                module.register_load_state_dict_post_hook(partial(_after_load, self)),
            ]
        model.__dict__["_neuvar_guard"] = self
        model.__class__ = _guarded_class(self._base)
        self.follow(model.training)

    def remove(self) -> None:
        """Let the model be as before. Weights that are clean now get their noise back."""
        if self._optimizer is None:
            return
        for handle in self._handles:
            handle.remove()
        if type(self._model).__dict__.get("_neuvar_base") is self._base:
            self._model.__class__ = self._base
        self._model.__dict__.pop("_neuvar_guard", None)
        self._optimizer._weights.release(self)
        self._optimizer = None

    def follow(self, training: bool) -> None:
        """Keep the weights clean as long as the model is not in training mode."""
        if self._optimizer is not None:
            weights = self._optimizer._weights
            (weights.release if training else weights.hold)(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model has other parameters, which this optimizer does not train.
        return _no_guard, ()


def _no_guard() -> Guard:
    """What stands in a copy of a guarded model for its guard: one that does nothing."""
    inert = Guard.__new__(Guard)
    inert._optimizer = None
    return inert


def _clean_state(
    guard: Guard, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    if guard._optimizer is None:
        return
    for name, p in module._parameters.items():
        found = state.get(prefix + name)
        # With keep_vars=True the caller asks for the parameters themselves.
        if p is not None and isinstance(found, Tensor) and found is not p:
            # A copy also of weights that are clean, because noise may enter them later.
            state[prefix + name] = guard._optimizer.clean_copy(p)


def _before_load(
    guard: Guard, module: nn.Module, state: Any, prefix: str, metadata: Any, *rest: Any
) -> None:
    if guard._optimizer is None:
        return
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would give the model parameters that its optimizer does "
            "not know; load without assign, or before the optimizer is made"
        )
    guard._optimizer._weights.hold((guard, module))


def _after_load(guard: Guard, module: nn.Module, incompatible: Any) -> None:
    if guard._optimizer is not None:
        guard._optimizer._weights.release((guard, module))


def _new(base: type[nn.Module]) -> nn.Module:
    return base.__new__(base)


def _guarded_class(base: type[nn.Module]) -> type[nn.Module]:
    """Subclass that tells its guard of every change of mode, and whose copies are clean."""

    def set_training(self: nn.Module, mode: bool) -> None:
        self.__dict__["training"] = mode
        if (found := self.__dict__.get("_neuvar_guard")) is not None:
            found.follow(mode)

    def plain_state(self: nn.Module) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_neuvar_guard"}

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        found = self.__dict__.get("_neuvar_guard")
        with found._optimizer.denoised() if found else nullcontext():
            twin = _new(base)
            memo[id(self)] = twin
            twin.__dict__.update(copy.deepcopy(plain_state(self), memo))
        return twin

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        found = self.__dict__.get("_neuvar_guard")
        if found is not None and found._optimizer._weights.noisy:
            raise RuntimeError(
                "the model's weights carry noise; save its state_dict(), or pickle it inside "
                "`with optimizer.denoised():`"
            )
        return _new, (base,), plain_state(self)

    return type(
        base.__name__,
        (base,),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__deepcopy__": deepcopy,
            "__reduce_ex__": reduce,
            "_neuvar_base": base,
            "training": property(lambda self: self.__dict__["training"], set_training),
        },
    )


def guard(model: nn.Module, optimizer: NVRM) -> Guard:
    """Make a model show clean weights wherever it is not being trained.

    From now on, in evaluation mode (``model.eval()``) its weights are clean; ``state_dict()``, of
    the model or of a part of it, gives copies of clean weights at any moment; ``load_state_dict``
    sets the clean weights; and copies of the model are clean and free. An ordinary training loop
    then needs no other change than its optimizer.

    Two things ask for the live parameters and get them, noise and all: ``parameters()`` and
    ``state_dict(keep_vars=True)``; use them inside ``with optimizer.denoised():``.

    >>> from neuvar import NVRMSGD
    >>> model = nn.Linear(4, 2)
    >>> optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.05)
    >>> handle = guard(model, optimizer)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    >>> noisy, clean = model.weight.detach().clone(), model.state_dict()["weight"]
    >>> bool(torch.equal(noisy, clean)), bool(torch.equal(model.eval().weight, clean))
    (False, True)
    >>> handle.remove()
    """
    if not isinstance(optimizer, NVRM):
        raise ValueError(f"optimizer must be an NVRM optimizer, got {type(optimizer).__name__}")
    if "_neuvar_guard" in model.__dict__:
        raise ValueError("the model is guarded already; call remove() on its guard first")
    known = {p for group in optimizer.param_groups for p in group["params"]}
    if not any(p in known for p in model.parameters()):
        raise ValueError("optimizer trains none of the model's parameters")
    return Guard(model, optimizer)


def reestimate_batchnorm(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    optimizer: NVRM | None = None,
    feed: Callable[[nn.Module, Any], Any] | None = None,
) -> int:
    """Estimate the statistics of batch normalisation anew, at the clean weights.

    While training, they were gathered at perturbed weights. Each becomes the mean over all
    batches; everything but batch normalisation runs in evaluation mode. Momentum, modes and
    weights are left as found, and so are the statistics if anything fails.

    Args:
        model: any module; without batch normalisation nothing is done.
        batches: tensors, tuples or lists whose first item is the input, or dicts of keyword
            arguments.
        optimizer: the optimizer whose noise is to be taken off meanwhile.
        feed: called as ``feed(model, batch)`` in place of the above.

    Returns:
        How many batches were seen.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    >>> reestimate_batchnorm(model, torch.randn(5, 16, 4))
    5
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return 0
    modes = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    before = [{name: b.clone() for name, b in norm.named_buffers(recurse=False)} for norm in norms]
    seen = 0
    try:
        with torch.no_grad(), optimizer.denoised() if optimizer is not None else nullcontext():
            model.eval()
            for norm in norms:
                norm.train()
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean over batches
            for batch in batches:
                (feed or _feed)(model, batch)
                seen += 1
        if not seen:
            raise ValueError("batches is empty; batch normalisation needs at least one")
    except BaseException:
        for norm, buffers in zip(norms, before, strict=True):
            for name, buffer in buffers.items():
                getattr(norm, name).copy_(buffer)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    return seen


def _feed(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch of one of the usual shapes."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, (tuple, list)) and batch:
        return model(batch[0])
    raise ValueError(
        f"a batch must be a tensor, a tuple or a dict, got {type(batch).__name__}; "
        "for others give feed(model, batch)"
    )
