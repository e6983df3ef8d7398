"""Noise inside the forward passes of a model, so that its parameters stay clean.

``Module.__call__`` runs ``self._call_impl``, or ``self._compiled_call_impl`` after
``Module.compile()``. An entry in the instance's ``__dict__`` takes the place of that method and
wraps it. Unlike forward hooks, an entry survives Ctrl-C, does not get into copies, pickles and
scripted modules, and costs nothing in the modules that a forward pass calls in turn.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch._compile
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from neuvar.optim.perturbation import NONE, Perturbation, added_noise

ModuleParameter = tuple[nn.Module, str, Tensor]
"""A module, the name of one of its parameters, and the parameter."""

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(*, recursive: bool = True) -> Callable[[F], F]:
    """Keep torch.compile out of a function, as torch.compiler.disable does.

    torch._dynamo, whose import takes seconds, is imported at the first call only.
    """
    disable: Any = torch._compile._disable_dynamo
    return disable(recursive=recursive)  # type: ignore[no-any-return]


NEVER = -1
_CLOCK = itertools.count()

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

    def enter(self, slots: list[ModuleParameter], *, training: bool) -> Callable[[], None] | None:
        """Begin a forward pass of modules with these parameters; returns what ends it."""


def use(owner: Owner) -> None:
    """Note that an optimizer is in use: where several train a weight, the last one used counts."""
    owner.used = next(_CLOCK)


def register(owner: Owner) -> None:
    """Make the noise of a new optimizer known, and its optimizer the last one used."""
    use(owner)
    OWNERS.add(owner)
    _watch_other_optimizers()


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


class _Made(NamedTuple):
    """A perturbed tensor, and what it was made of."""

    tensor: Tensor
    version: int
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
        install(model, self)

    def __getstate__(self) -> dict[str, Any]:
        holds = {"eval"} if self.holds else set()
        kept = {"params": set(self.params), "model": self.model, "eps": self.eps}
        return kept | {"holds": holds, "passes": self.passes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._made = {}
        register(self)
        install(self.model, self)

    @property
    def held(self) -> bool:
        """Whether somebody asked for clean forward passes."""
        return bool(self.holds)

    @property
    def carried(self) -> Perturbation:
        """The noise of the next training forward pass."""
        return NONE if self.holds else self.eps

    def enter(self, slots: list[ModuleParameter], *, training: bool) -> Callable[[], None] | None:
        """Put perturbed tensors into modules; returns what puts the parameters back."""
        if not training or self.holds:
            return None
        swapped: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        try:
            for module, name, p in slots:
                swapped.append((module, name, p, self.perturbed(p)))
                module._parameters[name] = swapped[-1][-1]  # type: ignore[assignment]
        except BaseException:
            _put_back(swapped)
            raise
        self.passes += 1
        return partial(self._leave, swapped)

    def _leave(self, swapped: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
        _put_back(swapped)
        for _, name, p, noisy in swapped:
            made = self._made.get(p)
            if made is not None and made.tensor is noisy and noisy._version != made.version:
                del self._made[p]
                raise RuntimeError(
                    f"forward() wrote to the parameter {name!r} of shape {tuple(p.shape)} while it "
                    "carried noise, and the write is lost; write to it outside of forward(), or "
                    "give it a parameter group with b=0"
                )

    def perturbed(self, p: Tensor) -> Tensor:
        """A parameter plus its noise; gradients go to the parameter."""
        origin = p._version, p.data_ptr()
        made = self._made.get(p)
        if made is None or made.origin != origin:
            tensor = added_noise(p, self.eps.terms[p])
            made = self._made[p] = _Made(tensor, tensor._version, origin)
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


def _put_back(swapped: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Put parameters back where their perturbed tensors stand."""
    for module, name, p, noisy in swapped:
        if module._parameters.get(name) is noisy:
            module._parameters[name] = p  # type: ignore[assignment]


# Entries: how forward passes are intercepted.

