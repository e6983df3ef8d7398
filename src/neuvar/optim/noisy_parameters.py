"""Parameters that carry noise in place, and the clean weights behind them.

Noise is added in place by an optimizer created from parameters alone, in replay mode, and to
sharded parameters. In all other cases :mod:`neuvar.optim.forward` adds it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from neuvar.noise import Term, add_noise, bit_patterns, has_noise, pieces, same_bits
from neuvar.optim.forward import (
    NEVER,
    OWNERS,
    REST,
    Ending,
    ForwardNoise,
    ModuleParameter,
    Noise,
    Swaps,
    WeightNoise,
    alive,
    no_transforms,
    noise_owners,
    not_compiled,
)
from neuvar.optim.layout import is_sharded, local, relative_size, reshard, sharding

ONE_BY_ONE = ("cpu",)
"""Devices on which one pass per tensor is faster than two passes for all of them."""


@contextmanager
def held_clean(params: Iterable[Tensor], *, even_if_perturbed: bool = True) -> Iterator[None]:
    """Keep parameters, and forward passes with them, free of noise inside a ``with`` block.

    Args:
        params: the parameters.
        even_if_perturbed: also inside ``optimizer.perturbed()``.
    """
    owners = [o for o in noise_owners(params) if even_if_perturbed or not o.always]
    reason = object()
    try:
        for owner in owners:
            owner.hold(reason)
        yield
    finally:
        for owner in owners:
            owner.release(reason)


def clean_copy(p: Tensor) -> Tensor:
    """Copy of a parameter's clean weights, whichever optimizer trains it."""
    for owner in noise_owners([p]):
        if isinstance(owner, NoisyParameters) and p in owner.carried:
            return owner.peek(p)
    return p.detach().clone()


def as_trained(p: Tensor) -> Tensor:
    """A parameter with the noise of the training forward pass; its gradient flows to ``p``."""
    for owner in noise_owners([p]):
        if isinstance(owner, ForwardNoise) and p in owner.carried:
            with torch.inference_mode(False), torch.enable_grad():
                return owner.perturbed(p).tensor if owner.used != NEVER else p
    return p


def end_other_noise(params: Iterable[Tensor], own: object) -> None:
    """Remove the noise of other optimizers from parameters permanently."""
    for other in alive(OWNERS):
        noisy = other is not own and isinstance(other, NoisyParameters) and other.noisy
        if noisy and not other.eps.keys().isdisjoint(params):
            reason = object()
            other.hold(reason)
            other.eps = {}
            other.release(reason)


