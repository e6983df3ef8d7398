"""Noise inside the forward passes of a model, so that its parameters stay clean.

``Module.__call__`` runs ``self._call_impl``, or ``self._compiled_call_impl`` after
``Module.compile()``. An entry in the instance's ``__dict__`` takes the place of that method and
wraps it. Unlike a forward hook it survives Ctrl-C, costs nothing in the modules that a forward pass
calls in turn, and stays out of copies, pickles and scripted modules.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch._compile
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.checkpoint import CheckpointFunction

from neuvar.optim.perturbation import NONE, Perturbation, added_noise

ModuleParameter = tuple[nn.Module, str, Tensor]
"""A module, the name of one of its parameters, and the parameter."""
Ending = Callable[[Any], None]
"""Ends a forward pass, given its result (None if it failed)."""

F = TypeVar("F", bound=Callable[..., Any])
NEVER = -1
_CLOCK = itertools.count()


def not_compiled(*, recursive: bool = True) -> Callable[[F], F]:
    """Keep torch.compile out of a function, as torch.compiler.disable does.

    torch._dynamo, whose import takes seconds, is imported at the first call only.
    """
    disable: Any = torch._compile._disable_dynamo
    return disable(recursive=recursive)  # type: ignore[no-any-return]


# Owners: the noise of each optimizer.

OWNERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""The noise of every optimizer that is alive."""


class Owner(Protocol):
    """The noise of one optimizer, as a forward pass meets it."""

    params: Collection[Tensor]
    """All that the optimizer trains."""
    eps: Perturbation
    used: int
    """When the optimizer was last used; ``NEVER`` after another optimizer has taken a step."""
    always: bool
    """Whether every forward pass is to see the noise, in any mode."""

    @property
    def model(self) -> nn.Module | None:
        """The model that the optimizer was made with."""

    def enter(self, slots: list[ModuleParameter], swaps: Swaps, *, noisy: bool) -> Ending | None:
        """Begin a forward pass of modules with these parameters; returns what ends it."""

    def lent(self, p: Tensor) -> bool:
        """Whether a forward pass has seen a parameter's noise since the last step."""


def use(owner: Owner) -> None:
    """Note that an optimizer is in use: where several train a weight, the last one used counts."""
    owner.used = next(_CLOCK)
    while _OPEN:  # Ctrl-C in the very end of a pass
        _OPEN.pop().put_back()
    if owner.model is not None:
        entry = _ENTRIES.get(owner.model)
        if entry is None or entry.active or owner not in entry or not entry.stands:
            install(owner.model, owner)


def register(owner: Owner) -> None:
    """Make the noise of a new optimizer known, and its optimizer the last one used."""
    OWNERS.add(owner)
    _watch_other_optimizers()
    use(owner)


def noise_owners(params: Iterable[Tensor]) -> list[Any]:
    """Those who may put noise on some parameters, the last one used first."""
    wanted = set(params)
    found = [owner for owner in OWNERS if not wanted.isdisjoint(owner.params)]
    return sorted(found, key=lambda owner: -owner.used)


@functools.cache
def _watch_other_optimizers() -> None:
    """End noise where an optimizer that knows nothing of it takes a step on the same weights."""
    register_optimizer_step_post_hook(_after_any_step)


def _after_any_step(optimizer: Optimizer, *_: Any) -> None:
    own = getattr(optimizer, "_weights", None)
    for owner in OWNERS:
        if owner is not own and owner.used != NEVER:
            params = (p for group in optimizer.param_groups for p in group["params"])
            if any(p in owner.params for p in params):
                owner.used = NEVER  # NVRM.step() notes its own use afterwards


class Swaps:
    """Tensors that stand in for parameters during a forward pass.

    Each of the two writes is one call of a C function, which no signal interrupts.
    """

    def __init__(self) -> None:
        self.dicts: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.params: list[Tensor] = []
        self.tensors: list[Tensor] = []
        standing = map(dict.get, self.dicts, self.names)
        # A parameter that forward() itself has replaced stays so.
        ours = map(operator.is_, standing, self.tensors)
        back = itertools.compress(zip(self.dicts, self.names, self.params), ours)  # noqa: B905
        done = itertools.starmap(operator.setitem, back)
        self.put_back: Callable[[], Any] = functools.partial(deque, done, 0)

    def put_in(self, slots: list[ModuleParameter], tensors: list[Tensor]) -> None:
        """Put tensors where parameters stand."""
        dicts: list[Any] = [module._parameters for module, _, _ in slots]
        names = [name for _, name, _ in slots]
        self.dicts.extend(dicts)
        self.names.extend(names)
        self.params.extend(p for _, _, p in slots)
        self.tensors.extend(tensors)
        deque(map(operator.setitem, dicts, names, tensors), 0)


class _Made(NamedTuple):
    """A perturbed tensor, and what it was made of."""

    tensor: Tensor
    mark: tuple[int, int]
    origin: tuple[int, int]