_ENTRIES: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()


class _Entry:
    """Takes the place of a module's ``_call_impl`` and wraps it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.former = module.__dict__.get(name)
        self.owners: list[weakref.ref[Any]] = []
        module.__dict__[name] = self

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        # In copies and pickles of the module stands what the entry has replaced.
        if self.name == "_call_impl" and self.former is None:
            return getattr, (self.module, self.name)
        return _same, (self.former,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting() or torch._C._is_tracing():
            return self.plain(*args, **kwargs)
        return _noisy_pass(self, args, kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as if there were no entry."""
        module = self.module
        call = self.former or types.MethodType(type(module)._call_impl, module)
        return call(*args, **kwargs)


def _same(value: Any) -> Any:
    return value


@not_compiled(recursive=False)
def _noisy_pass(entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module with the noise of all optimizers that have some for it."""
    root = entry.module
    modules = list(root.modules())
    # Modules that this pass calls in turn are called as they are: also by compiled code.
    taken = [(m, _ENTRIES[m]) for m in modules if m in _ENTRIES]
    endings: list[Callable[[], None]] = []
    try:
        for module, inner in taken:
            module.__dict__.pop(inner.name, None)
        _begin([inner for _, inner in taken], modules, args, endings)
        return entry.plain(*args, **kwargs)
    finally:
        for module, inner in taken:
            if inner.owners:
                module.__dict__.setdefault(inner.name, inner)
        _end(endings)


@not_compiled()
def _begin(
    entries: list[_Entry],
    modules: list[nn.Module],
    args: tuple[Any, ...],
    endings: list[Callable[[], None]],
) -> None:
    """Let each owner begin the pass, the last one used first; endings go into ``endings``."""
    taken: set[Tensor] = set()
    grads = torch.is_grad_enabled() or _recomputed_later(args)
    refs = {ref for entry in entries for ref in entry.owners}
    owners = [owner for ref in refs if (owner := ref()) is not None]
    for owner in sorted(owners, key=lambda owner: -owner.used):
        terms = owner.eps.terms
        slots = [
            (module, name, p)
            for module in modules
            for name, p in module._parameters.items()
            if p is not None and p in terms and p not in taken and p.requires_grad
        ]
        taken.update(owner.params)
        if not slots:
            continue
        wanted = grads and owner.used != NEVER and any(m.training for m, _, _ in slots)
        training = owner.always or wanted
        if (end := owner.enter(slots, training=training)) is not None:
            endings.append(end)


@not_compiled()
def _end(endings: list[Callable[[], None]]) -> None:
    for end in reversed(endings):
        end()


def _recomputed_later(args: tuple[Any, ...]) -> bool:
    """Whether a pass without gradients is the first one of a reentrant checkpoint.

    That one passes inputs which require gradients; the backward pass repeats it with gradients on.
    """
    return any(isinstance(x, Tensor) and x.requires_grad for x in args)


def install(model: nn.Module, owner: Any) -> None:
    """Intercept the forward passes of a model and of all its parts, for as long as owner lives."""
    for module in model.modules():
        entry = _ENTRIES.get(module)
        if entry is None:
            compiled = module.__dict__.get("_compiled_call_impl") is not None
            name = "_compiled_call_impl" if compiled else "_call_impl"
            entry = _ENTRIES[module] = _Entry(module, name)
        if not any(ref() is owner for ref in entry.owners):
            entry.owners.append(weakref.ref(owner, _uninstall(entry)))


def _uninstall(entry: _Entry) -> Callable[[Any], None]:
    def remove(ref: Any) -> None:
        entry.owners.remove(ref)
        module = entry._module()
        if entry.owners or module is None:
            return
        _ENTRIES.pop(module, None)
        if module.__dict__.get(entry.name) is entry:
            if entry.former is None:
                del module.__dict__[entry.name]
            else:
                module.__dict__[entry.name] = entry.former

    return remove
