"""Parameters that carry noise: which, whether it is on, and who wants it off."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from neuvar.optim.keeping import NONE, Keeping
from neuvar.optim.layout import is_sharded, local, reshard
from neuvar.optim.perturbation import Perturbation

_CARRIERS = WeakTensorKeyDictionary()
"""For each parameter a weak reference to what last put noise on it."""


def foreign_noise(p: Tensor, own: NoisyWeights | None) -> bool:
    """Whether a parameter carries the noise of another optimizer."""
    carrier: NoisyWeights | None = _CARRIERS.get(p, lambda: None)()
    return carrier is not None and carrier is not own and p in carrier.carried.terms


@contextmanager
def held_clean(params: Iterable[Tensor]) -> Iterator[None]:
    """Keep parameters free of the noise of whichever optimizer trains them."""
    found = (_CARRIERS.get(p, lambda: None)() for p in params)
    carriers: list[NoisyWeights] = list({id(c): c for c in found if c is not None}.values())
    reason = object()
    try:
        for carrier in carriers:
            carrier.hold(reason)
        yield
    finally:
        for carrier in carriers:
            carrier.release(reason)


class NoisyWeights:
    """Puts noise on parameters and takes it off, and notices if somebody else writes to them."""

    def __init__(self, keep: Keeping) -> None:
        self.keep = keep
        self.eps = NONE
        self.noisy = False
        self.holds: set[object] = set()
        self._torn = False
        self._written: dict[Tensor, tuple[int, int]] = {}
        self._listed: set[Tensor] = set()

    def __getstate__(self) -> dict[str, Any]:
        if self.noisy and self.eps.terms and not self.keep.survives:
            raise RuntimeError(
                "in replay mode an optimizer can be copied or pickled only inside "
                "`with optimizer.denoised():`"
            )
        # Whoever holds the weights clean now will not release the copy: it begins in eval mode.
        holds = {"eval"} if self.holds else set()
        return self.__dict__ | {"holds": holds, "_written": {}, "_listed": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.noisy:
            # A model that was copied along may have been copied clean.
            with torch.no_grad():
                self.keep.write(self.eps)
            self._remember()

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
        with torch.no_grad():
            self.keep.prepare(self.eps, updated=updated)
        self.noisy = True
        with self._writing():
            self.keep.write(self.eps)
        self._remember()

    def lend(self) -> Perturbation:
        """Show the clean weights to the inner optimizer; returns what ``take_back`` needs."""
        # Writes that leave no trace are looked for now and then: the habit shows at once.
        draws = max((term.draw.number for term in self.carried.terms.values()), default=0)
        self.check_untouched(thorough=draws.bit_count() == 1)
        lent = self.carried
        with self._writing():
            self.keep.lend(lent)
        return lent

    def take_back(self, lent: Perturbation, eps: Perturbation) -> None:
        """Perturb the updated weights."""
        with torch.no_grad():
            self.keep.take_back(lent)
        self.eps = eps
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
                "while it carried noise; change weights inside `with optimizer.denoised():` or "
                "guard the model. If it is now as the clean weights shall be, call "
                "optimizer.accept_weights()"
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
        if self._listed != self.eps.terms.keys():
            self._listed = set(self.eps.terms)
            _CARRIERS.update(dict.fromkeys(self._listed, weakref.ref(self)))
        self._written = {p: _mark(p) for p in self.eps.terms}
        reshard(self.eps.terms)

    # Checkpoints.

    def saved(self, p: Tensor) -> tuple[Any, ...]:
        """What a checkpoint holds for a parameter, by the names in ``keep.keys``."""
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
            if found is None and p in self.carried.terms and not self._touched(p):
                # A guarded model takes clean weights up and perturbs them by the present noise.
                under = local(self.clean_copy(p))
                found = "clean" if self.keep.recognise(p, under, saved, eps) == "clean" else None
            for other in others:
                found = found or self.keep.recognise(p, local(p), saved, other)
        if found is None and not self.holds:
            raise ValueError(
                f"parameter {eps.terms[p].slot.number} of shape {tuple(p.shape)} holds neither the "
                "clean nor the perturbed weights that this state was saved with; load the model's "
                "weights of the same moment first. To go on from other weights, which are taken "
                "for clean, load inside `with optimizer.denoised():`"
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


def _mark(p: Tensor) -> tuple[int, int]:
    """Changes whenever the weights are written to."""
    # A sharded parameter counts what is written to it; its shard does not.
    return p._version, (local(p) if is_sharded(p) else p).data_ptr()
