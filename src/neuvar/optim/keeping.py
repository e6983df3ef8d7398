"""Two ways to get the clean weights back: keep them, or subtract the noise again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from neuvar.optim.layout import is_sharded, local, sharding
from neuvar.optim.perturbation import NONE, Perturbation, same_bits


class Keeping(Protocol):
    """What both ways can do."""

    keys: tuple[str, ...]
    """Names of what a checkpoint holds for each parameter."""

    survives: bool
    """Whether the clean weights can be had after an interruption in the middle of a write."""

    def remove(self, eps: Perturbation) -> None:
        """Restore the clean weights."""

    def prepare(self, eps: Perturbation, *, updated: Perturbation = NONE) -> None:
        """Get ready to perturb; weights of ``updated`` were taken back after an update."""

    def write(self, eps: Perturbation) -> None:
        """Perturb the weights that ``prepare`` saw."""

    def lend(self, eps: Perturbation) -> None:
        """Show the clean weights to the inner optimizer, to be updated."""

    def take_back(self, eps: Perturbation) -> None:
        """End what ``lend`` began; ``apply`` follows."""

    def clean(self, p: Tensor, eps: Perturbation) -> Tensor:
        """Copy the clean weights of a perturbed parameter."""

    def untouched(self, p: Tensor, eps: Perturbation) -> bool:
        """Whether a perturbed parameter that was written to has its value nevertheless."""

    def saved(self, p: Tensor, eps: Perturbation) -> tuple[Any, ...]:
        """The values for ``keys``; ``eps`` is what the weights carry now."""

    def recognise(
        self, p: Tensor, weights: Tensor, saved: Sequence[Any], eps: Perturbation
    ) -> str | None:
        """Say whether a parameter's weights are the saved "noisy" or "clean" ones, or neither."""

    def load_clean(self, p: Tensor, saved: Sequence[Any], eps: Perturbation) -> None:
        """Make weights clean that were recognised as noisy."""

    def load_noisy(
        self, p: Tensor, saved: Sequence[Any], eps: Perturbation, *, noisy: bool
    ) -> None:
        """Perturb weights that were recognised, unless they are noisy already."""


class Exact:
    """Keep the clean weights to the bit, in a buffer for each perturbed parameter."""

    keys: tuple[str, ...] = ("clean",)
    survives = True

    def __init__(self) -> None:
        self._buffers: dict[Tensor, Tensor] = {}
        self._lent: dict[Tensor, Tensor] = {}

    def remove(self, eps: Perturbation) -> None:
        for p in eps.terms.keys() & self._buffers.keys():  # others were not perturbed yet
            local(p).copy_(self._buffer(p))

    def prepare(self, eps: Perturbation, *, updated: Perturbation = NONE) -> None:
        if eps.terms.keys() == updated.terms.keys() == self._buffers.keys():
            return  # as in most steps
        for p in updated.terms.keys() - eps.terms.keys():  # it was frozen, or its b is 0 now
            local(p).copy_(self._buffer(p))
        for p in self._buffers.keys() - eps.terms.keys():
            del self._buffers[p]
        for p in eps.terms.keys() - updated.terms.keys():
            if p in self._buffers:
                self._buffer(p).copy_(local(p))
            else:
                self._buffers[p] = p.detach().clone()

    def write(self, eps: Perturbation) -> None:
        eps.add(to=self._buffer)

    def lend(self, eps: Perturbation) -> None:
        # The inner optimizer works on the buffer itself, which saves copying there and back.
        # Outside a step a parameter's memory stays where it is.
        try:
            for p in eps.terms:
                if is_sharded(p):
                    local(p).copy_(self._buffer(p))
                else:
                    self._lent[p] = p.data
                    p.data = self._buffers[p]
        except BaseException:
            for p in list(self._lent):
                p.data = self._lent.pop(p)
            raise

    def take_back(self, eps: Perturbation) -> None:
        for p in eps.terms:
            if (live := self._lent.pop(p, None)) is not None:
                if p.data_ptr() != self._buffers[p].data_ptr():  # an optimizer that rebinds data
                    self._buffers[p].copy_(p.data)
                p.data = live
            elif is_sharded(p):
                self._buffer(p).copy_(local(p))

    def clean(self, p: Tensor, eps: Perturbation) -> Tensor:
        return self._buffers[p].clone()

    def untouched(self, p: Tensor, eps: Perturbation) -> bool:
        self._buffers[p] = self._buffers[p].to(p.device)  # a model may be moved while perturbed
        same_type = self._buffers[p].dtype == p.dtype
        return same_type and eps.is_on(p, local(p), local(self._buffers[p]))

    def saved(self, p: Tensor, eps: Perturbation) -> tuple[Any, ...]:
        # The buffer, never the parameter, which noise may enter before the state is written.
        if p not in eps.terms:
            self._buffer(p).copy_(local(p))
        return (self._buffers[p],)

    def recognise(
        self, p: Tensor, weights: Tensor, saved: Sequence[Any], eps: Perturbation
    ) -> str | None:
        clean = local(saved[0]).to(weights)
        if clean.shape != weights.shape:
            return None
        if eps.is_on(p, weights, clean):
            return "noisy"
        return "clean" if same_bits(weights, clean) else None

    def load_clean(self, p: Tensor, saved: Sequence[Any], eps: Perturbation) -> None:
        local(p).copy_(local(saved[0]))

    def load_noisy(
        self, p: Tensor, saved: Sequence[Any], eps: Perturbation, *, noisy: bool
    ) -> None:
        self._buffer(p).copy_(local(saved[0]))
        eps.only(p).add(to=self._buffer)

    def _buffer(self, p: Tensor) -> Tensor:
        found = self._buffers.get(p)
        if found is None or (found.dtype, found.device) != (p.dtype, p.device):
            found = self._buffers[p] = torch.empty_like(p.detach())
        return local(found)


