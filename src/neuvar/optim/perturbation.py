"""The noise that a model's weights carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuvar.noise import BLOCK, Draw, Slot, pieces, standard_noise
from neuvar.optim.layout import local

Part = tuple[Tensor, Tensor, Tensor]
"""Perturbed weights to write, clean weights and standard draws to read, of equal shape."""


def perturb_(parts: Sequence[Part], b: float) -> None:
    """Set perturbed weights to clean weights plus b times the draws."""
    if parts[0][0].device.type == "cpu":
        # One pass over the weights; the foreach operations would make two of it.
        for live, clean, z in parts:
            torch.add(clean, z, alpha=b, out=live)
    else:
        perturb_foreach_(parts, b)


def perturb_foreach_(parts: Sequence[Part], b: float) -> None:
    """As :func:`perturb_`, with few launches for many tensors."""
    live, clean, z = zip(*parts, strict=True)
    torch._foreach_copy_(live, clean)
    torch._foreach_add_(live, z, alpha=b)


class Term(NamedTuple):
    """Noise of one parameter: where it lies, which draw, which scale."""

    slot: Slot
    draw: Draw
    b: float


@dataclass(frozen=True)
class Perturbation:
    """The noise of a whole model; parameters that carry none are absent."""

    terms: dict[Tensor, Term] = field(default_factory=dict)

    def add(self, *, to: Callable[[Tensor], Tensor], factor: int = 1) -> None:
        """Set each parameter to the clean weights that ``to`` gives for it, plus the noise."""
        waiting: dict[float, list[Part]] = {}
        for p, (slot, draw, b) in self.terms.items():
            live, scale = local(p), factor * draw.sign * b
            at_once = live.device.type == "cpu" or draw.sampler == "fresh"
            for part in _parts(live, to(p), slot, draw):
                if at_once:
                    perturb_([part], scale)
                else:
                    waiting.setdefault(scale, []).append(part)
        for scale, parts in waiting.items():
            perturb_(parts, scale)

    def along(self, p: Tensor, g: Tensor) -> Tensor:
        """Inner product of a parameter's noise with its gradient, in double precision."""
        slot, draw, b = self.terms[p]
        g = local(g)
        if not g.is_contiguous():
            g = g.contiguous()
        parts = [(x.float() * z).sum() for x, _, z in _parts(g, g, slot, draw)]
        return draw.sign * b * torch.stack(parts).sum().double()

    def turned(self) -> Perturbation:
        """The same noise with its sign turned."""
        return Perturbation(
            {
                p: term._replace(draw=term.draw._replace(sign=-term.draw.sign))
                for p, term in self.terms.items()
            }
        )

    def only(self, p: Tensor) -> Perturbation:
        """The noise of one parameter."""
        return Perturbation({p: self.terms[p]})

    def result(self, p: Tensor, clean: Tensor, *, factor: int = 1) -> Tensor:
        """What :meth:`add` would set one parameter to."""
        slot, draw, b = self.terms[p]
        out = torch.empty_like(clean)
        for part in _parts(out, clean, slot, draw):
            perturb_([part], factor * draw.sign * b)
        return out

    def is_on(self, p: Tensor, live: Tensor, clean: Tensor) -> bool:
        """Whether weights are, to the bit, the clean ones plus the noise of a parameter."""
        slot, draw, b = self.terms[p]
        for part in _parts(live, clean, slot, draw):
            chunks = (t.flatten().split(BLOCK) for t in part)  # not to need memory
            for x, c, z in zip(*chunks, strict=True):
                if not same_bits(x, torch.add(c, z, alpha=draw.sign * b).to(x.dtype)):
                    return False
        return True


NONE = Perturbation()


class _Link(torch.autograd.Function):
    """Passes a filled tensor on, and its gradient to the parameter that it was made from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, filled: Tensor) -> Tensor:
        return filled.view_as(filled)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """No-op: the gradient needs nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def added_noise(p: Tensor, term: Term) -> Tensor:
    """A parameter plus its noise as a new tensor, whose gradient goes to the parameter."""
    slot, draw, b = term
    if p.dtype in (torch.float32, torch.float64) and p.is_contiguous():
        (_, _, z), *more = pieces(slot, draw, p.device)
        if not more:
            return torch.add(p, z.view_as(p), alpha=draw.sign * b)
    filled = Perturbation({p: term}).result(p, p.detach())
    return _Link.apply(p, filled)  # type: ignore[no-any-return, no-untyped-call]


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal to the bit, not-a-numbers included."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.view(whole), y.view(whole))


def _parts(live: Tensor, clean: Tensor, slot: Slot, draw: Draw) -> Iterator[Part]:
    """Split a parameter into the pieces that its noise comes in."""
    if not (live.is_contiguous() and clean.is_contiguous()):
        yield live, clean, standard_noise(slot, draw, live.device)
        return
    size = live.numel()
    for low, high, z in pieces(slot, draw, live.device):
        if high - low == size:
            yield live, clean, z.view_as(live)
        else:
            yield live.view(-1)[low:high], clean.view(-1)[low:high], z
