"""Parameters that carry noise in place: which, whether it is on, and what keeps it off."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from neuvar.optim import forward
from neuvar.optim.forward import NEVER, Ending, ModuleParameter, Swaps, noise_owners
from neuvar.optim.keeping import Exact, Keeping
from neuvar.optim.layout import is_sharded, local, reshard
from neuvar.optim.perturbation import NONE, Perturbation

REST = "rest"
"""The reason why the weights of a known model are clean outside of its training passes."""


@contextmanager
def held_clean(params: Iterable[Tensor]) -> Iterator[None]:
    """Keep parameters, and forward passes with them, free of noise inside a ``with`` block."""
    owners = noise_owners(params)
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
        if isinstance(owner, NoisyWeights) and p in owner.carried.terms:
            return owner.peek(p)
    return p.detach().clone()


def as_trained(p: Tensor) -> Tensor:
    """A parameter with the noise that a training forward pass sees; its gradient goes to ``p``."""
    for owner in noise_owners([p]):
        if isinstance(owner, forward.ForwardNoise) and p in owner.carried.terms:
            return owner.perturbed(p) if owner.used != NEVER else p
    return p


def end_other_noise(params: Iterable[Tensor], own: object) -> None:
    """Take the noise of other optimizers off parameters, for good."""
    others = [owner for owner in forward.OWNERS if owner is not own]
    for other in others:
        noisy = isinstance(other, NoisyWeights) and other.noisy
        if noisy and not other.eps.terms.keys().isdisjoint(params):
            reason = object()
            other.hold(reason)
            other.eps = NONE
            other.release(reason)


class NoisyWeights:
    """Puts noise on parameters and takes it off, and notices if somebody else writes to them.

    Args:
        params: all that the optimizer trains.
        keep: how the clean weights are restored.
        model: with it, noise comes on in a training forward pass and goes off in the next step.
            Without it, noise is on all the time between steps.
    """

    used = NEVER
    always = False

    def __init__(
        self, params: Collection[Tensor], keep: Keeping, model: nn.Module | None = None
    ) -> None:
        self.params = params
        self.keep = keep
        self.model = model
        self.eps = NONE
        self.noisy = False
        self.passes = 0
        self.holds: set[object] = set() if model is None else {REST}
        self._torn = False
        self._written: dict[Tensor, tuple[int, int]] = {}
        self._set_aside: dict[Tensor, Tensor] = {}
        self._hooks: list[Any] = []
        forward.register(self)

    def __getstate__(self) -> dict[str, Any]:
        if self.noisy and self.eps.terms and not self.keep.survives:
            raise RuntimeError(
                "in replay mode an optimizer can be copied or pickled only inside "
                "`with optimizer.denoised():`"
            )
        # Those who hold the weights clean now will not release the copy: it begins in eval mode.
        holds = ({"eval"} if self.held else set()) | (self.holds & {REST})
        dropped: dict[str, Any] = {"_written": {}, "_hooks": [], "_set_aside": {}}
        dropped["params"] = set(self.params)
        return {k: v for k, v in self.__dict__.items() if k != "used"} | {"holds": holds} | dropped

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.model is None or "_modules" in self.model.__dict__:
            forward.register(self)
        else:  # it is copied along as an attribute of the model, which is not complete yet
            forward.OWNERS.add(self)
        if self.noisy:
            # A model that was copied along may have been copied clean.
            with torch.no_grad():
                self.keep.write(self.eps)
            self._remember()

    def __del__(self) -> None:
        # The model outlives its optimizer, and shall be clean.
        if self.__dict__.get("noisy") and not self._torn and not sys.is_finalizing():
            self._end_hooks()
            unchanged = {p: t for p, t in self.eps.terms.items() if not self._changed(p)}
            with torch.no_grad():
                self.keep.remove(Perturbation(unchanged))
            self.noisy = False

    @property
    def held(self) -> bool:
        """Whether somebody asked for clean weights, beyond the time between training passes."""
        return bool(self.holds - {REST})

    @property
    def carried(self) -> Perturbation:
        """The noise that is on the parameters now."""
        return self.eps if self.noisy else NONE

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Write to weights in a way that an interruption leaves in order, or on record."""
        self._written = {}  # how they are meanwhile does not count
        self._torn = not self.keep.survives
        with torch.no_grad():
            yield
        self._torn = False

    def hold(self, reason: object, *, thorough: bool = True) -> None:
        """Keep the weights clean until every reason to do so is released."""
        self.check_untouched(thorough=thorough)
        if self.noisy:
            with self._writing():
                self.keep.remove(self.eps)
            self.noisy = False
            self._end_hooks()
            reshard(self.eps.terms)
        self.holds.add(reason)

    def release(self, reason: object) -> None:
        """Let the noise back on, unless there is another reason against it."""
        if reason in self.holds:
            self.holds.remove(reason)
            self.apply()

    def apply(self, *, updated: Perturbation = NONE) -> None:
        """Put the noise on clean weights, unless they are held."""
        if self.holds:
            return
        end_other_noise(self.eps.terms, self)
        with torch.no_grad():
            self.keep.prepare(self.eps, updated=updated)
        self.noisy = True
        with self._writing():
            self.keep.write(self.eps)
        self._remember()

    def lend(self) -> Perturbation:
        """Show the clean weights to the inner optimizer; returns what ``take_back`` needs."""
        # Writes that leave no trace are looked for in full at power-of-two draws only.
        draws = max((term.draw.number for term in self.carried.terms.values()), default=0)
        self.check_untouched(thorough=draws.bit_count() == 1)
        if self.model is not None:
            self.hold(REST, thorough=False)
        lent = self.carried
        with self._writing():
            self.keep.lend(lent)
        return lent

    def take_back(self, lent: Perturbation, eps: Perturbation) -> None:
        """Perturb the updated weights."""
        with torch.no_grad():
            self.keep.take_back(lent)
        if eps is not self.eps:
            self.eps, self.passes = eps, 0
        self.apply(updated=lent)

    def replace(self, eps: Perturbation) -> None:
        """Take the present noise off and put another on."""
        reason = object()
        self.hold(reason, thorough=False)
        self.eps = eps
        self.release(reason)

    def accept(self, params: Iterable[Tensor] | None = None) -> None:
        """Take weights as they stand for clean: those given, or those found changed."""
        eps = self.carried
        chosen = set(filter(self._changed, eps.terms) if params is None else params)
        rest = Perturbation({p: term for p, term in eps.terms.items() if p not in chosen})
        with self._writing():
            self.keep.remove(rest)
        self.noisy = False
        self.apply()

    def clean_copy(self, p: Tensor) -> Tensor:
        """Copy of the clean weights of a parameter, perturbed or not."""
        if p not in self.carried.terms:
            return p.detach().clone()
        self._refuse_if_changed(p)
        with torch.no_grad():
            found = self.keep.clean(p, self.eps)
        if p in self._written:
            self._written[p] = _mark(p)
        return found

    def peek(self, p: Tensor) -> Tensor:
        """As :meth:`clean_copy`, without a write to the parameter that autograd would notice."""
        if self.keep.survives:
            return self.clean_copy(p)
        with torch.no_grad():
            found = p.detach().clone()
            local(found).copy_(self.eps.result(p, local(p), factor=-1))
        return found

    # Forward passes of a known model.

    def lent(self, p: Tensor) -> bool:
        """Whether a parameter carries noise since a forward pass."""
        return self.noisy

    def enter(self, slots: list[ModuleParameter], swaps: Swaps, *, noisy: bool) -> Ending | None:
        """Put the noise on for a training pass; take it off while another pass runs."""
        if noisy and self.always and not self.noisy:
            self.release(REST)
            return lambda result: self.hold(REST, thorough=False)
        if noisy:
            self.release(REST)
            self._begin_hooks()
            self.passes += 1
            return None
        if not self.noisy or self._set_aside:
            return None
        self._suspend()
        return self._resume

    def _suspend(self) -> None:
        """Show clean weights for a while, in a way that a pending backward pass does not notice."""
        with torch.no_grad():
            for p in self.eps.terms:
                clean = self.peek(p)
                if is_sharded(p):
                    self._set_aside[p] = local(p).clone()
                    local(p).copy_(local(clean))
                else:
                    self._set_aside[p], p.data = p.data, clean
        reshard(self.eps.terms)

    def _resume(self, result: Any) -> None:
        for output in tree_leaves(result):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(_refuse_backward)
        with torch.no_grad():
            for p in list(self._set_aside):
                noisy = self._set_aside.pop(p)
                if is_sharded(p):
                    local(p).copy_(noisy)
                else:
                    p.data = noisy
        self._remember()

    def _begin_hooks(self) -> None:
        """Let the model's ``state_dict()`` give clean weights until the noise is off."""
        if self.model is None or self._hooks:
            return
        ref = weakref.ref(self)

        def clean_state(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            if (weights := ref()) is not None:
                weights._clean_state(state, prefix)

        modules = self.model.modules()
        self._hooks = [module.register_state_dict_post_hook(clean_state) for module in modules]

    def _clean_state(self, state: dict[str, Any], prefix: str) -> None:
        live = {local(p).data_ptr(): p for p in self.carried.terms if local(p).numel()}
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
        """Refuse to go on if somebody else changed perturbed weights.

        The version counter tells; if thorough, so do the values, where they are known.
        """
        if self._torn:
            raise RuntimeError(
                "an earlier call was interrupted while noise was put on or taken off, which "
                "mode='replay' cannot mend; load the model and the optimizer from a checkpoint"
            )
        if not thorough and all(mark == _mark(p) for p, mark in self._written.items()):
            return
        for p in self.carried.terms:
            self._refuse_if_changed(p, thorough=thorough)

    def _refuse_if_changed(self, p: Tensor, *, thorough: bool = False) -> None:
        if self._changed(p, thorough=thorough):
            raise RuntimeError(
                f"parameter {self.eps.terms[p].slot.number} of shape {tuple(p.shape)} was changed "
                "while it carried noise; change weights inside `with optimizer.denoised():`, or "
                "make the optimizer with the model. If it is now as the clean weights shall be, "
                "call optimizer.accept_weights()"
            )

    def _changed(self, p: Tensor, *, thorough: bool = True) -> bool:
        if p not in self._written:
            return False  # an interruption left it in between; it can be restored
        look = self._touched(p) or (thorough and self.keep.survives)
        return look and not self.keep.untouched(p, self.eps)

    def _touched(self, p: Tensor) -> bool:
        return p in self._written and self._written[p] != _mark(p)

    def _remember(self) -> None:
        """Note how we leave the weights, to notice if somebody else writes to them."""
        self._written = {p: _mark(p) for p in self.eps.terms}
        reshard(self.eps.terms)

    # Checkpoints of parameters that carry noise between steps.

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of what a checkpoint holds for each parameter."""
        return self.keep.keys if self.model is None else ()

    def saved(self, p: Tensor) -> tuple[Any, ...]:
        """What a checkpoint holds for a parameter, by the names in ``keys``."""
        if not self.keys:
            return ()
        with torch.no_grad():
            return self.keep.saved(p, self.carried)

    def recognise(
        self,
        p: Tensor,
        saved: Sequence[Any],
        eps: Perturbation,
        others: Sequence[Perturbation] = (),
    ) -> str | None:
        """Say if a parameter holds the "noisy" or "clean" weights of a checkpoint, or refuse.

        Noisy weights may carry ``eps`` or, instead of it, one of the others. Weights that are held
        clean may differ altogether: they are taken as they are (None).
        """
        with torch.no_grad():
            found = self.keep.recognise(p, local(p), saved, eps)
            for other in others:
                found = found or self.keep.recognise(p, local(p), saved, other)
        if found is None and not self.holds:
            raise ValueError(
                f"parameter {eps.terms[p].slot.number} of shape {tuple(p.shape)} holds neither the "
                "clean nor the perturbed weights that this state was saved with; load the model's "
                "weights before the optimizer's. An optimizer made with the model takes any order"
            )
        return found

    def load(
        self,
        saved: Mapping[Tensor, Sequence[Any]],
        found: Mapping[Tensor, str | None],
        *,
        before: Perturbation,
        after: Perturbation,
    ) -> None:
        """Go on from a checkpoint whose weights carried, if recognised as noisy, ``before``."""
        noisy = {p for p, weights in found.items() if weights == "noisy"}
        with torch.no_grad():
            for p in self.carried.terms.keys() - noisy:
                if p in self._written and not self._touched(p):  # it holds our noise still
                    self.keep.remove(self.eps.only(p))
            if self.holds or before != after:
                for p in noisy:
                    self.keep.load_clean(p, saved[p], before)
                noisy = set()
            self.eps, self.noisy = after, not self.holds
            for p in self.carried.terms:
                self.keep.load_noisy(p, saved[p], after, noisy=p in noisy)
        self._torn = False
        self._remember()


def _refuse_backward(gradient: Tensor) -> None:
    raise RuntimeError(
        "this is the gradient of an evaluation pass that was made between a training pass and its "
        "step(), when the weights carry noise in place; make the evaluation pass after step()"
    )


def noisy_weights(
    params: Sequence[Tensor], keep: Keeping, model: nn.Module | None
) -> NoisyWeights | forward.ForwardNoise:
    """The way in which an optimizer's weights carry noise.

    With a model, perturbed tensors stand in for parameters during a forward pass. Sharded
    parameters, which are gathered from their own memory, and replay mode, which needs no memory,
    carry their noise in place.
    """
    if model is None or not isinstance(keep, Exact) or any(map(is_sharded, params)):
        return NoisyWeights(set(params), keep, model)
    return forward.ForwardNoise(set(params), model)


def _mark(p: Tensor) -> tuple[int, int]:
    """Changes whenever the weights are written to."""
    # A sharded parameter counts what is written to it; its shard does not.
    return p._version, (local(p) if is_sharded(p) else p).data_ptr()