class Replay:
    """Keep nothing and subtract the noise again, at the cost of a rounding error."""

    keys: tuple[str, ...] = ("clean_bits", "noisy_bits")
    survives = False

    def __init__(self) -> None:
        self._loaded: dict[Tensor, int] = {}  # fingerprints of weights as a checkpoint left them

    def remove(self, eps: Perturbation) -> None:
        self._loaded.clear()
        eps.add(to=local, factor=-1)

    def prepare(self, eps: Perturbation, *, updated: Perturbation = NONE) -> None:
        """Nothing is to be done."""

    def write(self, eps: Perturbation) -> None:
        eps.add(to=local)

    def lend(self, eps: Perturbation) -> None:
        self.remove(eps)

    def take_back(self, eps: Perturbation) -> None:
        """Nothing is to be done: the parameters themselves were updated."""

    def clean(self, p: Tensor, eps: Perturbation) -> Tensor:
        # The parameter goes the way that it would go in a run resumed from the copy.
        self.remove(eps.only(p))
        found = p.detach().clone()
        self.write(eps.only(p))
        return found

    def untouched(self, p: Tensor, eps: Perturbation) -> bool:
        # There is nothing to compare it with, but right after a checkpoint was loaded: torch's
        # set_state_dict gives the optimizer its state, then the model the weights it has already.
        return self._loaded.get(p) == int(_sum_of_bits(local(p)))

    def saved(self, p: Tensor, eps: Perturbation) -> tuple[Any, ...]:
        here = _bits(p, local(p))
        if p not in eps.terms:
            return here, here
        return _bits(p, eps.result(p, local(p), factor=-1)), here

    def recognise(
        self, p: Tensor, weights: Tensor, saved: Sequence[Any], eps: Perturbation
    ) -> str | None:
        clean, noisy = saved
        return {noisy: "noisy", clean: "clean"}.get(_bits(p, weights))

    def load_clean(self, p: Tensor, saved: Sequence[Any], eps: Perturbation) -> None:
        self.remove(eps.only(p))

    def load_noisy(
        self, p: Tensor, saved: Sequence[Any], eps: Perturbation, *, noisy: bool
    ) -> None:
        if not noisy:
            self.write(eps.only(p))
        self._loaded[p] = int(_sum_of_bits(local(p)))


def _sum_of_bits(weights: Tensor) -> Tensor:
    whole = torch.int64 if weights.element_size() == 8 else torch.int32
    return weights.contiguous().view(whole).sum(dtype=torch.int64)


def _bits(p: Tensor, weights: Tensor) -> int:
    """Sum of the bit patterns of a parameter's weights, the same however they are sharded."""
    total = _sum_of_bits(weights)
    if is_sharded(p):
        mesh, placements = sharding(p)
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return int(total)
