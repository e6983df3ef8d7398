"""Keep evaluation and checkpoints clean: what a model shows of perturbed weights."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from neuvar.optim.layout import local
from neuvar.optim.wrapper import Wrapper


class Guard:
    """What :func:`guard` returns; call :meth:`remove` to end it."""

    def __init__(self, model: nn.Module, optimizer: Wrapper) -> None:
        self._model = weakref.ref(model)
        self._base = type(model)
        self._optimizer: Wrapper | None = optimizer
        self._busy = False
        self.follow(model.training)  # if it refuses, nothing is changed yet
        self._handles = []
        for module in model.modules():
            self._handles += [
                module.register_state_dict_post_hook(partial(_clean_state, self)),
                module.register_load_state_dict_pre_hook(partial(_before_load, self)),
                module.register_load_state_dict_post_hook(partial(_after_load, self)),
            ]
        model.__dict__["_neuvar_guard"] = self
        model.__class__ = _guarded_class(self._base)

    def remove(self) -> None:
        """Let the model be as before: noise comes back even if it is in evaluation mode."""
        optimizer, model = self._optimizer, self._model()
        self._optimizer = None
        for handle in self._handles:
            handle.remove()
        if model is not None and model.__dict__.get("_neuvar_guard") is self:
            del model.__dict__["_neuvar_guard"]
            if vars(type(model)).get("_neuvar_base") is self._base:
                model.__class__ = self._base  # type: ignore[assignment]
        if optimizer is not None:
            optimizer._weights.release(self)

    def follow(self, training: bool) -> None:
        """Keep the weights clean as long as the model is not in training mode."""
        if self._optimizer is None:
            return
        weights = self._optimizer._weights
        if not training:
            weights.hold(self)
            return
        for reason in [r for r in weights.holds if isinstance(r, _Load) and r.guard is self]:
            weights.release(reason)  # a load that failed half-way left it
        weights.release(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model has other parameters, which this optimizer does not train.
        return _no_guard, ()


class _Load(NamedTuple):
    """The reason to keep weights clean while a module's state is loaded."""

    guard: Guard
    module: nn.Module


def _no_guard() -> Guard:
    """What stands in a copy of a guarded model for its guard: one that does nothing."""
    inert = Guard.__new__(Guard)
    inert._optimizer = None
    return inert


def _clean_state(
    guard: Guard, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Replace live weights in a state dict by clean copies, under whatever names they stand."""
    if guard._optimizer is None or (guard._busy and module is not guard._model()):
        return  # the whole model's hook comes last and does it for all
    live = {_address(p): p for g in guard._optimizer.param_groups for p in g["params"]}
    copies: dict[Tensor, Tensor] = {}
    for key, value in state.items():
        # With keep_vars=True the caller asks for the parameters themselves.
        if not isinstance(value, Tensor) or value.requires_grad or not key.startswith(prefix):
            continue
        p = live.get(_address(value)) if value.numel() else None
        if p is not None and p.shape == value.shape:
            if p not in copies:
                # A copy also of weights that are clean, because noise may enter them later.
                copies[p] = guard._optimizer.clean_copy(p)
            state[key] = copies[p]


def _address(p: Tensor) -> int:
    return local(p).data_ptr()


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
    guard._optimizer._weights.hold(_Load(guard, module))


def _after_load(guard: Guard, module: nn.Module, incompatible: Any) -> None:
    if guard._optimizer is not None:
        guard._optimizer._weights.release(_Load(guard, module))


def _make(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """Make a module by what its own class says; pickle itself would insist on the guarded class."""
    return make(*arguments)


@contextmanager
def _unguarded(model: nn.Module) -> Iterator[Wrapper | None]:
    """Let a model be of its own class for a moment, to be copied as such."""
    found, own = model.__dict__.pop("_neuvar_guard", None), model.__class__
    model.__class__ = vars(own)["_neuvar_base"]
    try:
        yield found and found._optimizer
    finally:
        model.__class__ = own
        if found is not None:
            model.__dict__["_neuvar_guard"] = found


def _guarded_class(base: type[nn.Module]) -> type[nn.Module]:
    """Subclass that tells its guard of every change of mode, and whose copies are clean."""

    def set_training(self: nn.Module, mode: bool) -> None:
        self.__dict__["training"] = mode
        if (found := self.__dict__.get("_neuvar_guard")) is not None:
            found.follow(mode)

    def state_dict(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        found = self.__dict__.get("_neuvar_guard")
        if found is None:
            return base.state_dict(self, *arguments, **options)
        found._busy = True
        try:
            return base.state_dict(self, *arguments, **options)
        finally:
            found._busy = False

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        found = self.__dict__.get("_neuvar_guard")
        with found._optimizer.denoised() if found else nullcontext(), _unguarded(self):
            return copy.deepcopy(self, memo)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        with _unguarded(self) as optimizer:
            if optimizer is not None and optimizer._weights.carried.terms:
                raise RuntimeError(
                    "the model's weights carry noise; save its state_dict(), or pickle it inside "
                    "`with optimizer.denoised():`"
                )
            made: Any = self.__reduce_ex__(protocol)
        make, arguments, state = made[:3]
        if isinstance(state, dict):  # the live one, where the guard is back by now
            state = {key: value for key, value in state.items() if key != "_neuvar_guard"}
        return _make, (make, arguments), state, *made[3:]

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
            "state_dict": state_dict,
            "training": property(lambda self: self.__dict__["training"], set_training),
        },
    )


def bare(model: nn.Module) -> nn.Module:
    """The model inside its wrappers, so that parameters have the same names with and without."""
    while isinstance(model, (OptimizedModule, nn.DataParallel, DistributedDataParallel)):
        model = model._orig_mod if isinstance(model, OptimizedModule) else model.module
    return model


def guard(model: nn.Module, optimizer: Wrapper) -> Guard:
    """Make a model show clean weights wherever it is not being trained.

    From now on, in evaluation mode (``model.eval()``) its weights are clean; ``state_dict()``, of
    the model or of a part of it, gives copies of clean weights at any moment; ``load_state_dict``
    sets the clean weights; and copies of the model are clean and free. An ordinary training loop
    then needs no other change than its optimizer. A guard for a new optimizer replaces that of one
    which was put into evaluation mode.

    Load a distributed checkpoint of both inside ``with optimizer.denoised():``, because torch
    brings the optimizer's state before the model's.

    Two things ask for the live parameters and get them, noise and all: ``parameters()`` and
    ``state_dict(keep_vars=True)``; use them, as averages of weights do, inside
    ``with optimizer.denoised():``.

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
    if not isinstance(optimizer, Wrapper):
        raise ValueError(f"optimizer must be one of neuvar's, got {type(optimizer).__name__}")
    model = bare(model)
    known = {p for group in optimizer.param_groups for p in group["params"]}
    if not any(p in known for p in model.parameters()):
        raise ValueError("optimizer trains none of the model's parameters")
    if (former := model.__dict__.get("_neuvar_guard")) is not None:
        if "eval" not in former._optimizer._weights.holds:
            raise ValueError(
                "the model is guarded already, for an optimizer that still trains it; call eval() "
                "on that optimizer, or remove() on its guard, first"
            )
        former.remove()
    return Guard(model, optimizer)


def reestimate_batchnorm(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    optimizer: Wrapper | None = None,
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
    if optimizer is not None and not isinstance(optimizer, Wrapper):
        raise ValueError(f"optimizer must be one of neuvar's, got {type(optimizer).__name__}")
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
