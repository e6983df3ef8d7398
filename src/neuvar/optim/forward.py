"""Noise inside the training forward passes of a model, so that its parameters stay clean.

``Module.__call__`` runs ``self._call_impl``, or ``self._compiled_call_impl`` after
``Module.compile()``. An :class:`_Entry` in the instance's ``__dict__`` replaces that method. During
the outermost pass, ``module._parameters`` holds perturbed tensors. The parameters are put back
before the pass returns; autograd keeps references to the perturbed tensors. Unlike a forward hook,
an entry also puts the parameters back after Ctrl-C, costs nothing in the submodules that the pass
calls, and is not part of copies, pickles and scripted modules.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch._compile
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.checkpoint import CheckpointFunction

from neuvar.noise import Term, add_noise
from neuvar.optim.layout import relative_size

Noise = dict[Tensor, Term]
"""The noise of a model: one term for each parameter that has noise."""
ModuleParameter = tuple[nn.Module, str, Tensor]
"""A module, the name of one of its parameters, and the parameter."""
Ending = Callable[[Any], None]
"""Ends a forward pass, given its result (None if it failed)."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
NEVER = -1
_CLOCK = itertools.count()


def not_compiled(*, recursive: bool = True) -> Callable[[F], F]:
    """As ``torch.compiler.disable``, but torch._dynamo is imported at the first call only."""
    disable: Any = torch._compile._disable_dynamo
    return disable(recursive=recursive)  # type: ignore[no-any-return]