def write_noise(
    eps: Noise,
    *,
    clean: Callable[[Tensor], Tensor] = local,
    factor: int = 1,
    sizes: Mapping[Tensor, Tensor | None] | None = None,
) -> None:
    """Set each parameter to its clean weights plus its noise."""
    launches: dict[float, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for p, term in eps.items():
        live, base, size = local(p), clean(p), sizes[p] if sizes else None
        many = term.draw.sampler == "fresh" or size is not None
        contiguous = live.is_contiguous() and base.is_contiguous()
        if live.device.type in ONE_BY_ONE or many or not contiguous:
            add_noise(base, term, out=live, factor=factor, size=size)
            continue
        parts = launches.setdefault(factor * term.draw.sign * term.b, [])
        for low, high, z in pieces(term.slot, term.draw, live.device):
            parts.append((live.view(-1)[low:high], base.view(-1)[low:high], z))
    for scale, parts in launches.items():  # few launches for many tensors
        lives, bases, zs = zip(*parts, strict=True)
        torch._foreach_copy_(lives, bases)
        torch._foreach_add_(lives, zs, alpha=scale)


class Exact:
    """Keeps the clean weights to the bit, in a buffer for each perturbed parameter."""

    keys: tuple[str, ...] = ("clean",)
    """Names of what a checkpoint holds for each parameter."""
    survives = True
    """Whether the clean weights survive an interruption in the middle of a write."""

    def __init__(self) -> None:
        self._buffers: dict[Tensor, Tensor] = {}
        self._swapped: dict[Tensor, Tensor] = {}
        self.sizes: dict[Tensor, Tensor | None] = {}

    def remove(self, eps: Noise) -> None:
        """Restore the clean weights."""
        for p in eps.keys() & self._buffers.keys():  # others were not perturbed yet
            local(p).copy_(self._buffer(p))

    def prepare(self, eps: Noise, *, updated: Noise) -> None:
        """Fill the buffers before noise is written; those of ``updated`` hold the clean weights."""
        if eps.keys() == updated.keys() == self._buffers.keys():
            return  # as in most steps
        for p in updated.keys() - eps.keys():  # frozen now, or b is 0
            local(p).copy_(self._buffer(p))
        for p in self._buffers.keys() - eps.keys():
            del self._buffers[p]
        for p in eps.keys() - updated.keys():
            if p in self._buffers:
                self._buffer(p).copy_(local(p))
            else:
                self._buffers[p] = p.detach().clone()

    def write(self, eps: Noise) -> None:
        """Perturb the weights."""
        # The size of sharded weights needs all processes, and all of them call this method.
        for p, term in eps.items():
            self.sizes[p] = relative_size(p, self._buffer(p), term.draw.relative_to)
        write_noise(eps, clean=self._buffer, sizes=self.sizes)

    def begin_update(self, eps: Noise) -> None:
        """Let the inner optimizer update the clean weights."""
        # It works on the buffer itself, which saves two copies. After the step, each parameter has
        # its old memory again.
        try:
            for p in eps:
                if is_sharded(p):
                    local(p).copy_(self._buffer(p))
                else:
                    self._swapped[p] = p.data
                    p.data = self._buffers[p]
        except BaseException:
            for p in list(self._swapped):
                p.data = self._swapped.pop(p)
            raise

    def end_update(self, eps: Noise) -> None:
        """Store the updated weights in the buffers."""
        for p in eps:
            if (live := self._swapped.pop(p, None)) is not None:
                if p.data_ptr() != self._buffers[p].data_ptr():  # an optimizer that rebinds data
                    self._buffers[p].copy_(p.data)
                p.data = live
            elif is_sharded(p):
                self._buffer(p).copy_(local(p))

    def clean(self, p: Tensor, term: Term) -> Tensor:
        """Copy the clean weights of a perturbed parameter."""
        return self._buffers[p].clone()

    def untouched(self, p: Tensor, term: Term) -> bool:
        """Whether a perturbed parameter still has the values that were written."""
        self._buffers[p] = self._buffers[p].to(p.device)  # a model may be moved while perturbed
        same_type = self._buffers[p].dtype == p.dtype
        buffer = local(self._buffers[p])
        return same_type and has_noise(local(p), buffer, term, self.sizes.get(p))

    def saved(self, p: Tensor, term: Term | None) -> tuple[Any, ...]:
        """The values for ``keys``; ``term`` is the noise that the parameter carries now."""
        # Not the parameter: noise may be added to it before the state is on disk.
        if term is None:
            self._buffer(p).copy_(local(p))
        return (self._buffers[p],)

    def recognize(self, p: Tensor, weights: Tensor, saved: Sequence[Any], term: Term) -> str | None:
        """Whether weights are the saved "noisy" or "clean" ones, or neither (None)."""
        clean = local(saved[0]).to(weights)
        if clean.shape != weights.shape:
            return None
        if has_noise(weights, clean, term):
            return "noisy"
        return "clean" if same_bits(weights, clean) else None

    def load_clean(self, p: Tensor, saved: Sequence[Any], term: Term) -> None:
        """Remove the noise of weights that were recognized as noisy."""
        local(p).copy_(local(saved[0]))

    def load_noisy(self, p: Tensor, saved: Sequence[Any], term: Term, *, noisy: bool) -> None:
        """Add the noise to weights that were recognized, unless they have it already."""
        self._buffer(p).copy_(local(saved[0]))
        self.write({p: term})

    def _buffer(self, p: Tensor) -> Tensor:
        buffer = self._buffers.get(p)
        if buffer is None or (buffer.dtype, buffer.device) != (p.dtype, p.device):
            buffer = self._buffers[p] = torch.empty_like(p.detach())
        return local(buffer)


class Replay(Exact):
    """Keeps no buffer and subtracts the noise again, with a rounding error."""

    keys = ("clean_bits", "noisy_bits")
    survives = False

    def __init__(self) -> None:
        self._loaded: dict[Tensor, int] = {}  # fingerprints of weights after loading a checkpoint
        self.sizes = {}

    def remove(self, eps: Noise) -> None:
        self._loaded.clear()
        write_noise(eps, factor=-1)

    def prepare(self, eps: Noise, *, updated: Noise) -> None:
        """No-op: this mode has no buffer."""

    def write(self, eps: Noise) -> None:
        write_noise(eps)

    def begin_update(self, eps: Noise) -> None:
        self.remove(eps)

    def end_update(self, eps: Noise) -> None:
        """No-op: the parameters themselves were updated."""

    def clean(self, p: Tensor, term: Term) -> Tensor:
        # Rounds the parameter as a run resumed from the copy would.
        self.remove({p: term})
        copy = p.detach().clone()
        self.write({p: term})
        return copy

    def untouched(self, p: Tensor, term: Term) -> bool:
        # Needed only right after loading: torch's set_state_dict loads the optimizer's state, then
        # writes the same weights into the model again.
        return self._loaded.get(p) == int(_sum_of_bits(local(p)))

    def saved(self, p: Tensor, term: Term | None) -> tuple[Any, ...]:
        weights = local(p)
        noisy = _fingerprint(p, weights)
        if term is None:
            return noisy, noisy
        clean = add_noise(weights, term, out=torch.empty_like(weights), factor=-1)
        return _fingerprint(p, clean), noisy

    def recognize(self, p: Tensor, weights: Tensor, saved: Sequence[Any], term: Term) -> str | None:
        clean, noisy = saved
        return {noisy: "noisy", clean: "clean"}.get(_fingerprint(p, weights))

    def load_clean(self, p: Tensor, saved: Sequence[Any], term: Term) -> None:
        self.remove({p: term})

    def load_noisy(self, p: Tensor, saved: Sequence[Any], term: Term, *, noisy: bool) -> None:
        if not noisy:
            self.write({p: term})
        self._loaded[p] = int(_sum_of_bits(local(p)))


MODES: dict[str, type[Exact]] = {"exact": Exact, "replay": Replay}


def _sum_of_bits(weights: Tensor) -> Tensor:
    return bit_patterns(weights.contiguous()).sum(dtype=torch.int64)


def _fingerprint(p: Tensor, weights: Tensor) -> int:
    """Sum of the bit patterns of a parameter's weights, the same for any sharding."""
    total = _sum_of_bits(weights)
    if is_sharded(p):
        mesh, placements = sharding(p)
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return int(total)


class NoisyParameters(WeightNoise):
    """Adds noise to parameters in place and removes it, and detects writes by others.

    Args:
        params: all parameters of the optimizer.
        mode: how the clean weights are restored.
        model: with it, noise is added in a training forward pass and removed in the next step.
            Without it, noise is on all the time between steps.
    """

    def __init__(self, params: Set[Tensor], mode: Exact, model: nn.Module | None = None) -> None:
        super().__init__(params, model)
        self.mode = mode
        self.keys = mode.keys if model is None else ()
        self.noisy = False
        self.holds = set() if model is None else {REST}
        self._updating: Noise = {}
        self._torn = False
        self._marks: dict[Tensor, tuple[int, int]] = {}
        self._suspended: dict[Tensor, Tensor] = {}
        self._hooks: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        if self.noisy and self.eps and not self.mode.survives:
            raise RuntimeError(
                "in replay mode an optimizer can be copied or pickled only inside "
                "`with optimizer.denoised():`"
            )
        dropped: dict[str, Any] = {"_marks": {}, "_hooks": [], "_suspended": {}}
        kept = {k: v for k, v in self.__dict__.items() if k != "used"}
        return kept | super().__getstate__() | dropped

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.noisy:
            # The model may have been copied along with its optimizer, at clean weights.
            with torch.no_grad():
                self.mode.write(self.eps)
            self._mark_all()

    def __del__(self) -> None:
        # The model may outlive its optimizer, and must then be clean.
        if self.__dict__.get("noisy") and not self._torn and not sys.is_finalizing():
            self._end_hooks()
            # Garbage collection runs at any time, for example while torch.compile traces.
            with _disable_current_modes(), no_transforms(), torch.inference_mode(False):
                unchanged = {p: term for p, term in self.eps.items() if not self._changed(p)}
                with torch.no_grad():
                    self.mode.remove(unchanged)
            self.noisy = False

    @property
    def carried(self) -> Noise:
        return self.eps if self.noisy else {}

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Write to weights; in replay mode, the next call detects an interruption."""
        self._marks = {}
        self._torn = not self.mode.survives
        with torch.no_grad():
            yield
        self._torn = False

    def hold(self, reason: object, *, thorough: bool = True) -> None:
        self.check_untouched(thorough=thorough)
        if self.noisy:
            with self._writing():
                self.mode.remove(self.eps)
            self.noisy = False
            self._end_hooks()
            reshard(self.eps)
        self.holds.add(reason)

    def release(self, reason: object) -> None:
        if reason in self.holds:
            self.holds.remove(reason)
            self._apply()

    def _apply(self, *, updated: Noise | None = None) -> None:
        """Add the noise to clean weights, unless they are held."""
        if self.holds:
            return
        end_other_noise(self.eps, self)
        with torch.no_grad():
            self.mode.prepare(self.eps, updated=updated or {})
        self.noisy = True
        with self._writing():
            self.mode.write(self.eps)
        self._mark_all()

    def begin_update(self) -> None:
        # Writes through .data change the values, but not the version. Comparing values is slow, so
        # it is done at power-of-two draws.
        draws = max((term.draw.number for term in self.carried.values()), default=0)
        self.check_untouched(thorough=draws.bit_count() == 1)
        if self.model is not None:
            self.hold(REST, thorough=False)
        self._updating = self.carried
        with self._writing():
            self.mode.begin_update(self._updating)

    @not_compiled()
    def end_update(self, eps: Noise | None) -> None:
        updated, self._updating = self._updating, {}
        with torch.no_grad():
            self.mode.end_update(updated)
        if eps is not None:
            self.eps, self.passes = eps, 0
        self._apply(updated=updated)

    def replace(self, eps: Noise) -> None:
        reason = object()
        self.hold(reason, thorough=False)
        self.eps = eps
        self.release(reason)

    def accept(self, params: Iterable[Tensor] | None = None) -> None:
        chosen = set(filter(self._changed, self.carried) if params is None else params)
        with self._writing():
            self.mode.remove({p: term for p, term in self.carried.items() if p not in chosen})
        self.noisy = False
        self._apply()

    def clean_copy(self, p: Tensor) -> Tensor:
        if p not in self.carried:
            return p.detach().clone()
        self._refuse_if_changed(p)
        with torch.no_grad():
            copy = self.mode.clean(p, self.eps[p])
        if p in self._marks:
            self._marks[p] = _mark(p)
        return copy

    def peek(self, p: Tensor) -> Tensor:
        """As :meth:`clean_copy`, without a write to the parameter that autograd would detect."""
        if self.mode.survives:
            return self.clean_copy(p)
        with torch.no_grad():
            copy = p.detach().clone()
            add_noise(local(p), self.eps[p], out=local(copy), factor=-1)
        return copy

    def size(self, p: Tensor) -> Tensor | None:
        return self.mode.sizes.get(p)

    # Forward passes of a known model.

    def in_use(self, p: Tensor) -> bool:
        return self.noisy

    def enter(
        self, slots: list[ModuleParameter], swaps: Swaps, *, wanted: bool, repeats: bool
    ) -> Ending | None:
        """Add the noise for a training pass; remove it during any other pass."""
        if repeats or (wanted and not self.held):
            brief = self.always and not self.noisy
            self.release(REST)
            if brief:
                return lambda result: self.hold(REST, thorough=False)
            self._begin_hooks()
            self.passes += 1
            return None
        if not self.noisy or self._suspended:
            return None
        self._suspend()
        return self._resume

    def _suspend(self) -> None:
        """Put clean weights in place for a pass; a pending backward pass is not affected."""
        try:
            with torch.no_grad():
                for p in self.eps:
                    clean = self.peek(p)
                    if is_sharded(p):
                        self._suspended[p] = local(p).clone()
                        local(p).copy_(local(clean))
                    else:
                        self._suspended[p], p.data = p.data, clean
        except BaseException:
            self._resume(None)
            raise
        reshard(self.eps)

    def _resume(self, result: Any) -> None:
        for output in tree_leaves(result):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(_refuse_backward)
        with torch.no_grad():
            for p in list(self._suspended):
                noisy = self._suspended.pop(p)
                if is_sharded(p):
                    local(p).copy_(noisy)
                else:
                    p.data = noisy
        self._mark_all()

    def _begin_hooks(self) -> None:
        """Make the model's ``state_dict()`` return clean weights until the noise is removed."""
        if self.model is None or self._hooks:
            return
        hook = _CleanState(self)
        modules = self.model.modules()
        self._hooks = [module.register_state_dict_post_hook(hook) for module in modules]

    def clean_state(self, state: dict[str, Any], prefix: str) -> None:
        live = {local(p).data_ptr(): p for p in self.carried if local(p).numel()}
        for key, value in state.items():
            if isinstance(value, Tensor) and not value.requires_grad and key.startswith(prefix):
                p = live.get(local(value).data_ptr())
                if p is not None and p.shape == value.shape:
                    state[key] = self.peek(p)

    def _end_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # Writes by others.

    def check_untouched(self, *, thorough: bool = True) -> None:
        """Raise an error if anything else has changed perturbed weights.

        Compares the version counters; if thorough, also the values where they are known.
        """
        if self._torn:
            raise RuntimeError(
                "an earlier call was interrupted while noise was added or removed, which "
                "mode='replay' cannot repair; load the model and the optimizer from a checkpoint"
            )
        if not thorough and all(mark == _mark(p) for p, mark in self._marks.items()):
            return
        for p in self.carried:
            self._refuse_if_changed(p, thorough=thorough)

    def _refuse_if_changed(self, p: Tensor, *, thorough: bool = False) -> None:
        if self._changed(p, thorough=thorough):
            raise RuntimeError(
                f"parameter {self.eps[p].slot.number} of shape {tuple(p.shape)} was changed "
                "while it carried noise; change weights inside `with optimizer.denoised():`, or "
                "create the optimizer with the model. If it now holds the clean weights that you "
                "want, call optimizer.accept_weights()"
            )

    def _changed(self, p: Tensor, *, thorough: bool = True) -> bool:
        if p not in self._marks:
            return False  # a write was interrupted; the mode can restore the clean weights
        look = self._marks[p] != _mark(p) or (thorough and self.mode.survives)
        return look and not self.mode.untouched(p, self.eps[p])

    def _mark_all(self) -> None:
        """Record the state of the weights, to detect writes by others."""
        self._marks = {p: _mark(p) for p in self.eps}
        reshard(self.eps)

    # Checkpoints of parameters that carry noise between steps.

    def saved(self, p: Tensor) -> tuple[Any, ...]:
        if not self.keys:
            return ()
        with torch.no_grad():
            return self.mode.saved(p, self.carried.get(p))

    def recognize(
        self, p: Tensor, saved: Sequence[Any], term: Term, others: Iterable[Term] = ()
    ) -> str | None:
        """Whether a parameter holds the "noisy" or the "clean" weights of a checkpoint.

        Noisy means clean + ``term`` or clean + one of ``others``. Anything else raises
        ``ValueError``, or gives None while the weights are held clean.
        """
        with torch.no_grad():
            kind = self.mode.recognize(p, local(p), saved, term)
            for other in others:
                kind = kind or self.mode.recognize(p, local(p), saved, other)
        if kind is None and not self.holds:
            raise ValueError(
                f"parameter {term.slot.number} of shape {tuple(p.shape)} holds neither the clean "
                "nor the perturbed weights that this state was saved with; load the model's "
                "weights before the optimizer's. An optimizer created with the model takes any "
                "order"
            )
        return kind

    def load(
        self,
        saved: Mapping[Tensor, Sequence[Any]],
        kinds: Mapping[Tensor, str | None],
        *,
        before: Noise,
        after: Noise,
    ) -> None:
        """Load a checkpoint; weights recognized as noisy carry ``before``."""
        noisy = {p for p, kind in kinds.items() if kind == "noisy"}
        with torch.no_grad():
            for p in self.carried.keys() - noisy:
                if self._marks.get(p) == _mark(p):  # it still holds our noise
                    self.mode.remove({p: self.eps[p]})
            if self.holds or before != after:
                for p in noisy:
                    self.mode.load_clean(p, saved[p], before[p])
                noisy = set()
            self.eps, self.noisy = after, not self.holds
            for p, term in self.carried.items():
                self.mode.load_noisy(p, saved[p], term, noisy=p in noisy)
        self._torn = False
        self._mark_all()


class _CleanState:
    """Hook for ``state_dict()`` that replaces perturbed weights; it refuses to be copied."""

    def __init__(self, weights: NoisyParameters) -> None:
        self._weights = weakref.ref(weights)

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        if (weights := self._weights()) is not None:
            weights.clean_state(state, prefix)

    def __reduce__(self) -> Any:  # called by pickle and copy
        raise RuntimeError(
            "the model cannot be copied or pickled between a training pass and step(): its "
            "parameters hold noise, because they are sharded or mode='replay' is used; copy it "
            "after step() or inside optimizer.denoised(), or save its state_dict()"
        )


def _refuse_backward(gradient: Tensor) -> None:
    raise RuntimeError(
        "backward() through an evaluation pass that was made between a training pass and its "
        "step(), while the weights carry noise in place; make the evaluation pass after step()"
    )


def make_weight_noise(params: Sequence[Tensor], mode: str, model: nn.Module | None) -> WeightNoise:
    """The noise of an optimizer: in forward passes where possible, in place otherwise.

    Noise is in place for sharded parameters, which FSDP2 gathers from their own memory, and in
    replay mode, which allocates no perturbed tensors.
    """
    if model is None or mode != "exact" or any(map(is_sharded, params)):
        return NoisyParameters(set(params), MODES[mode](), model)
    return ForwardNoise(set(params), model)


def _mark(p: Tensor) -> tuple[int, int]:
    """Version and address: every write that autograd tracks changes them."""
    # A sharded parameter counts writes; its shard does not.
    return p._version, (local(p) if is_sharded(p) else p).data_ptr()