class ForwardNoise:
    """Lends perturbed tensors to a model's training forward passes.

    The parameters hold the clean weights at any time. The perturbed tensors are kept until the
    next step, so that all micro-batches of a step share them.
    """

    keys: tuple[str, ...] = ()
    used = NEVER
    always = False

    def __init__(self, params: Collection[Tensor], model: nn.Module) -> None:
        self.params = params
        self.model = model
        self.eps = NONE
        self.holds: set[object] = set()
        self.passes = 0
        self._made: dict[Tensor, _Made] = {}
        register(self)

    def __getstate__(self) -> dict[str, Any]:
        holds = {"eval"} if self.holds else set()
        kept = {"params": set(self.params), "model": self.model, "eps": self.eps}
        return kept | {"holds": holds, "passes": self.passes, "_made": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_modules" in self.model.__dict__:  # not yet, where it is copied along as an attribute
            register(self)
        else:
            OWNERS.add(self)

    @property
    def held(self) -> bool:
        """Whether somebody asked for clean forward passes."""
        return bool(self.holds)

    @property
    def carried(self) -> Perturbation:
        """The noise of the next training forward pass."""
        return NONE if self.holds else self.eps

    def enter(self, slots: list[ModuleParameter], swaps: Swaps, *, noisy: bool) -> Ending | None:
        """Put perturbed tensors into modules for the time of a pass."""
        if not noisy:
            return None
        swaps.put_in(slots, [self.perturbed(p) for _, _, p in slots])
        self.passes += 1
        return functools.partial(self._leave, slots)

    def _leave(self, slots: list[ModuleParameter], result: Any) -> None:
        for module, name, p in slots:
            if isinstance(module, nn.RNNBase):
                module._update_flat_weights()  # it keeps a list of its weights
            made = self._made.get(p)
            if made is not None and _mark(made.tensor) != made.mark:
                del self._made[p]
                raise RuntimeError(
                    f"forward() wrote to the parameter {name!r} of shape {tuple(p.shape)} while it "
                    "carried noise, and the write is lost; write to it outside of forward(), or "
                    "give it a parameter group with b=0"
                )

    def lent(self, p: Tensor) -> bool:
        """Whether a forward pass has seen a parameter's noise since the last step."""
        return p in self._made

    def perturbed(self, p: Tensor) -> Tensor:
        """A parameter plus its noise; gradients go to the parameter."""
        made = self._made.get(p)
        if made is None or made.origin != _mark(p):
            with torch.inference_mode(False), torch.enable_grad():
                tensor = added_noise(p, self.eps.terms[p])
            made = self._made[p] = _Made(tensor, _mark(tensor), _mark(p))
        return made.tensor

    def forget(self) -> None:
        """Drop the perturbed tensors; the next forward pass makes them again."""
        self._made = {}

    # What an optimizer asks of any kind of noisy weights.

    def hold(self, reason: object) -> None:
        """Keep forward passes clean until every reason to do so is released."""
        self.holds.add(reason)

    def release(self, reason: object) -> None:
        """Let noise back into forward passes, unless there is another reason against it."""
        self.holds.discard(reason)

    def lend(self) -> Perturbation:
        """No-op but for memory: the parameters are clean already."""
        self.forget()
        return NONE

    def take_back(self, lent: Perturbation, eps: Perturbation) -> None:
        """Go on with other noise after an update."""
        if eps is not self.eps:
            self.replace(eps)
            self.passes = 0

    def replace(self, eps: Perturbation) -> None:
        """Go on with other noise."""
        self.eps = eps
        self.forget()

    def accept(self, params: Iterable[Tensor] | None = None) -> None:
        """No-op: the parameters are clean already."""

    def clean_copy(self, p: Tensor) -> Tensor:
        """Copy of a parameter."""
        return p.detach().clone()

    def check_untouched(self) -> None:
        """No-op: parameters may be written to at any time."""

    def saved(self, p: Tensor) -> tuple[Any, ...]:
        """Nothing: the model's own checkpoint has the clean weights."""
        return ()


def _mark(t: Tensor) -> tuple[int, int]:
    """Changes whenever a tensor is written to, or given other memory."""
    return t._version, t.data_ptr()


# Entries: how forward passes are intercepted.

_OPEN: list[Swaps] = []
_GETSTATE = "__getstate__"
_ENTRIES: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()


class _Entry:
    """Wraps the calls of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.owners: list[weakref.ref[Any]] = []
        self.active = False
        compiled = module.__dict__.get("_compiled_call_impl") is not None
        self.name = "_compiled_call_impl" if compiled else "_call_impl"
        self.former: Callable[..., Any] | None = None

    def __contains__(self, owner: object) -> bool:
        return any(ref() is owner for ref in self.owners)

    @property
    def stands(self) -> bool:
        """Whether it is in its module's ``__dict__``."""
        module = self._module()
        return module is not None and module.__dict__.get(self.name) is self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_method(memo, self._module(), self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules that pickle their __dict__ by themselves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting() or torch._C._is_tracing():
            return self.plain(*args, **kwargs)
        return _noisy_pass(self, args, kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as if there were no entry."""
        module: Any = self._module()
        return (self.former or type(module)._call_impl.__get__(module))(*args, **kwargs)

    def put(self) -> None:
        """Stand in a module's ``__dict__``, and remember what stood there."""
        if (module := self._module()) is not None and not self.stands:
            self.former = module.__dict__.get(self.name)
            module.__dict__[self.name] = self
            module.__dict__[_GETSTATE] = _State(self)

    def step_aside(self) -> None:
        """Leave what stood there in place."""
        if (module := self._module()) is not None and self.stands:
            if self.former is None:
                del module.__dict__[self.name]
            else:
                module.__dict__[self.name] = self.former

    def forget(self, ref: weakref.ref[Any]) -> None:
        """End when the last owner has gone."""
        self.owners.remove(ref)
        if not self.owners and not self.active:
            self.end()

    def end(self) -> None:
        """Leave the module as it was found."""
        self.step_aside()
        if (module := self._module()) is not None and _ENTRIES.get(module) is self:
            module.__dict__.pop(_GETSTATE, None)
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
    """The method of a copy, for modules that copy their __dict__ by themselves."""
    return getattr(memo[id(module)], name) if id(module) in memo else None


def install(model: nn.Module, owner: Owner) -> None:
    """Intercept the forward passes of a model and of all its parts, for as long as owner lives."""
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            continue  # it is called by whoever reads the weight, also outside of forward passes
        entry = _ENTRIES.get(module)
        if entry is None:
            entry = _ENTRIES[module] = _Entry(module)
        if owner not in entry:
            entry.owners.append(weakref.ref(owner, entry.forget))
        entry.active = False
        entry.put()


@not_compiled(recursive=False)
def _noisy_pass(entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module with the noise of all optimizers that have some for it."""
    root = entry._module()
    if root is None or entry.active or _symbolic():
        return entry.plain(*args, **kwargs)
    modules = list(root.modules())
    # Modules that this pass calls in turn are called as they are: also by compiled code.
    entries = [_ENTRIES[module] for module in modules if module in _ENTRIES]
    swaps, endings, result = Swaps(), list[Ending](), None
    _OPEN.append(swaps)
    try:
        for inner in entries:
            inner.active = True
            inner.step_aside()
        _begin(entries, modules, swaps, endings)
        result = entry.plain(*args, **kwargs)
        return result
    finally:
        swaps.put_back()
        _OPEN.remove(swaps)
        _end(entries, endings, result)


@not_compiled()
def _begin(
    entries: list[_Entry], modules: list[nn.Module], swaps: Swaps, endings: list[Ending]
) -> None:
    """Let each owner begin the pass, the last one used first."""
    grads = torch.is_grad_enabled() or _in_reentrant_checkpoint()
    # A pass inside of a backward pass repeats an earlier one: gradient checkpointing.
    repeats = torch._C._current_graph_task_id() != -1
    refs = {ref for entry in entries for ref in entry.owners}
    owners = [owner for ref in refs if (owner := ref()) is not None]
    taken: set[Tensor] = set()
    for owner in sorted(owners, key=lambda owner: -owner.used):
        terms = owner.eps.terms
        slots = [
            (module, name, p)
            for module in modules
            for name, p in module._parameters.items()
            if p is not None and p in terms and p not in taken and p.requires_grad
        ]
        lent = repeats and any(owner.lent(p) for _, _, p in slots)
        if not repeats or lent:
            taken.update(owner.params)
        if slots:
            trained = any(module.training for module, _, _ in slots)
            wanted = owner.always or (grads and trained and owner.used != NEVER)
            noisy = lent or (wanted and not owner.held)
            if (end := owner.enter(slots, swaps, noisy=noisy)) is not None:
                endings.append(end)


@not_compiled()
def _end(entries: list[_Entry], endings: list[Ending], result: Any) -> None:
    """Put entries back, and let each owner end the pass; all of them, also if one complains."""
    for entry in reversed(entries):  # the root last: if it is in place, all are
        entry.active = False
        entry.put() if entry.owners else entry.end()
    complaints = []
    for end in reversed(endings):
        try:
            end(result)
        except RuntimeError as error:
            complaints.append(error)
    if complaints:
        raise complaints[0]


def _symbolic() -> bool:
    """Whether a module is called to be traced by fx, or with fake tensors."""
    keys, mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    if mode(keys.PROXY) is not None or mode(keys.FAKE) is not None:
        return True
    tracer = sys.modules.get("torch.fx._symbolic_trace")
    return bool(tracer and tracer._is_fx_tracing_flag)


def _in_reentrant_checkpoint() -> bool:
    """Whether this is the first pass of a reentrant checkpoint, which has gradients off.

    The backward pass repeats it with gradients on.
    """
    code, frame = CheckpointFunction.forward.__code__, sys._getframe()
    while frame.f_code is not code:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True