def alive(objects: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """The objects that still exist; other threads may add some at the same time."""
    return [item for ref in objects.valuerefs() if (item := ref()) is not None]


OWNERS: weakref.WeakValueDictionary[int, WeightNoise] = weakref.WeakValueDictionary()
"""The noise of every optimizer, by id."""
REST = "rest"
"""Reason to keep weights clean between training passes, where noise is added in place."""


class WeightNoise(ABC):
    """The noise of one optimizer.

    Attributes:
        params: all parameters of the optimizer.
        model: the model that the optimizer was created with, or None.
        eps: the noise of each parameter that has some.
        holds: reasons to keep the weights clean.
        passes: number of training forward passes since the last step.
        used: time of the last use. If several optimizers train a weight, the last one used adds its
            noise. ``NEVER`` after another optimizer has taken a step.
        always: whether every forward pass gets the noise, in any mode.
        factors: additional factors of relative noise, for some parameters.
    """

    keys: tuple[str, ...] = ()
    """Names of what a checkpoint of the optimizer holds for each parameter."""
    used = NEVER
    always = False

    def __init__(self, params: Set[Tensor], model: nn.Module | None) -> None:
        self.params = params
        self.model = model
        self.eps: Noise = {}
        self.holds: set[object] = set()
        self.passes = 0
        self.factors: dict[Tensor, Tensor] = {}
        self._register()

    def __getstate__(self) -> dict[str, Any]:
        # Nobody can release the holds of a copy, so it begins in eval mode, which train() ends.
        holds = ({"eval"} if self.held else set()) | (self.holds & {REST})
        shared = {"params": set(self.params), "model": self.model, "eps": self.eps}
        return shared | {"holds": holds, "passes": self.passes, "factors": self.factors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        OWNERS[id(self)] = self
        _watch_other_optimizers()
        if self.model is None or "_modules" in self.model.__dict__:
            self.use()  # else it is an attribute of the model, whose copy is not complete yet

    def use(self) -> None:
        """Mark the optimizer as used."""
        self.used, model = next(_CLOCK), self.model
        if _OPEN.frames:
            _end_interrupted_passes()
        if model is None:
            return
        entry = _ENTRIES.get(model)
        if (
            entry is None
            or entry.active
            or weakref.ref(self) not in entry.owners
            or model.__dict__.get(entry.name) is not entry
        ):
            install(model, self)

    @property
    def held(self) -> bool:
        """Whether clean weights were requested."""
        return bool(self.holds - {REST})

    @property
    @abstractmethod
    def carried(self) -> Noise:
        """The noise that the weights have now, or in the next training forward pass."""

    @abstractmethod
    def enter(
        self, slots: list[ModuleParameter], swaps: Swaps, *, wanted: bool, repeats: bool
    ) -> Ending | None:
        """Begin a forward pass of modules with these parameters.

        May return a function to call with the result at the end of the pass.

        Args:
            slots: the parameters.
            swaps: collects the perturbed tensors that replace parameters.
            wanted: whether the pass trains the model, so that it gets noise.
            repeats: whether a backward pass repeats an earlier pass that had noise, as gradient
                checkpointing does.
        """

    @abstractmethod
    def in_use(self, p: Tensor) -> bool:
        """Whether a forward pass has used a parameter's noise since the last step."""

    @abstractmethod
    def begin_update(self) -> None:
        """Give the inner optimizer the clean weights."""

    @abstractmethod
    def end_update(self, eps: Noise | None) -> None:
        """Continue after an update with new noise; None keeps the old noise."""

    @abstractmethod
    def replace(self, eps: Noise) -> None:
        """Replace the present noise."""

    # The rest is for parameters that are always clean; NoisyParameters overrides it.

    def hold(self, reason: object) -> None:
        """Keep the weights clean until every reason to do so is released."""
        self.holds.add(reason)

    def release(self, reason: object) -> None:
        """Allow noise again, unless there is another reason to keep the weights clean."""
        self.holds.discard(reason)

    def drop_perturbed(self) -> None:  # noqa: B027 - only ForwardNoise needs it
        """Drop what was computed from the weights, which may have been written to."""

    def accept(self, params: Iterable[Tensor] | None = None) -> None:  # noqa: B027
        """Accept the present weights as clean: of these parameters, or of those that changed."""

    def check_untouched(self) -> None:  # noqa: B027
        """Raise an error if anything else has changed perturbed weights."""

    def clean_copy(self, p: Tensor) -> Tensor:
        """Copy of the clean weights of a parameter, perturbed or not."""
        return p.detach().clone()

    def size(self, p: Tensor) -> Tensor | None:
        """The factor of a parameter's noise if b is relative to the weights, else None."""
        size = relative_size(p, p.detach(), self.eps[p].draw.relative_to)
        factor = self.factors.get(p)
        return size if size is None or factor is None else size * factor.to(size.device)

    def saved(self, p: Tensor) -> tuple[Any, ...]:
        """What a checkpoint holds for a parameter, by the names in ``keys``."""
        return ()


def noise_owners(params: Iterable[Tensor]) -> list[WeightNoise]:
    """The noise of all optimizers that train some of these parameters, the last one used first."""
    wanted = set(params)
    owners = [owner for owner in alive(OWNERS) if not wanted.isdisjoint(owner.params)]
    return sorted(owners, key=lambda owner: -owner.used)


@functools.cache
def _watch_other_optimizers() -> None:
    register_optimizer_step_post_hook(_after_any_step)


def _after_any_step(optimizer: Optimizer, *_: Any) -> None:
    """Stop the noise of owners whose weights another optimizer has updated."""
    # The noise of this optimizer, or of one that it wraps.
    own = {id(getattr(x, "_weights", None)) for x in (optimizer, *vars(optimizer).values())}
    for owner in alive(OWNERS):
        if id(owner) not in own and owner.used != NEVER:
            for group in optimizer.param_groups:
                if not owner.params.isdisjoint(group["params"]):
                    owner.used = NEVER  # NVRM.step() marks its own use afterwards


class _Perturbed(NamedTuple):
    """A perturbed tensor, its address, and the state of the parameter that it was made from."""

    tensor: Tensor
    buffer: int
    version: int
    address: int


class Swaps(NamedTuple):
    """Tensors that replace parameters during a forward pass, and where."""

    dicts: list[dict[str, Any]]
    names: list[str]
    params: list[Tensor]
    tensors: list[Tensor]
    made: list[_Perturbed]


class ForwardNoise(WeightNoise):
    """Gives perturbed tensors to a model's training forward passes.

    The parameters always hold the clean weights. The perturbed tensors are kept until the next
    step, so that all micro-batches of a step share them. Later steps reuse their memory.
    """

    def __init__(self, params: Set[Tensor], model: nn.Module) -> None:
        self._perturbed: dict[Tensor, _Perturbed] = {}
        self._buffers: dict[Tensor, Tensor] = {}
        super().__init__(params, model)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_perturbed": {}, "_buffers": {}}

    @property
    def carried(self) -> Noise:
        return {} if self.holds else self.eps

    def enter(
        self, slots: list[ModuleParameter], swaps: Swaps, *, wanted: bool, repeats: bool
    ) -> Ending | None:
        if not (repeats or (wanted and not self.holds)):
            return None
        self.passes += 1
        modules, names, params = zip(*slots, strict=True)
        plain = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if plain and torch._C._functorch.peek_interpreter_stack() is None:
            made = [self.perturbed(p) for p in params]
        else:
            with torch.inference_mode(False), torch.enable_grad(), no_transforms():
                made = [self.perturbed(p) for p in params]
        swaps.tensors.extend(perturbed.tensor for perturbed in made)
        swaps.dicts.extend(module._parameters for module in modules)
        swaps.names.extend(names)
        swaps.params.extend(params)
        swaps.made.extend(made)
        return None

    def perturbed(self, p: Tensor) -> _Perturbed:
        """A parameter plus its noise; gradients flow to the parameter. Needs gradients on."""
        state, made = (p._version, p.data_ptr()), self._perturbed.get(p)
        if made is None or made[2:] != state or made.tensor.data_ptr() != made.buffer:
            self._perturbed.pop(p, None)
            made = None  # frees its memory
            clean, buffer, term = p.detach(), self._buffers.get(p), self.eps[p]
            # Two references are ours: the buffer and the storage object made here. If there are
            # more, the old values are still in use, for example by autograd.
            if (
                buffer is None
                or torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) > 2
                or (buffer.dtype, buffer.device) != (p.dtype, p.device)
                or buffer.stride() != p.stride()
            ):
                buffer = self._buffers[p] = torch.empty_like(clean)
            size = self.size(p) if term.draw.relative_to else None
            add_noise(clean, term, out=buffer, size=size)
            tensor = p.expand_as(p)  # passes its gradient on to p, dense or sparse
            tensor.data = buffer
            made = self._perturbed[p] = _Perturbed(tensor, buffer.data_ptr(), *state)
        return made

    def in_use(self, p: Tensor) -> bool:
        return p in self._perturbed

    def drop_perturbed(self) -> None:
        self._perturbed = {}

    begin_update = drop_perturbed

    def end_update(self, eps: Noise | None) -> None:
        if eps is not None:
            self.eps, self.passes = eps, 0

    def replace(self, eps: Noise) -> None:
        self.eps, self._perturbed = eps, {}


def no_transforms() -> AbstractContextManager[Any]:
    """Suspend vmap, grad and other transforms of torch.func inside a ``with`` block."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


# Entries: how forward passes are intercepted.


class _Passes(threading.local):
    """Functions that put the parameters back, and the frame of each pass in progress."""

    def __init__(self) -> None:
        self.frames: dict[Callable[[], Any], FrameType] = {}


_OPEN = _Passes()
_GETSTATE = "__getstate__"
_ENTRIES: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()


class _Entry:
    """Wraps the calls of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.owners: list[weakref.ref[WeightNoise]] = []
        self.active = False
        compiled = module.__dict__.get("_compiled_call_impl") is not None
        self.name = "_compiled_call_impl" if compiled else "_call_impl"
        self.former: Callable[..., Any] | None = None
        self.getstate = _State(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_method(memo, self._module(), self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules that pickle their __dict__ by themselves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting() or torch._C._is_tracing():
            module: Any = self._module()
            return (self.former or type(module)._call_impl.__get__(module))(*args, **kwargs)
        return _noisy_pass(self, args, kwargs)

    def remove_owner(self, ref: weakref.ref[WeightNoise]) -> None:
        """Remove an owner that was deleted, and this entry with the last one."""
        self.owners.remove(ref)
        if not self.owners and not self.active:
            self.end()

    def end(self) -> None:
        """Leave the module as it was before."""
        if (module := self._module()) is None:
            return
        names = module.__dict__
        if names.get(self.name) is self:
            names[self.name] = self.former
            if self.former is None:
                del names[self.name]
        if _ENTRIES.get(module) is self:
            names.pop(_GETSTATE, None)
            del _ENTRIES[module]


class _State:
    """Gives the state of a module, for copies and pickles, without its entry."""

    def __init__(self, entry: _Entry) -> None:
        self._entry = entry

    def __call__(self) -> dict[str, Any]:
        module = self._entry._module()
        kind: Any = type(module)
        ours = (self._entry.name, _GETSTATE)
        return {k: value for k, value in kind.__getstate__(module).items() if k not in ours}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_method(memo, self._entry._module(), _GETSTATE)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _own_method(memo: dict[int, Any], module: nn.Module | None, name: str) -> Any:
    """The method of a copied module, for modules that copy their __dict__ by themselves."""
    return getattr(memo[id(module)], name) if id(module) in memo else None


def install(model: nn.Module, owner: WeightNoise) -> None:
    """Intercept the forward passes of a model and of its submodules while the owner is alive."""
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    # Any access to the weight calls them, also outside of forward passes.
    parametrizations = {part for module in lists for part in module.modules()}
    for module in model.modules():
        if module in parametrizations:
            continue
        entry = _ENTRIES.get(module)
        if entry is None:
            entry = _ENTRIES[module] = _Entry(module)
        if weakref.ref(owner) not in entry.owners:
            entry.owners.append(weakref.ref(owner, entry.remove_owner))
        entry.active = False
        names = module.__dict__
        if (present := names.get(entry.name)) is not entry:
            entry.former = present
            names[entry.name], names[_GETSTATE] = entry, entry.getstate


@not_compiled(recursive=False)
def _noisy_pass(entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module with the noise of all optimizers that have some for it."""
    root: Any = entry._module()
    plain = entry.former or type(root)._call_impl.__get__(root)
    dispatch, keys = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
    tracer = sys.modules.get("torch.fx._symbolic_trace")
    if (
        entry.active
        or dispatch(keys.PROXY) is not None
        or dispatch(keys.FAKE) is not None
        or (tracer is not None and tracer._is_fx_tracing_flag)
    ):
        return plain(*args, **kwargs)
    swaps, result = Swaps([], [], [], [], []), None
    entries, endings = list[_Entry](), list[Ending]()
    # Only C functions, which Ctrl-C cannot interrupt. Parameters that forward() itself has replaced
    # are not put back.
    ours = map(operator.is_, map(dict.get, swaps.dicts, swaps.names), swaps.tensors)
    back = itertools.compress(zip(swaps.dicts, swaps.names, swaps.params), ours)  # noqa: B905
    put_back: Callable[[], Any]
    put_back = functools.partial(deque, itertools.starmap(operator.setitem, back), 0)
    _OPEN.frames[put_back] = sys._getframe()
    try:
        _begin(root, entries, swaps, endings)
        result = plain(*args, **kwargs)
        return result
    finally:
        put_back()
        _OPEN.frames.pop(put_back, None)
        _end(entries, swaps, endings, result)


@not_compiled()
def _begin(root: nn.Module, entries: list[_Entry], swaps: Swaps, endings: list[Ending]) -> None:
    """Remove entries for the pass, and let each owner begin it, the last one used first."""
    modules, seen, slots = [root], {root}, list[ModuleParameter]()
    for module in modules:  # the list grows; Module.modules() takes several times as long
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
        slots += [
            (module, name, p)
            for name, p in module._parameters.items()
            if p is not None and p.requires_grad
        ]
        entry = _ENTRIES.get(module)
        if entry is not None:  # the pass calls this module, perhaps from compiled code
            entries.append(entry)
            entry.active = True
            name, former = entry.name, entry.former
            if module.__dict__.get(name) is entry:
                module.__dict__[name] = former
                if former is None:
                    del module.__dict__[name]
    grads = torch.is_grad_enabled() or _in_reentrant_checkpoint()
    # A pass inside a backward pass repeats an earlier one: gradient checkpointing.
    repeats = torch._C._current_graph_task_id() != -1
    refs = {ref for entry in entries for ref in entry.owners}
    owners = [owner for ref in refs if (owner := ref()) is not None]
    for owner in sorted(owners, key=operator.attrgetter("used"), reverse=True):
        own = [slot for slot in slots if slot[2] in owner.eps]
        had_noise = repeats and any(owner.in_use(p) for _, _, p in own)
        if not repeats or had_noise:
            slots = [slot for slot in slots if slot[2] not in owner.params]
        if own:
            trained = any(module.training for module, _, _ in own)
            wanted = owner.always or (grads and trained and owner.used != NEVER)
            if (ending := owner.enter(own, swaps, wanted=wanted, repeats=had_noise)) is not None:
                endings.append(ending)
    deque(map(operator.setitem, swaps.dicts, swaps.names, swaps.tensors), 0)


@not_compiled()
def _end(entries: list[_Entry], swaps: Swaps, endings: list[Ending], result: Any) -> None:
    """Put entries back, and let every owner end the pass, even if one raises an error."""
    for entry in reversed(entries):  # the root last: if it is in place, all are
        entry.active = False
        module = entry._module()
        if module is None or not entry.owners:
            entry.end()
            continue
        names = module.__dict__
        if (present := names.get(entry.name)) is not entry:
            entry.former, names[entry.name] = present, entry
        if swaps.made and isinstance(module, nn.RNNBase):
            module._update_flat_weights()  # it keeps a list of its weights
    errors = [
        RuntimeError(
            f"forward() wrote to the parameter {name!r} of shape {tuple(p.shape)} while it "
            "carried noise, and the write is lost; write to it outside of forward(), or "
            "give it a parameter group with b=0"
        )
        for name, p, made in zip(swaps.names, swaps.params, swaps.made)  # noqa: B905
        # The tensor and the parameter share a version counter.
        if p._version != made.version or made.tensor.data_ptr() != made.buffer
    ]
    for ending in reversed(endings):
        try:
            ending(result)
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _end_interrupted_passes() -> None:
    """Put back the parameters of passes that Ctrl-C ended before they could do so themselves."""
    running = set(_callers(sys._getframe()))
    for put_back, frame in list(_OPEN.frames.items()):
        if frame not in running:
            put_back()
            del _OPEN.frames[put_back]


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_reentrant_checkpoint() -> bool:
    """Whether this is the first pass of a reentrant checkpoint, which has gradients off.

    The backward pass repeats it with gradients on.
    """
    code = CheckpointFunction.forward.__code__
    return any(frame.f_code is code for frame in _callers(sys._getframe()))
